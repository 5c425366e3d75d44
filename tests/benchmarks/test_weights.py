"""A small `slipstream bench weights` and `gpu_weights`, and the publishing learner."""

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.buffer.wire.weights.shm import SHARED_MEMORY
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from benchmarks import gpu_weights
from benchmarks.weights_learner import TINY, Learner, build_policy, perturb, shape_of, weights_config
from benchmarks.weights_updates import Case
from tests.learner.weights.learner import PATIENCE_S, wait_until
from tests.learner.weights.member import Member
from tests.benchmarks.conftest import measured

GOALS = {
    "shm / memory copy",
    "gloo / bare gloo",
    "learner's CPU, shm, 2 / 1 servers",
    "learner's CPU, stream, 2 / 1 servers",
    "vLLM inline, tiny: tokens/s with / without",
}
SMALL = ["--size-mb", "1", "--rounds", "1", "--servers", "2", "1", "--policies", "tiny", "--seconds", "1"]


@pytest.mark.usefixtures("nothing_left")
def test_all_figures_are_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads, segments = torch.get_num_threads(), set(SHARED_MEMORY.iterdir())
    try:
        record = measured("weights", SMALL, tmp_path / "runs")
    finally:
        torch.set_num_threads(threads)
    figures = record["figures"]
    printed = capsys.readouterr().out.splitlines()
    assert [line[:46].rstrip() for line in printed[:-1]] == [figure["name"][:46] for figure in figures]
    assert {figure["name"] for figure in figures if figure["goal"]} == GOALS
    assert all(math.isfinite(figure["value"]) and figure["value"] >= 0 for figure in figures)
    value = {figure["name"]: figure["value"] for figure in figures}
    for name in ("gloo, whole version", "shm, whole version", "file, 1% changed", "stream, 10% changed"):
        assert value[name] > 0
    assert value["  generation stands still, each update"] > 0
    transfers = record["details"]["transfers"]
    assert transfers["stream 0.01: bytes"][0] < transfers["size"] / 10
    left = {path.name for path in set(SHARED_MEMORY.iterdir()) - segments}
    assert not [name for name in left if "slipstream-transfer-" in name or "slipstream-vLLM" in name]


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpu_bench_refuses_a_machine_without_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CUDA device"):
        gpu_weights.measure(["--json", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
def test_gpu_bench_reports_a_failed_case_and_measures_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Case("broken", TINY, "float32", {"core": "inline", "options": {"no_such_option": 1}})
    sound = Case("sound", TINY, "float32", {"kv_cache_bytes": 256 << 20}, transport="shm", concurrency=4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr(gpu_weights, "_machine", dict)
    monkeypatch.setattr(gpu_weights, "_cases", lambda shape, concurrency: [broken, sound])
    monkeypatch.setattr(gpu_weights, "configure_logging", lambda *_, **__: None)  # it would outlive the test
    file = tmp_path / "new" / "out.json"
    with pytest.raises(SlipstreamError, match=r"broken$"):
        gpu_weights.measure(["--json", str(file), "--rounds", "1", "--seconds", "1"])
    assert "no_such_option" in file.with_name("out-auto.console").read_text()
    record = json.loads(file.read_text())
    assert "exit code 1" in record["details"]["broken"]["error"]
    value = {figure["name"]: figure["value"] for figure in record["figures"]}
    assert value["sound: tokens/s with / without"] > 0
    assert value["  generation stands still, each update"] > 0


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,5", "3"), ("GPU-1f,GPU-2e", "GPU-1f")])
def test_gpu_engine_gets_the_first_visible_device(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, first: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cases = gpu_weights._cases(TINY, concurrency=1)
    assert [(case.transport, case.device) for case in cases] == [("nccl", "cuda:1"), ("shm", "cuda:1")]
    assert {case.environment["CUDA_VISIBLE_DEVICES"] for case in cases} == {first}


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
