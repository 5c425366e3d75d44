"""Behaviour that all weight transports share: every byte arrives, or the transfer fails."""

import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.wire.weights.fabric import TransferError
from slipstream.buffer.wire.weights.layout import sweep
from slipstream.configs import RunConfig
from slipstream.configs.runtime.threads import TEARDOWN_THREAD_NAME
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports import Broadcast, build_transports
from slipstream.tools.keys import make_keys
from tests.conftest import free_port
from tests.contract.doomed import broadcast, doomed, offer, serve
from tests.contract.transfers import (
    BUCKET_BYTES,
    DEADLINE_S,
    Channel,
    Versions,
    damaged,
    in_thread,
    mislabelled,
    receive,
)
from tests.full_disk import files_of_at_most

FETCHED = ("ipc", "shm", "file", "stream")
Open = Callable[..., Channel]


@pytest.fixture
def channels(tmp_path: Path, run_name: str) -> Iterator[Open]:
    """Opens channels, and closes them after the test."""
    opened: list[Channel] = []

    def open_channel(name: str, **sections: Any) -> Channel:
        weights = {
            "transport": name,
            "store_port": free_port(),
            "stream_port": free_port(),
            "bucket_bytes": BUCKET_BYTES,
            "full_every": 3,
            "deadline_s": DEADLINE_S,
        } | sections.pop("weights", {})
        run = {"name": run_name, "dir": str(tmp_path)}
        config = RunConfig.model_validate({"run": run, "model": {"build": "digits"}, "weights": weights} | sections)
        opened.append(Channel(name, config, build_transports(config), Versions(run_name)))
        return opened[-1]

    yield open_channel
    for channel in opened:
        channel.transports.close()
        channel.versions.close()
        for server in channel.servers:
            server.receiver.close()
    sweep()  # what those who were killed have left


@pytest.fixture(params=["gloo", *FETCHED])
def channel(request: pytest.FixtureRequest, channels: Open) -> Channel:
    """Every transport."""
    return channels(request.param)


def test_every_byte_arrives_at_every_server(channel: Channel) -> None:
    steady, skipping = [channel.server() for _ in range(2)], channel.server()
    channel.send(channel.versions.next(), [*steady, skipping])
    for _ in range(5):  # more than a chain of differences is long
        snapshot = channel.versions.next()
        channel.send(snapshot, steady)
        assert [server.error for server in steady] == [None] * 2
        assert all(server.holds(snapshot) for server in steady)
    snapshot, late = channel.versions.next(), channel.server()
    channel.send(snapshot, [*steady, skipping, late])
    assert all(server.holds(snapshot) for server in (*steady, skipping, late))


@pytest.mark.parametrize("damage", ["bit", "version"])
def test_damaged_version_is_refused_and_next_arrives(channel: Channel, damage: str) -> None:
    server = channel.server()
    old, new = channel.versions.next(), channel.versions.next()
    if channel.name == "ipc":  # its sums are computed when it prepares a version
        channel.fetched.prepare(new)
    channel.send(damaged(new) if damage == "bit" else mislabelled(old, new), [server])
    assert isinstance(server.error, TransferError)
    assert server.staging.version == -1
    snapshot = channel.versions.next()
    channel.send(snapshot, [server])
    assert server.holds(snapshot)


# --- transfers that break off ----------------------------------------------------------------------------------------


def test_server_killed_in_broadcast_delays_nobody(channels: Open, forks: ForkServerContext) -> None:
    channel = channels("gloo")
    sender = channel.broadcast
    survivor, snapshot = channel.server(), channel.versions.next()
    channel.epoch = 1
    announce = channel.announce(snapshot.manifest)
    with doomed(forks, serve, channel.config, announce, channel.form(1, 3)) as victim:
        entering = in_thread(survivor.receiver.enter, channel.form(2, 3))
        sender.form(1, 3)
        entering.join()
        assert victim.said() == "begun"
        receiving = in_thread(receive, survivor, announce)
        victim.kill()
        began = time.monotonic()
        with pytest.raises(TransferError, match="version 1 was not sent"):
            sender.send(snapshot)
        receiving.join()
        assert time.monotonic() - began < DEADLINE_S
    assert isinstance(survivor.error, TransferError)
    assert survivor.staging.version == -1
    channel.send(snapshot, [survivor])
    assert survivor.holds(snapshot)


