"""Names of a run's keys in Redis. Those of a shard share one hash tag, so that one Lua call may touch them all on a
cluster; a group's id says which shard it is in."""


def run_prefix(run: str) -> str:
    """What the keys of all shards of the run begin with."""
    return f"{{slipstream:{run}:"


def shard_prefix(run: str, shard: int) -> str:
    """The prefix of every key of one shard."""
    return f"{run_prefix(run)}{shard}}}"


def shard_of(group_id: str, shards: int) -> int:
    """The shard of a group: its number modulo `shards`. Evaluations, whose ids are no numbers, are in shard 0."""
    return int(group_id) % shards if group_id.isdecimal() else 0


def group_key(run: str, group_id: str, *, shards: int = 1) -> str:
    """The key under which a group's bytes are stored."""
    return f"{shard_prefix(run, shard_of(group_id, shards))}:group:{group_id}"
