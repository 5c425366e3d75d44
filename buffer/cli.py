"""The console script `buffer`: serves one run's replay buffer until it is told to stop."""

from slipstream.configs.runtime.signals import end_on_ctrl_c


def main() -> None:
    """Entry point."""
    end_on_ctrl_c()
    from slipstream.buffer import process

    process.main()


if __name__ == "__main__":
    main()