def test_server_killed_while_fetching_affects_nobody(channels: Open, forks: ForkServerContext) -> None:
    channel = channels("stream")
    survivor, snapshot = channel.server(), channel.versions.next()
    channel.fetched.prepare(snapshot)
    announce = channel.announce(snapshot.manifest, channel.source(snapshot, -1))
    with doomed(forks, serve, channel.config, announce) as victim:
        assert victim.said() == "begun"
    channel.send(snapshot, [survivor])
    assert survivor.holds(snapshot)


def test_sender_killed_in_broadcast_leaves_no_version(channels: Open, forks: ForkServerContext) -> None:
    channel = channels("gloo")
    channel.transports.close()
    server, snapshot = channel.server(), channel.versions.next()
    channel.epoch = 1
    with doomed(forks, broadcast, channel.config, f"{channel.config.run.name}-sent") as sender:
        server.receiver.enter(channel.form(1, 2))
        receiving = in_thread(receive, server, channel.announce(snapshot.manifest))
        assert sender.said() == "half sent"
        assert receiving.is_alive()
        sender.kill()
        receiving.join(DEADLINE_S)
    assert isinstance(server.error, TransferError)
    assert f"after {BUCKET_BYTES} of" in str(server.error)
    assert f"127.0.0.1:{channel.config.weights.store_port}" in str(server.error)
    assert server.staging.version == -1


def test_sender_killed_before_fetch_is_named(channels: Open, forks: ForkServerContext) -> None:
    channel = channels("stream")
    channel.transports.close()
    server = channel.server()
    with doomed(forks, offer, channel.config, f"{channel.config.run.name}-offered") as sender:
        manifest, source = sender.said()
    receive(server, channel.announce(manifest, source, deadline_s=1.0))
    assert isinstance(server.error, TransferError)
    assert f"127.0.0.1:{channel.config.weights.stream_port}" in str(server.error)
    assert server.staging.version == -1


@pytest.mark.parametrize("name", ["ipc", "shm", "file"])
def test_deleted_version_is_named(channels: Open, name: str) -> None:
    channel = channels(name)
    server, snapshot = channel.server(), channel.versions.next()
    channel.fetched.prepare(snapshot)
    source = channel.source(snapshot, -1)
    path = Path(source.place) / source.parts[0].name
    path.unlink()
    receive(server, channel.announce(snapshot.manifest, source))
    assert isinstance(server.error, TransferError)
    assert str(path) in str(server.error)
    assert server.staging.version == -1


def test_absent_rank_is_reported_to_all(channels: Open) -> None:
    channel = channels("gloo", weights={"deadline_s": 1.0})
    channel.epoch = 1
    failures: list[TransferError] = []

    def enter() -> None:
        try:
            channel.servers[0].receiver.enter(channel.form(1, 3))
        except TransferError as error:
            failures.append(error)

    channel.server()
    entering = in_thread(enter)
    with pytest.raises(TransferError, match=r"rank 2 of 3 did not enter .* within 1 s") as failure:
        channel.broadcast.form(1, 3)
    entering.join(DEADLINE_S)
    assert failure.value.absent == (2,)
    assert "rank 2 of 3 did not enter" in str(failures[0])


def test_abort_ends_broadcast_at_once(channels: Open) -> None:
    channel = channels("gloo")
    sender = channel.broadcast
    server, first = channel.server(), channel.versions.next()
    channel.send(first, [server])
    failures: list[TransferError] = []
    sending = in_thread(send_more_than_fits, sender, first, failures)
    sender.abort()
    sending.join(DEADLINE_S / 2)
    assert not sending.is_alive()
    assert "was left" in str(failures[0])
    channel.send(channel.versions.next(), [server])
    assert server.error is None


def test_late_end_of_aborted_broadcast_spares_next_one(channels: Open) -> None:
    channel = channels("gloo")
    sender = channel.broadcast
    deaf, hearing = channel.server(), channel.server()
    channel.enter([deaf])
    broken_off = in_thread(send_more_than_fits, sender, channel.versions.next(), [])
    sender.abort()
    broken_off.join(DEADLINE_S)
    channel.enter([hearing])
    snapshot, failures = channel.versions.next(), list[TransferError]()
    sending = in_thread(send_more_than_fits, sender, snapshot, failures)
    endings = [thread for thread in threading.enumerate() if thread.name == TEARDOWN_THREAD_NAME]
    assert endings, "the first broadcast is not over for gloo before its other end is gone"
    deaf.receiver.close()
    for ending in endings:
        ending.join(DEADLINE_S)
        assert not ending.is_alive()
    receive(hearing, channel.announce(snapshot.manifest))
    assert hearing.holds(snapshot)
    sender.abort()
    sending.join(DEADLINE_S)
    assert "was left" in str(failures[0])


