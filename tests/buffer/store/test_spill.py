"""Spill files: written, read back, lost, removed, and left behind by a killed process."""

import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog
from redis.asyncio import Redis

from slipstream.buffer.store import spill
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.reader import LedgerReader
from slipstream.buffer.store.redis import group_key, run_prefix
from slipstream.buffer.store.spill import Location, Spiller, SpillError, SpillFolder
from slipstream.buffer.store.types import SpilledGroupsError
from tests.buffer.ledger import counts, lease, leased, ready, ruled, states, trim
from tests.buffer.rollback import Moment


@pytest.fixture
def store(redis: Redis, run_name: str, store: Ledger) -> Ledger:
    """A ledger whose groups are all large."""
    return ruled(store, spill_bytes=0)


@pytest.fixture
def folder(tmp_path: Path) -> SpillFolder:
    return SpillFolder(tmp_path / "run" / "spill")


@pytest.fixture
def spiller(store: Ledger, folder: SpillFolder) -> Spiller:
    return Spiller(store.scripts, folder, spill_bytes=0)


async def trained(store: Ledger, groups: int, *, step: int = 0) -> list[str]:
    ids = await leased(store, step, groups)
    await store.train(step)
    return ids


async def spilled(store: Ledger, spiller: Spiller, groups: int, *, step: int = 0) -> list[str]:
    ids = await trained(store, groups, step=step)
    await spiller.spill()
    return ids


async def in_redis(store: Ledger, ids: list[str]) -> list[str]:
    return [group_id for group_id in ids if await store.scripts.redis.exists(group_key(store.run, group_id))]


async def lease_restored(store: Ledger, spiller: Spiller, step: int, count: int) -> list[str]:
    """As the service leases."""
    while True:
        try:
            return await lease(store, step, count)
        except SpilledGroupsError as error:
            assert await spiller.restore(error.ids)


# --- files ------------------------------------------------------------------------------------------------------------


def test_written_bytes_are_read_back(folder: SpillFolder) -> None:
    blobs = {"1": b"first", "2": b"", "3": b"third"}
    locations = folder.write("file", blobs)
    assert {group_id: folder.read(Location.parse(str(at))) for group_id, at in locations.items()} == blobs
    assert folder.files() == {at.file for at in locations.values()}


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_damaged_file_is_an_error(folder: SpillFolder, damage: str) -> None:
    location = folder.write("file", {"1": b"bytes"})["1"]
    path = folder.root / location.file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"byte" if damage == "truncated" else b"Bytes")
    with pytest.raises(SpillError, match=location.file):
        folder.read(location)


@pytest.mark.parametrize("text", ["", "../x:0:1:f", "a:0:1", "a:-1:1:f", "a:0:1:g"])
def test_invalid_location_is_an_error(text: str) -> None:
    with pytest.raises(SpillError):
        Location.parse(text)


# --- trained groups ---------------------------------------------------------------------------------------------------


async def test_trained_groups_leave_redis(store: Ledger, spiller: Spiller, folder: SpillFolder) -> None:
    ids = await trained(store, 3)
    waiting = await ready(store, 1)
    await spiller.spill()
    assert await in_redis(store, [*ids, *waiting]) == waiting
    found = await LedgerReader(store.scripts.redis, store.run, folder).groups(ids)
    assert [each and each.blob for each in found] == [f"bytes of {group_id}".encode() for group_id in ids]
    counted = await counts(store)
    assert (counted.spilled, counted.spilled_bytes) == (3, 3 * len("bytes of 1"))
    assert len(folder.files()) == 1
    assert await store.durable(1) == 3
    assert await store.verify() == []


async def test_small_groups_stay_in_redis(store: Ledger, folder: SpillFolder) -> None:
    store = ruled(store, spill_bytes=len("bytes of 1"))
    ids = await spilled(store, Spiller(store.scripts, folder), 2)
    assert await in_redis(store, ids) == ids


