"""The console script `buffer`: serves one run's replay buffer until it is told to stop."""

from slipstream.configs.runtime.signals import restore_default_sigint


def main() -> None:
    """Entry point."""
    restore_default_sigint()
    from slipstream.buffer import process

    process.main()


if __name__ == "__main__":
    main()