@pytest.mark.parametrize("name", ["gloo", "stream"])
def test_closing_a_receiver_ends_its_transfer(channels: Open, name: str) -> None:
    channel = channels(name)
    server, snapshot = channel.server(), channel.versions.next()
    channel.send(snapshot, [server])
    source = None if channel.broadcasts else channel.source(snapshot, -1)
    if not channel.broadcasts:
        channel.transports.close()
    receiving = in_thread(receive, server, channel.announce(snapshot.manifest, source))
    server.receiver.close()
    receiving.join(DEADLINE_S / 2)
    assert isinstance(server.error, TransferError)
    assert server.staging.version == -1


@pytest.mark.parametrize("name", ["file", "stream"])
def test_difference_to_another_version_is_refused(channels: Open, name: str) -> None:
    channel = channels(name)
    steady, behind = channel.server(), channel.server()
    channel.send(channel.versions.next(), [steady, behind])
    channel.send(channel.versions.next(), [steady])
    snapshot = channel.versions.next()
    channel.fetched.prepare(snapshot)
    source = channel.source(snapshot, 2)
    assert [part.base for part in source.parts] == [2]
    receive(behind, channel.announce(snapshot.manifest, source))
    assert "the difference from version 2 to 3 can't be applied to version 1" in str(behind.error)
    assert behind.staging.version == -1
    receive(steady, channel.announce(snapshot.manifest, source))
    assert steady.holds(snapshot)


def test_stream_keeps_full_every_versions_of_differences(channels: Open) -> None:
    channel = channels("stream", weights={"full_every": 6})
    behind = channel.server()
    channel.send(channel.versions.next(few=True), [behind])
    for _ in range(5):
        snapshot = channel.versions.next(few=True)
        channel.fetched.prepare(snapshot)
    source = channel.source(snapshot, behind.staging.version)
    assert [part.base for part in source.parts] == [1, 2, 3, 4, 5]
    receive(behind, channel.announce(snapshot.manifest, source))
    assert behind.holds(snapshot)
    channel.fetched.prepare(snapshot := channel.versions.next(few=True))
    assert [part.base for part in channel.source(snapshot, 1).parts] == [None], "one more than it keeps"


@pytest.mark.parametrize("name", ["file", "stream"])
def test_bytes_of_earlier_learner_are_refused(channels: Open, name: str) -> None:
    """Both learners call something version 1; the difference to it makes nothing that was sent."""
    channel = channels(name)
    server = channel.server()
    channel.send(channel.versions.next(), [server])
    server.staging.data[:100] ^= 1
    channel.send(channel.versions.next(), [server])
    assert "version 1 here is another one" in str(server.error)
    snapshot = channel.versions.next()
    channel.send(snapshot, [server])
    assert server.holds(snapshot)


def send_more_than_fits(sender: Broadcast, snapshot: Snapshot, failures: list[TransferError]) -> None:
    """Sends, again and again, more than fits between sender and receiver; notes what that ends with."""
    try:
        for _ in range(1000):
            sender.send(snapshot)
    except TransferError as error:
        failures.append(error)


def test_full_folder_is_named_and_left_empty(channels: Open) -> None:
    channel = channels("file")
    snapshot = channel.versions.next()
    with (
        files_of_at_most(1000),
        pytest.raises(TransferError, match=r"can't be written to .*weights\.folder.*too large"),
    ):
        channel.fetched.prepare(snapshot)
    assert list((channel.config.paths.root / "weights").iterdir()) == []
    server = channel.server()
    channel.send(snapshot, [server])
    assert server.holds(snapshot)


def test_superseded_files_are_deleted(channels: Open) -> None:
    channel = channels("file")
    folder = channel.config.paths.root / "weights"
    for _ in range(7):
        channel.fetched.prepare(channel.versions.next())
    left = {path.name for path in folder.iterdir()}
    assert "v00000007.safetensors" in left
    assert "v00000004.safetensors" in left
    assert "v00000001.safetensors" not in left
    channel.fetched.prepare(channel.versions.next())
    assert {path.name for path in folder.iterdir()} == {"v00000007.safetensors", "v00000008.delta"}


def test_stream_requires_the_keys(channels: Open, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    channel = channels("stream", security={"keys": str(tmp_path / "keys")})
    trusted, stranger = channel.server(), channel.server(channels("shm").config)
    snapshot = channel.versions.next()
    channel.send(snapshot, [trusted])
    assert trusted.holds(snapshot)
    receive(stranger, channel.announce(snapshot.manifest, channel.source(snapshot, -1), deadline_s=1.0))
    assert isinstance(stranger.error, TransferError)
    assert stranger.staging.version == -1
