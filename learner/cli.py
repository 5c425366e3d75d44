"""The console script `learner`: one learner rank, alone or under torchrun."""

from slipstream.configs.runtime.signals import restore_default_sigint


def main() -> None:
    """Entry point."""
    restore_default_sigint()
    from slipstream.learner import process

    process.main()


if __name__ == "__main__":
    main()
