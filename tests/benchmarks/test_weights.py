"""Tiny measurements of weight updates, and the publishing learner."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import weights
from benchmarks.__main__ import command
from benchmarks.weights import gpu_cases
from benchmarks.weights_learner import Learner, build_policy, perturb, shape_of, weights_config
from slipstream.buffer.wire.weights.layout import SHARED_MEMORY
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from tests.benchmarks.conftest import Measure, with_goals
from tests.learner.weights.learner import PATIENCE_S, wait_until
from tests.learner.weights.member import Member

SMALL = "--size-mb 1 --rounds 1 --servers 2 1 --policies tiny --engine hf --seconds 1"


@pytest.mark.usefixtures("forked_workers")
def test_weights(measured: Measure) -> None:
    segments = set(SHARED_MEMORY.iterdir())
    record = measured("weights", SMALL)
    assert with_goals(record) == {
        "shm / memory copy", "gloo / bare gloo", "learner's CPU, shm, 2 / 1 servers",
        "learner's CPU, stream, 2 / 1 servers", "hf, tiny: tokens/s with / without",
    }  # fmt: skip
    for name in (
        "gloo, whole version",
        "shm, whole version",
        "file, 1% changed",
        "generation stands still, each update",
    ):
        assert record["value"][name] > 0
    transfers = record["details"]["transfers"]
    assert transfers["stream 0.01: bytes"][0] < transfers["size"] / 10
    left = {path.name for path in set(SHARED_MEMORY.iterdir()) - segments}
    assert not [name for name in left if "slipstream-transfer-" in name or "slipstream-generation-" in name]


def test_failed_case_is_reported_and_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def generation(workers: object, figures: object, case: Any, **_: object) -> dict[str, Any]:
        if case.lora is None:
            raise SlipstreamError("no such option")
        return {}

    monkeypatch.setattr(weights, "generation", generation)
    arguments = ["--parts", "generation", "--policies", "tiny", "tiny-lora", "--json", str(tmp_path / "out.json")]
    assert command(["weights", *arguments]) == 1
    assert "not measured: vllm, tiny: no such option" in capsys.readouterr().err
    assert '"vllm, tiny, LoRA": {}' in (tmp_path / "out.json").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpu_case_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="CUDA device"):
        command(["weights", "--policies", "gpu"])


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,5", "3"), ("GPU-1f,GPU-2e", "GPU-1f")])
def test_gpu_engine_gets_the_first_visible_device(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, first: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cases = gpu_cases()
    assert [(case.transport, case.device) for case in cases] == [("nccl", "cuda:1"), ("shm", "cuda:1")]
    assert {case.environment["CUDA_VISIBLE_DEVICES"] for case in cases} == {first}


def test_saved_model_generates_in_full_and_with_adapters(tmp_path: Path) -> None:
    options = argparse.Namespace(model=tmp_path / "own", policies=["tiny"], engine="vllm", keep_stale_kv=True)
    titles = ["vllm, own, KV cache kept", "vllm, own, LoRA, KV cache kept"]
    cases = weights.cases_of(options)
    assert [(case.title, case.lora) for case in cases] == list(zip(titles, (None, {}), strict=True))
    assert {(case.policy, case.keep_stale_kv) for case in cases} == {(tmp_path / "own", True)}


def test_perturb_changes_the_requested_share() -> None:
    policy = build_policy(shape_of(500_000))
    before = [parameter.to(torch.bfloat16, copy=True) for parameter in policy.parameters()]
    perturb(policy, 0.1, torch.Generator().manual_seed(1))
    after = [parameter.to(torch.bfloat16) for parameter in policy.parameters()]
    changed = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
    assert changed / sum(each.numel() for each in before) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("parameters", [30_000_000, 250_000_000])
def test_shape_has_the_requested_number_of_parameters(parameters: int) -> None:
    with torch.device("meta"):
        policy = build_policy(shape_of(parameters))
    assert sum(each.numel() for each in policy.parameters()) == pytest.approx(parameters, rel=0.1)


class Channel:
    """A learner that publishes over gloo, and a run's configuration for members."""

    def __init__(self, folder: Path) -> None:
        weights = {"transport": "gloo", "deadline_s": 5.0}
        self.config: RunConfig = weights_config(folder, f"channel-{folder.name}", weights=weights)
        workers: Any = SimpleNamespace(pause=lambda _: None)
        self.learner = Learner(workers, self.config, build_policy(shape_of(500_000)), device=torch.device("cpu"))


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    made = Channel(tmp_path)
    yield made
    made.learner.close()


def test_failed_broadcast_is_reported_before_measuring(channel: Channel) -> None:
    member = Member(channel.config, "server")
    member.before_entering = lambda: wait_until(lambda: bool(member.evictions))
    try:
        channel.learner.publish()
        member.start()
        channel.learner.await_updates(1, PATIENCE_S)  # it has fetched the version
        with pytest.raises(SlipstreamError, match="gloo"):
            channel.learner.require_transport()
    finally:
        member.close()


def test_fallback_transport_is_not_measured(channel: Channel) -> None:
    member = Member(channel.config, "server", transports=("stream",)).start()
    try:
        wait_until(lambda: len(channel.learner.publisher._roster) == 1)
        channel.learner.publish()
        assert member.announced == [(1, "stream")]
        channel.learner.require_transport()
        with pytest.raises(SlipstreamError, match=r"version 2 .*evicted"):
            channel.learner.publish()
    finally:
        member.close()
