"""The console script `learner`: one learner rank, alone or under torchrun."""

from slipstream.configs.runtime.signals import end_on_ctrl_c


def main() -> None:
    """Entry point."""
    end_on_ctrl_c()
    from slipstream.learner import process

    process.main()


if __name__ == "__main__":
    main()
