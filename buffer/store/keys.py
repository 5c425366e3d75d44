"""Names of a run's keys in Redis."""


def run_prefix(run: str) -> str:
    """The prefix of every key of the run."""
    return f"{{slipstream:{run}}}"


def group_key(run: str, group_id: str) -> str:
    """The key under which a group's bytes are stored."""
    return f"{run_prefix(run)}:group:{group_id}"
