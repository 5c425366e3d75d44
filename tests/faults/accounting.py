"""The invariant after every fault: no group is lost, and none was trained on twice."""

from collections import Counter, defaultdict

from redis.asyncio import Redis

from slipstream.buffer.store.account import account
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.reader import LedgerReader
from slipstream.buffer.store.redis import run_prefix
from slipstream.buffer.store.spill import SpillFolder
from slipstream.buffer.wire.codec import decode_group
from slipstream.configs import RunConfig

History = dict[int, list[str]]


async def committed(redis: Redis, config: RunConfig) -> History:
    """Ids of the groups that each step was trained on and that no restart has undone, sorted; of a run of one shard."""
    prefix = run_prefix(config.run.name)
    trained = [*await redis.zrange(f"{prefix}:trained", 0, -1), *await redis.zrange(f"{prefix}:durable", 0, -1)]
    history: defaultdict[int, list[str]] = defaultdict(list)
    for group_id in map(bytes.decode, trained):
        for step in await redis.lrange(f"{prefix}:steps:{group_id}", 0, -1):
            history[int(step)].append(group_id)
    return {step: sorted(ids, key=int) for step, ids in sorted(history.items())}


async def assert_accounted_for(redis: Redis, config: RunConfig, *, steps: int) -> History:
    """The ledger is sound, knows every group that was ever issued, and has each step's groups exactly once.

    Retention must be large enough that nothing was forgotten.
    """
    ledger = Ledger(redis, config)
    assert await ledger.verify() == []
    await _assert_account_fits_groups(redis, config)
    issued = (await ledger.counts()).issued
    prefix = run_prefix(config.run.name)
    unknown = [
        number for number in range(1, issued + 1) if not await redis.hexists(f"{prefix}:about:{number}", "state")
    ]
    assert not unknown, f"of {issued} groups these are lost: {unknown}"
    history = await committed(redis, config)
    assert list(history) == list(range(steps))
    sizes = {step: len(ids) for step, ids in history.items() if len(ids) != config.learner.groups_per_step}
    assert not sizes, f"steps with too few or too many groups: {sizes}"
    uses = Counter(group_id for ids in history.values() for group_id in ids)
    twice = [group_id for group_id, count in uses.items() if count > 1]
    assert not twice, f"trained on more than once: {twice}"
    return history


async def _assert_account_fits_groups(redis: Redis, config: RunConfig) -> None:
    """The tokens in the account are those in the bytes of the groups, which are used once."""
    total = (await account(Ledger(redis, config).scripts)).total
    assert total.closes
    reader = LedgerReader(redis, config.run.name, SpillFolder(config.paths.spill))
    for states, tokens in ((("trained", "durable"), total.trained), (("ready",), total.ready)):
        ids = [group_id for state in states for group_id in await reader.ids(state)]
        blobs = [record.blob for record in await reader.groups(ids) if record is not None]
        groups = [decode_group(blob) for blob in blobs if blob is not None]
        masks = [trajectory.action_mask for group in groups for trajectory in group.trajectories]
        assert tokens == sum(mask.count(1) for mask in masks), states
