"""Kept groups of trained steps: written, limited, read back, and what goes wrong."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from redis.asyncio import Redis

from slipstream.buffer.store import kept
from slipstream.buffer.store.kept import Keeper, KeptGroups, KeptGroupsError
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.spill import Spiller, SpillFolder
from tests.buffer.ledger import lease, leased, ruled, trim
from tests.full_disk import files_of_at_most

MakeKeeper = Callable[..., Keeper]


@pytest.fixture
def store(store: Ledger) -> Ledger:
    """A ledger whose groups are all large."""
    return ruled(store, spill_bytes=0)


@pytest.fixture
def make_keeper(store: Ledger, tmp_path: Path) -> MakeKeeper:
    """The service's keeper with another `buffer.keep_trained` and other keys of `buffer`."""

    def make(keep: str | int = "all", **settings: Any) -> Keeper:
        config = ruled(store, keep_trained=keep, **settings).config
        return Keeper(store.scripts, config.model_copy(update={"run": config.run.model_copy(update={"dir": tmp_path})}))

    return make


async def train(store: Ledger, step: int, groups: int = 2) -> list[str]:
    ids = await leased(store, step, groups)
    await store.train(step)
    return ids


def bytes_of(ids: list[str]) -> dict[str, bytes]:
    return {group_id: f"bytes of {group_id}".encode() for group_id in ids}


def files(keeper: Keeper) -> dict[int, dict[str, bytes]]:
    return {step: keeper.folder.read(step) for step in keeper.folder.steps()}


@pytest.mark.parametrize("is_spilled", [False, True])
async def test_groups_outlive_the_ledger(
    is_spilled: bool, store: Ledger, make_keeper: MakeKeeper, tmp_path: Path
) -> None:
    keeper = make_keeper()
    steps = {step + 1: await train(store, step) for step in range(2)}
    if is_spilled:
        folder = SpillFolder(tmp_path / store.run / "spill")
        await Spiller(store.scripts, folder, spill_bytes=0).spill()
    await keeper.keep()
    await store.durable(2)
    assert await trim(store, keep=0, max_age_s=None, until_exported=False) == 4
    await keeper.keep()
    assert files(keeper) == {step: bytes_of(ids) for step, ids in steps.items()}
    assert keeper.errors == 0
    assert await store.verify() == []


@pytest.mark.parametrize(("keep", "steps"), [(0, []), (2, [3, 4]), ("all", [1, 2, 3, 4]), ("auto", [1, 2, 3, 4])])
async def test_latest_steps_are_kept(keep: str | int, steps: list[int], store: Ledger, make_keeper: MakeKeeper) -> None:
    keeper = make_keeper(keep)
    for step in range(4):
        await train(store, step)
        if step != 1:  # two at once
            await keeper.keep()
    assert keeper.folder.steps() == steps


async def test_restarted_service_continues(store: Ledger, make_keeper: MakeKeeper) -> None:
    first, keeper = await train(store, 0), make_keeper()
    await keeper.keep()
    second = await train(store, 1)
    (keeper.folder.root / ".step-000000002-0000.zst").write_bytes(b"half")
    restarted = make_keeper()
    await restarted.keep()
    assert files(restarted) == {1: bytes_of(first), 2: bytes_of(second)}
    assert len([*keeper.folder.root.iterdir()]) == 2


async def test_undone_steps_are_written_again(store: Ledger, make_keeper: MakeKeeper) -> None:
    keeper = make_keeper()
    for step in range(3):
        await train(store, step)
    await keeper.keep()
    await store.restart(1, learner="another")
    await keeper.keep()
    for step in (2, 3):
        keeper.folder.remove(step)
    ids = await lease(store, 1, 2)
    await store.train(1)
    await keeper.keep()
    assert files(keeper)[2] == bytes_of(ids)
    assert keeper.folder.steps() == [1, 2]


async def test_steps_that_are_undone_while_they_are_written_are_written_again(
    store: Ledger, make_keeper: MakeKeeper
) -> None:
    keeper = make_keeper()
    for step in range(2):
        await train(store, step)
    await asyncio.gather(keeper.keep(), keeper.undo(1))
    keeper.folder.remove(2)
    await keeper.keep()
    assert keeper.folder.steps() == [1, 2]


async def test_group_of_several_steps_is_kept_for_each(store: Ledger, make_keeper: MakeKeeper) -> None:
    twice, keeper = ruled(store, max_uses=2), make_keeper(max_uses=2)
    ids = await leased(twice, 0, 2)
    await twice.train(0)
    assert await lease(twice, 1, 2) == ids
    await twice.train(1)
    await keeper.keep()
    assert files(keeper) == {1: bytes_of(ids), 2: bytes_of(ids)}


async def test_many_bytes_take_several_files(
    store: Ledger, make_keeper: MakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = make_keeper()
    monkeypatch.setattr(kept, "FILE_BYTES", 25)
    ids = await train(store, 0, groups=5)
    await keeper.keep()
    assert len([*keeper.folder.root.iterdir()]) == 3
    monkeypatch.undo()
    await make_keeper().keep()  # the latest step once more
    assert len([*keeper.folder.root.iterdir()]) == 1
    assert files(keeper) == {1: bytes_of(ids)}


async def test_auto_keeps_nothing_of_large_steps(
    store: Ledger, make_keeper: MakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "AUTO_BYTES", 100)
    keeper = make_keeper("auto")
    for step in range(2):
        await train(store, step)
        with structlog.testing.capture_logs() as logs:
            await keeper.keep()
        assert len(logs) == (step == 0), "once"
    assert keeper.folder.steps() == []
    assert keeper.errors == 0


async def test_full_disk_is_tried_again(
    store: Ledger, make_keeper: MakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = make_keeper()
    ids = await train(store, 0)
    with structlog.testing.capture_logs() as logs, files_of_at_most(5):
        await keeper.keep()
        await keeper.keep()  # waits
        monkeypatch.setattr(keeper, "_retry_at", 0.0)
        await keeper.keep()
    assert [each["log_level"] for each in logs] == ["warning"], "once"
    assert keeper.errors == 2
    assert [*keeper.folder.root.iterdir()] == []
    monkeypatch.setattr(keeper, "_retry_at", 0.0)
    await keeper.keep()
    assert files(keeper) == {1: bytes_of(ids)}


async def test_step_with_a_lost_group_is_left_out(store: Ledger, redis: Redis, make_keeper: MakeKeeper) -> None:
    keeper = make_keeper()
    ids = await train(store, 0)
    second = await train(store, 1)
    await redis.delete(f"{store.scripts.prefix}:group:{ids[0]}")
    with structlog.testing.capture_logs() as logs:
        await keeper.keep()
    assert [each["step"] for each in logs] == [1]
    assert (keeper.errors, files(keeper)) == (1, {2: bytes_of(second)})


@pytest.mark.parametrize("damage", [b"", b"bytes", None])
def test_damaged_file_is_an_error(damage: bytes | None, tmp_path: Path) -> None:
    folder = KeptGroups(tmp_path / "groups")
    folder.write(3, 0, {"1": b"bytes" * 100})
    (path,) = folder.root.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(KeptGroupsError, match=path.name):
        folder.read(3)
    assert folder.read(4) == {}
