"""A rollout server's relay: which bytes it serves, to whom, and where it listens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from slipstream.buffer.wire.weights.protocol import Announce, Manifest, Part, Source, TensorInfo
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.rollout_servers.engines.staging import SourceGone, Staging, TransferFailed
from slipstream.rollout_servers.weights import receivers, relay
from slipstream.rollout_servers.weights.receivers import StreamReceiver
from slipstream.rollout_servers.weights.relay import Relay, start_relay
from slipstream.tools.keys import make_keys

SIZE_BYTES = 1 << 18


@pytest.fixture
def security(tmp_path: Path) -> SecurityConfig:
    make_keys(tmp_path / "keys")
    return SecurityConfig(keys=tmp_path / "keys")


@pytest.fixture
def held(run_name: str) -> Staging:
    """Staging memory that holds version 1."""
    tensors = [TensorInfo(name="weight", dtype="float32", shape=[SIZE_BYTES // 4])]
    manifest = Manifest(version=1, tensors=tensors, bucket_bytes=1 << 16, evaluate=False)
    snapshot = Snapshot(manifest, torch.arange(SIZE_BYTES).to(torch.uint8)).sealed()
    staging = Staging(run_name, shared=False)
    staging.begin(snapshot.manifest).copy_(snapshot.data)
    staging.finish(snapshot.manifest)
    return staging


@pytest.fixture
def server(security: SecurityConfig, held: Staging) -> Iterator[Relay]:
    server = Relay("127.0.0.1", security)
    server.serve(held)
    yield server
    server.close()


def fetch(security: SecurityConfig, run: str, held: Staging, *, place: str, key: str) -> Staging:
    """Fetches version 1 as another server does."""
    tensors = [TensorInfo(name="weight", dtype="float32", shape=[SIZE_BYTES // 4])]
    snapshot = Snapshot(Manifest(version=1, tensors=tensors, bucket_bytes=1 << 16, evaluate=False), held.data).sealed()
    parts = [Part(name="1", version=1, size_bytes=SIZE_BYTES)]
    source = Source(place=place, parts=parts, relay="server-1", key=key)
    announce = Announce(transfer=1, transport="stream", manifest=snapshot.manifest, deadline_s=60.0, source=source)
    staging = Staging(run, shared=False)
    StreamReceiver(security).receive(announce, staging)
    return staging


def test_version_is_relayed_with_keys(server: Relay, security: SecurityConfig, run_name: str, held: Staging) -> None:
    fetched = fetch(security, run_name, held, place=server.endpoint.place, key=server.endpoint.key)
    assert fetched.version == 1
    assert torch.equal(fetched.data, held.data)


@pytest.mark.parametrize("fault", ["relay's key", "client's keys", "no keys"])
def test_wrong_keys_are_refused(
    server: Relay,
    security: SecurityConfig,
    run_name: str,
    held: Staging,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    monkeypatch.setattr(receivers, "RELAY_SILENT_S", 0.5)
    key = zmq.curve_keypair()[0].decode() if fault == "relay's key" else server.endpoint.key
    if fault == "client's keys":
        make_keys(tmp_path / "other")
        security = SecurityConfig(keys=tmp_path / "other")
    if fault == "no keys":
        security = SecurityConfig()
    with pytest.raises(TransferFailed):
        fetch(security, run_name, held, place=server.endpoint.place, key=key)


def test_withdrawn_version_is_gone(server: Relay, security: SecurityConfig, run_name: str, held: Staging) -> None:
    server.withdraw()
    with pytest.raises(SourceGone):
        fetch(security, run_name, held, place=server.endpoint.place, key=server.endpoint.key)


@pytest.mark.parametrize(
    ("weights", "route", "listens"),
    [
        ({}, None, "127.0.0.1"),
        ({"relay": False}, None, None),
        ({"host": "10.0.0.1"}, "127.0.0.1", None),
        ({"host": "10.0.0.1", "bind": "0.0.0.0"}, "127.0.0.2", None),
        ({"host": "10.0.0.1", "bind": "0.0.0.0"}, None, None),
        ({"host": "10.0.0.1", "bind": "0.0.0.0"}, "203.0.113.7", None),
    ],
    ids=["loopback", "switched off", "remote learner, not told to listen", "route over loopback", "no route", "taken"],
)
def test_relay_listens_only_where_it_may(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, object], route: str | None, listens: str | None
) -> None:
    monkeypatch.setattr(relay, "address_towards", lambda host: route)
    started = start_relay(WeightsConfig.model_validate(weights), SecurityConfig())
    assert (started is None) == (listens is None)
    if started is not None:
        assert started.endpoint.place.startswith(f"tcp://{listens}:")
        started.close()
