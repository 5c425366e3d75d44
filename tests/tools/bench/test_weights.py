"""A tiny run of `slipstream bench weights`: every figure is measured, shown and kept. Times are not its business."""

import importlib.util
import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from slipstream.buffer.wire.weights.shm import SHARED_MEMORY
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.tools.bench import gpu_weights
from slipstream.tools.bench.cli import command
from slipstream.tools.bench.weights.generation import KV_CACHE_BYTES, Case
from slipstream.tools.bench.weights.learner import Learner
from slipstream.tools.bench.weights.policy import TINY as TINY_SHAPE
from slipstream.tools.bench.weights.policy import build_policy, change, shape_of
from slipstream.tools.bench.weights.settings import settings
from tests.learner.weights.learner import PATIENCE_S, wait_until
from tests.learner.weights.member import Member

GOALS = {
    "shm / memory copy",
    "gloo / bare gloo",
    "learner's CPU, shm, 2 / 1 servers",
    "vLLM inline, tiny: tokens/s with / without",
}
TINY = ["--size-mb", "1", "--rounds", "1", "--servers", "2", "1", "--policies", "tiny", "--seconds", "1"]


def test_every_figure_gets_a_line_and_is_kept_and_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    threads = torch.get_num_threads()
    others, segments = set(psutil.Process().children()), set(SHARED_MEMORY.iterdir())
    try:
        assert command(["weights", *TINY, "--runs", str(tmp_path / "runs")]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    (file,) = (tmp_path / "runs" / "bench").glob("weights-*.json")
    record = json.loads(file.read_text())
    figures = record["figures"]
    assert lines[-1] == f"kept in {file}"
    assert [line[:46].rstrip() for line in lines[:-1]] == [figure["name"][:46] for figure in figures]
    assert {figure["name"] for figure in figures if figure["goal"]} == GOALS
    assert all(math.isfinite(figure["value"]) and figure["value"] >= 0 for figure in figures)
    values = {figure["name"]: figure["value"] for figure in figures}
    for name in ("gloo, whole version", "shm, whole version", "file, 1% changed", "stream, 10% changed"):
        assert values[name] > 0
    assert values["  generation stands still, each update"] > 0
    assert record["details"]["transfers"]["stream 0.01: bytes"][0] < record["details"]["transfers"]["size"] / 10
    assert set(psutil.Process().children()) <= others
    assert list(temporary.iterdir()) == []
    left = {path.name for path in set(SHARED_MEMORY.iterdir()) - segments}
    assert not [name for name in left if "slipstream-transfer-" in name or "slipstream-vLLM" in name]


def test_a_change_changes_about_the_share_of_the_numbers_that_was_asked_for() -> None:
    model = build_policy(shape_of(500_000))
    before = [parameter.to(torch.bfloat16, copy=True) for parameter in model.parameters()]
    change(model, 0.1, torch.Generator().manual_seed(1))
    after = [parameter.to(torch.bfloat16) for parameter in model.parameters()]
    changed = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
    assert changed / sum(each.numel() for each in before) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("parameters", [30_000_000, 250_000_000])
def test_a_shape_has_about_as_many_parameters_as_it_was_asked_for(parameters: int) -> None:
    with torch.device("meta"):
        model = build_policy(shape_of(parameters))
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(parameters, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_gpu_bench_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        gpu_weights.measure(["--json", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
def test_of_the_gpu_bench_what_does_not_work_says_why_and_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Case("broken", TINY_SHAPE, "float32", "inline", KV_CACHE_BYTES, options={"no_such_option": 1})
    sound = Case("sound", TINY_SHAPE, "float32", "process", KV_CACHE_BYTES, transport="shm", at_once=4)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr(gpu_weights, "_machine", dict)
    monkeypatch.setattr(gpu_weights, "_cases", lambda shape, at_once: [broken, sound])
    file = tmp_path / "new" / "out.json"
    monkeypatch.setattr(gpu_weights, "configure_logging", lambda *_, **__: None)  # it would outlive the test
    # Without a GPU there is none to copy on.
    monkeypatch.setattr(gpu_weights, "_memory_speeds", lambda size_bytes: [])
    with pytest.raises(SlipstreamError, match="not measured, for the reasons above: broken"):
        gpu_weights.measure(["--json", str(file), "--rounds", "1", "--seconds", "1"])
    kept = file.with_name("out-auto.console")
    assert f"all that the engine printed: {kept}" in capsys.readouterr().err
    assert "no_such_option" in kept.read_text()
    record = json.loads(file.read_text())
    assert "generator ended with exit code 1" in record["details"]["broken"]["error"]
    values = {figure["name"]: figure["value"] for figure in record["figures"]}
    assert values["  tokens/s with one each second"] > 0
    assert values["  generation stands still, each update"] > 0


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,5", "3"), ("GPU-1f,GPU-2e", "GPU-1f")])
def test_the_engine_of_the_gpu_bench_is_on_the_first_device_that_the_bench_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, first: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cases = gpu_weights._cases(TINY_SHAPE, at_once=1)
    assert [(case.transport, case.device) for case in cases] == [("nccl", "cuda:1"), ("shm", "cuda:1")]
    assert {case.environment["CUDA_VISIBLE_DEVICES"] for case in cases} == {first}


def test_a_copy_is_timed_until_its_own_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for: list[Any] = []
    monkeypatch.setattr("torch.cuda.synchronize", waited_for.append)
    gpu, host = (
        SimpleNamespace(is_cuda=device != "cpu", device=device, numel=lambda: 1, copy_=lambda other: None)
        for device in ("cuda:0", "cpu")
    )
    for target, source in ((gpu, gpu), (gpu, host), (host, gpu)):
        copied: Any = (target, source)
        assert gpu_weights._speed(*copied) > 0
    assert set(waited_for) == {"cuda:0"}


def test_a_transport_that_reaches_nobody_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    config = settings(tmp_path, f"reaches-{tmp_path.name}", weights={"transport": "gloo", "deadline_s": 5.0})
    crew: Any = SimpleNamespace(pause=lambda _: None)
    learner = Learner(crew, config, build_policy(shape_of(500_000)), device=torch.device("cpu"))
    member = Member(config, "server")
    member.before_entering = lambda: wait_until(lambda: bool(member.evictions))
    try:
        learner.publish()
        member.start()
        learner.await_updates(1, PATIENCE_S)  # it has fetched it
        with pytest.raises(SlipstreamError, match="versions don't come through gloo: the log says why"):
            learner.insist()
    finally:
        member.close()
        learner.close()


def test_what_stands_in_for_a_transport_that_does_not_work_is_not_measured(tmp_path: Path) -> None:
    config = settings(tmp_path, f"insists-{tmp_path.name}", weights={"transport": "gloo"})
    crew: Any = SimpleNamespace(pause=lambda _: None)
    learner = Learner(crew, config, build_policy(shape_of(500_000)), device=torch.device("cpu"))
    member = Member(config, "server", transports=("stream",)).start()
    try:
        wait_until(lambda: len(learner.publisher._roster) == 1)
        learner.publish()
        assert member.announced == [(1, "stream")]
        learner.insist()
        with pytest.raises(SlipstreamError, match="did not apply version 2 and was evicted"):
            learner.publish()
    finally:
        member.close()
        learner.close()
