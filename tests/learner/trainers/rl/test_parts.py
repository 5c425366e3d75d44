"""The place of snapshots when the preferred device has no room for them."""

from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.weights import TRANSPORTS, WeightsConfig
from slipstream.learner.trainers.rl import parts
from slipstream.learner.weights.snapshot import SnapshotTaker
from tests.full_disk import files_of_at_most

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def publisher(*names: str, on_device: bool) -> Any:
    """A publisher that offers these transports, or the usual ones, and records which are withdrawn."""
    withdrawn: list[str] = []
    offered = [TRANSPORTS[name] for name in names or ("nccl", "shm", "stream")]
    return SimpleNamespace(
        on_device=on_device, exports="ipc" in names, in_place=True, offered=offered,
        withdraw=withdrawn.append, withdrawn=withdrawn,
    )  # fmt: skip


def taker_of(run: str, transport: str, device: torch.device, publisher: Any) -> SnapshotTaker:
    weights = WeightsConfig.model_validate({"transport": transport})
    return parts.snapshot_taker(
        nn.Linear(3, 2), weights, run=run, dtype=torch.bfloat16, device=device, publisher=publisher
    )


def test_transport_shm_needs_room_in_shared_memory(run_name: str) -> None:
    with (
        structlog.testing.capture_logs(),
        files_of_at_most(10),
        pytest.raises(ConfigError, match=r"weights\.transport=shm: /dev/shm"),
    ):
        taker_of(run_name, "shm", CPU, publisher(on_device=False))


def test_transport_auto_does_without_shared_memory(run_name: str) -> None:
    asked = publisher(on_device=False)
    with files_of_at_most(10), structlog.testing.capture_logs() as logs:
        taker = taker_of(run_name, "auto", CPU, asked)
    assert asked.withdrawn == ["shm"]
    assert [line["transport"] for line in logs] == ["shm"]
    assert taker.take(1, evaluate=False, keep=True) is not None


def test_memory_of_a_gpu_does_without_shared_memory(run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.learner.weights.snapshot.export_memory", lambda size, _: (torch.empty(size), b"h"))
    asked = publisher("ipc", "shm", on_device=True)
    with files_of_at_most(10), structlog.testing.capture_logs():
        taker = taker_of(run_name, "ipc", GPU, asked)
    assert asked.withdrawn == ["shm"]
    assert [buffer.handle for buffer in taker._buffers] == [b"h", b"h"]


@pytest.mark.parametrize("transport", ["auto", "nccl", "ipc"])
def test_full_gpu_ends_only_runs_that_need_it(run_name: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, device: torch.device, **others: Any) -> SnapshotTaker:
        if device == GPU:
            raise torch.OutOfMemoryError("no 64 GiB")
        return SnapshotTaker(*arguments, device=device, **others)

    monkeypatch.setattr(parts, "SnapshotTaker", full)
    asked = publisher(*(("ipc", "shm") if transport == "ipc" else ()), on_device=True)
    if transport != "auto":
        with pytest.raises(ConfigError, match=rf"weights\.transport={transport}: cuda .*no 64 GiB"):
            taker_of(run_name, transport, GPU, asked)
        return
    taker = taker_of(run_name, transport, GPU, asked)
    assert asked.withdrawn == ["nccl"]
    taker.close()
