"""The console script `rollout`: one rollout server, until it is told to stop."""

from slipstream.configs.runtime.signals import end_on_ctrl_c


def main() -> None:
    """Entry point."""
    end_on_ctrl_c()
    from slipstream.rollout_servers import process

    process.main()


if __name__ == "__main__":
    main()