async def test_groups_of_a_batch_are_split_by_size(
    store: Ledger, spiller: Spiller, folder: SpillFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "FILE_BYTES", 25)
    monkeypatch.setattr(spill, "TRANSFER_BYTES", 10)
    await spilled(store, spiller, 5)
    assert sorted((folder.root / name).stat().st_size for name in folder.files()) == [10, 20, 20]


async def test_group_with_uses_left_stays_in_redis(store: Ledger, spiller: Spiller) -> None:
    twice = ruled(store, max_uses=2)
    ids = await leased(twice, 0, 2)
    await twice.train(0)
    await spiller.spill()
    assert await in_redis(store, ids) == ids
    assert await lease(twice, 1, 2) == ids
    await twice.train(1)
    await spiller.spill()
    assert await in_redis(store, ids) == []


async def test_forgotten_groups_leave_no_location(store: Ledger, spiller: Spiller) -> None:
    await spilled(store, spiller, 2)
    await store.durable(1)
    assert await trim(store, keep=1, max_age_s=None, until_exported=False) == 1
    assert (await counts(store)).spilled == 1
    assert await store.verify() == []


# --- undone steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_durable", [False, True])
async def test_undone_groups_are_read_back(store: Ledger, spiller: Spiller, is_durable: bool) -> None:
    ids = await spilled(store, spiller, 2)
    if is_durable:
        await store.durable(1)
    assert await store.restart(0, learner="another") == (2, 0)
    assert await in_redis(store, ids) == [], "not before they are leased"
    assert await store.verify() == []
    assert await lease_restored(store, spiller, 0, 2) == ids
    assert await store.scripts.redis.mget([group_key(store.run, group_id) for group_id in ids]) == [
        f"bytes of {group_id}".encode() for group_id in ids
    ]
    assert (await counts(store)).spilled_bytes == 0
    assert await store.verify() == []
    await store.train(0)
    await spiller.spill()
    assert await in_redis(store, ids) == []
    assert await store.verify() == []


