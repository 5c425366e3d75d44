"""The console script `rollout`: one rollout server, until it is told to stop."""

from slipstream.configs.runtime.signals import restore_default_sigint


def main() -> None:
    """Entry point."""
    restore_default_sigint()
    from slipstream.rollout_servers import process

    process.main()


if __name__ == "__main__":
    main()