async def test_group_undone_during_the_write_keeps_its_bytes(
    store: Ledger, spiller: Spiller, folder: SpillFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await trained(store, 2)
    call = store.scripts.call

    async def undone_first(name: str, **arguments: object) -> object:
        if name == "spill":
            await store.restart(0, learner="another")
        return await call(name, **arguments)

    monkeypatch.setattr(store.scripts, "call", undone_first)
    await spiller.spill()
    assert folder.files()
    assert await in_redis(store, ids) == ids
    assert await store.verify() == []


async def test_lost_bytes_cost_their_groups(store: Ledger, spiller: Spiller, folder: SpillFolder) -> None:
    lost = await spilled(store, spiller, 2)
    (file,) = folder.files()
    kept = await spilled(store, spiller, 2, step=1)
    (folder.root / file).write_bytes(b"x" * 20)
    await store.restart(0, learner="another")
    with structlog.testing.capture_logs() as logs:
        assert await lease_restored(store, spiller, 0, 2) == kept
    assert [(each["log_level"], each["groups"]) for each in logs] == [("error", 2)]
    assert (await counts(store)).reasons == {"expired:bytes_lost": 2}
    assert await states(store) == {"leased": 2, "expired": 2}
    assert spiller.errors == 2
    assert not await in_redis(store, lost)
    assert await store.verify() == []


async def test_lost_bytes_of_a_group_used_before_end_its_uses(
    store: Ledger, spiller: Spiller, folder: SpillFolder
) -> None:
    twice = ruled(store, max_uses=2)
    ids = await leased(twice, 0, 2)
    await twice.train(0)
    assert await lease(twice, 1, 2) == ids
    await twice.train(1)
    await spiller.spill()
    for name in folder.files():
        (folder.root / name).unlink()
    assert await twice.restart(1, learner="another") == (2, 0)
    assert await lease_restored(twice, spiller, 1, 2) == []
    assert await states(store) == {"trained": 2}
    assert (await store.step_tally()).groups == {0: 2}
    assert await store.verify() == []


async def test_stale_spilled_groups_expire_unread(store: Ledger, spiller: Spiller) -> None:
    await spilled(store, spiller, 2)
    await store.restart(0, learner="another")
    assert await lease(store, 0, 2, consuming_version=2) == []
    assert (await counts(store)).reasons == {"expired:too_stale": 2}
    assert (await counts(store)).spilled == 0
    assert await store.verify() == []


# --- faults -----------------------------------------------------------------------------------------------------------


async def test_full_disk_keeps_bytes_in_redis(
    store: Ledger, spiller: Spiller, folder: SpillFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "RETRY_S", 0.0)
    ids = await trained(store, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with structlog.testing.capture_logs() as logs:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
        try:
            await spiller.spill()
            await spiller.spill()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [each["log_level"] for each in logs] == ["warning"], "once"
    assert spiller.errors == 2
    assert await in_redis(store, ids) == ids
    assert folder.files() == set()
    await spiller.spill()
    assert await in_redis(store, ids) == []


async def test_failed_write_is_not_repeated_at_once(store: Ledger, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spiller = Spiller(store.scripts, SpillFolder(tmp_path / "file"), spill_bytes=0)
    await trained(store, 1)
    for _ in range(2):
        await spiller.spill()
    assert spiller.errors == 1


KILL_POINTS = {
    "write": "spill.write_atomically", "fsync": "files.os.fsync", "rename": "files.Path.rename",
    "fsync of the folder": "files.fsync_path", "script": "Scripts.call",
}  # fmt: skip
"""What the killed process reaches last."""
SPILL_UNTIL_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path

from redis.asyncio import Redis

from slipstream.buffer.store import spill
from slipstream.buffer.store.redis import Scripts
from slipstream.configs.runtime import files

url, run, folder, point = sys.argv[1:]
call = Scripts.call

def die(*arguments, **named):
    if point == "Scripts.call" and arguments[1] != "spill":
        return call(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)

exec(f"{point} = die")

async def work():
    async with Redis.from_url(url) as redis:
        await spill.Spiller(Scripts(redis, run), spill.SpillFolder(Path(folder)), spill_bytes=0).spill()

asyncio.run(work())
"""


@pytest.mark.parametrize("point", KILL_POINTS)
async def test_killed_process_loses_no_bytes(
    redis_url: str, store: Ledger, spiller: Spiller, folder: SpillFolder, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    ids = await trained(store, 3)
    folder.root.mkdir(parents=True)
    monkeypatch.setattr(spill, "UNREFERENCED_S", 0.0)
    command = [sys.executable, "-c", SPILL_UNTIL_KILLED, redis_url, store.run, str(folder.root), KILL_POINTS[point]]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    assert await in_redis(store, ids) == ids
    assert await store.verify() == []
    left = folder.files()
    await spiller.spill()
    assert await in_redis(store, ids) == []
    assert await spiller.remove_unreferenced() == len(left)
    await store.restart(0, learner="another")
    assert await lease_restored(store, spiller, 0, 3) == ids
    assert await store.verify() == []


async def test_redis_that_lost_a_spill_has_the_bytes(store: Ledger, spiller: Spiller, run_name: str) -> None:
    ids = await trained(store, 2)
    before = await Moment.of(store.scripts.redis, run_name)
    await spiller.spill()
    await before.return_to()
    assert await in_redis(store, ids) == ids
    await spiller.spill()
    assert await in_redis(store, ids) == []
    assert await store.verify() == []


async def test_redis_that_lost_a_restore_reads_the_file_again(store: Ledger, spiller: Spiller, run_name: str) -> None:
    ids = await spilled(store, spiller, 2)
    await store.restart(0, learner="another")
    before = await Moment.of(store.scripts.redis, run_name)
    assert await lease_restored(store, spiller, 0, 2) == ids
    assert await spiller.remove_unreferenced() == 0, "not at once"
    await before.return_to()
    assert await lease_restored(store, spiller, 0, 2) == ids
    assert await store.verify() == []


async def test_restore_that_was_cut_off_is_repeated(store: Ledger, spiller: Spiller) -> None:
    ids = await spilled(store, spiller, 2)
    await store.restart(0, learner="another")
    await store.scripts.redis.set(group_key(store.run, ids[0]), f"bytes of {ids[0]}")
    assert await store.verify() == []
    assert await lease_restored(store, spiller, 0, 2) == ids
    assert await store.verify() == []


# --- files without a group, groups without a file ---------------------------------------------------------------------


async def test_unreferenced_files_are_removed(
    store: Ledger, spiller: Spiller, folder: SpillFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await spilled(store, spiller, 2)
    (kept,) = folder.files()
    (folder.root / ".partial.123").touch()
    assert await spiller.remove_unreferenced() == 0
    monkeypatch.setattr(spill, "UNREFERENCED_S", 0.0)
    assert await spiller.remove_unreferenced() == 1
    assert folder.files() == {kept}
    await store.durable(1)
    await trim(store, keep=0, max_age_s=None, until_exported=False)
    assert await spiller.remove_unreferenced() == 1
    assert folder.files() == set()


async def forget_run(store: Ledger, before: Moment) -> None:
    async for key in store.scripts.redis.scan_iter(match=f"{run_prefix(store.run)}*"):
        await store.scripts.redis.delete(key)


async def restore_older(store: Ledger, before: Moment) -> None:
    await before.return_to()


@pytest.mark.parametrize("lose", [forget_run, restore_older])
async def test_files_of_another_ledger_are_moved_aside(
    store: Ledger,
    spiller: Spiller,
    folder: SpillFolder,
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Ledger, Moment], Awaitable[None]],
) -> None:
    monkeypatch.setattr(spill, "UNREFERENCED_S", 0.0)
    before = await Moment.of(store.scripts.redis, run_name)
    ids = await spilled(store, spiller, 2)
    known = await Moment.of(store.scripts.redis, run_name)
    files = folder.files()
    await lose(store, before)
    with structlog.testing.capture_logs() as logs:
        assert await spiller.remove_unreferenced() == 0
    (line,) = logs
    size_bytes = 2 * len("bytes of 1")
    assert (line["log_level"], line["files"], line["size_bytes"]) == ("error", 1, size_bytes)
    assert {path.name for path in Path(line["folder"]).iterdir()} == files
    assert await spiller.remove_unreferenced() == 0, "what was moved stays"

    await known.return_to()
    for name in files:
        (folder.aside / name).rename(folder.root / name)
    await store.restart(0, learner="another")
    assert await lease_restored(store, spiller, 0, 2) == ids


async def test_missing_file_is_logged_once(store: Ledger, spiller: Spiller, folder: SpillFolder) -> None:
    await spilled(store, spiller, 2)
    for name in folder.files():
        (folder.root / name).unlink()
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            await spiller.remove_unreferenced()
    assert [(each["log_level"], each["files"]) for each in logs] == [("error", 1)]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("spilled", "1", "no location"), ("spilled", "9", "a:0:1:f"), ("counters", "spilled_bytes", "7")],
)
async def test_verify_finds_wrong_locations(store: Ledger, spiller: Spiller, name: str, field: str, value: str) -> None:
    await spilled(store, spiller, 1)
    await store.scripts.redis.hset(f"{run_prefix(store.run)}:{name}", field, value)
    assert await store.verify() != []


async def test_verify_finds_leased_group_in_a_file(store: Ledger, spiller: Spiller) -> None:
    await leased(store, 0, 1)
    await store.scripts.redis.hset(f"{run_prefix(store.run)}:spilled", "1", "a:0:0:f")
    (problem,) = await store.verify()
    assert "spill file" in problem
