"""Records of evaluations and rollout servers, and the summary at the end of a run."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from msgspec import structs

from slipstream.buffer.wire.messages import EvalReport, ServerStatus
from slipstream.configs.paths import RunPaths
from slipstream.learner.metrics import reporter as reporter_module
from slipstream.learner.metrics import rl_reporter as rl_reporter_module
from slipstream.learner.metrics.efficiency import Efficiency
from slipstream.learner.metrics.events import EventLog
from slipstream.learner.metrics.fleet import FleetRecord
from slipstream.learner.metrics.rl_reporter import RLReporter, RunRecords
from slipstream.learner.metrics.signal import SignalWatch
from slipstream.learner.metrics.trackers import JsonlTracker, Tracker
from slipstream.learner.weights.members import SyncMetrics
from tests.full_disk import files_of_at_most
from tests.learner.metrics.test_summary import STATE, step


def build_reporter(folder: RunPaths, *trackers: Tracker) -> RLReporter:
    signal = SignalWatch(rewarded=True, group_relative=True, fixed_length=False)
    return RLReporter(
        trackers,
        SyncMetrics(),
        steps=100,
        dtype="float32",
        signal=signal,
        eval_reward="exact_match",
        started=time.monotonic(),
        records=build_records(folder),
    )


def build_records(folder: RunPaths) -> RunRecords:
    """Records of a run on two GPUs."""
    events = EventLog(folder.events, started=time.monotonic())
    efficiency = Efficiency(
        ranks=2, gpus={"GPU-a", "GPU-b"}, peak_flops_per_s=100.0, price_per_gpu_hour=3.0, mean_power_w=lambda: 350.0
    )
    return RunRecords(efficiency, events, FleetRecord(folder, events, started=time.monotonic()))


def test_evaluation_is_recorded_with_steps_done(tmp_path: Path) -> None:
    folder = RunPaths(tmp_path)
    tracker = JsonlTracker(folder.metrics)
    reporter = build_reporter(folder, tracker)
    nothing = EvalReport(version=10, score=0.0, tasks=0, failures={"superseded": 8}, eval_s=1.0, group_ids=[])
    some = EvalReport(version=11, score=0.5, tasks=6, failures={"superseded": 2}, eval_s=1.0, group_ids=["e11-0"])
    with structlog.testing.capture_logs() as logs:
        reporter.evaluated(20, [nothing, some])
    tracker.close()
    unanswered = [(line["policy_version"], line["failed"]) for line in logs if line["log_level"] == "warning"]
    assert unanswered == [(10, nothing.failures), (11, some.failures)]
    first, second = map(json.loads, folder.metrics.read_text(encoding="utf-8").splitlines())
    common = {"kind": "eval", "step": 20, "eval_s": 1.0}
    assert first == first | common | {"policy_version": 10, "score": None, "lower_bound": 0.0, "coverage": 0.0}
    assert second == second | common | {
        "policy_version": 11, "score": 0.5, "lower_bound": 0.375, "coverage": 0.75, "tasks": 6, "failed": 2,
        "failed/superseded": 2,
    }  # fmt: skip


def test_evaluation_without_servers_is_logged(tmp_path: Path) -> None:
    reporter = build_reporter(RunPaths(tmp_path))
    with structlog.testing.capture_logs() as logs:
        reporter.evaluated(20, [EvalReport(version=10, score=0.0, tasks=0, failures={}, eval_s=0.0, group_ids=[])])
    (line,) = logs
    assert (line["log_level"], line["policy_version"]) == ("warning", 10)


@pytest.mark.parametrize(("mismatch_abs", "warnings"), [(9e-5, 0), (2e-4, 1)])
def test_mismatch_of_steps_and_evaluations_is_logged(mismatch_abs: float, warnings: int, tmp_path: Path) -> None:
    reporter = build_reporter(RunPaths(tmp_path))
    figures = {"mismatch_tokens": 6.0, "mismatch_abs": mismatch_abs}
    step_figures = figures | {"reward_std": 0.5, "groups_without_spread": 0.0, "answers_cut_off": 0.0}
    with structlog.testing.capture_logs() as of_step:
        reporter.check_step(1, step_figures)
    with structlog.testing.capture_logs() as of_evaluation:
        reporter.evaluated(1, [], figures)
    for logs in (of_step, of_evaluation):
        assert [line["event"] for line in logs] == ["engine and learner disagree"] * warnings


@pytest.mark.parametrize(("step_s", "window_s"), [(30.0, 30.0), (0.8, 2.4)])
def test_server_rates_cover_window_or_one_long_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, window_s: float
) -> None:
    folder, now = RunPaths(tmp_path), 1000.0
    for module in (reporter_module, rl_reporter_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    tracker = JsonlTracker(folder.metrics)
    reporter = build_reporter(folder, tracker)
    for number in range(7):
        # Busy, and generating, in proportion to the square of the time: the longer the window, the lower both.
        up_s = number * step_s
        server = ServerStatus(up_s=up_s, busy_s=up_s**2 / 1000, tokens_generated=round(1000 * up_s**2))
        figures = reporter.rollout_metrics(structs.replace(STATE, servers=[server]), step=number)
        reporter.step_finished(number, figures, wait_s=0.2 * step_s, train_s=0.0, step_s=step_s)
        now += step_s
    tracker.close()
    first, *_, last = map(json.loads, folder.metrics.read_text(encoding="utf-8").splitlines())
    assert "generator_idle_fraction" not in first
    speed = (up_s**2 - (up_s - window_s) ** 2) / window_s
    assert last["tokens_generated_per_s"] == pytest.approx(1000 * speed)
    assert last["generator_idle_fraction"] == pytest.approx(1 - speed / 1000)
    assert last["learner_idle_fraction"] == pytest.approx(0.2)


def test_full_disk_leaves_no_partial_summary(tmp_path: Path) -> None:
    folder = RunPaths(tmp_path)
    tracker = JsonlTracker(folder.metrics)
    for number in (1, 2, 3):
        tracker.log(step(number))
    reporter = build_reporter(folder, tracker)
    with files_of_at_most(100), pytest.raises(OSError, match="File too large"):
        reporter.finish(STATE, folder, step=2, version=9)
    assert not folder.summary.exists()
    reporter.finish(STATE, folder, step=2, version=9)
    reporter.close()
    summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    assert (summary["steps"], summary["policy_version"], summary["eval_reward"]) == (2, 9, "exact_match")


def test_use_of_gpus_is_in_steps_and_summary(tmp_path: Path) -> None:
    folder = RunPaths(tmp_path)
    tracker = JsonlTracker(folder.metrics)
    reporter = build_reporter(folder, tracker)
    servers = [
        ServerStatus(server="r0", kv_cache_use=0.5, gpus=["GPU-b"]),
        ServerStatus(server="r1", kv_cache_use=0.75, gpus=["GPU-c", "GPU-d"]),
        ServerStatus(server="r2"),
    ]
    for number, seconds in ((1, 2.0), (2, 6.0)):
        servers[2] = ServerStatus(server="r2", up_s=number, prompt_tokens=100 * number, cached_tokens=40 * number)
        figures = step(number, flops=120.0) | reporter.rollout_metrics(
            structs.replace(STATE, servers=servers), step=number
        )
        reporter.step_finished(number, figures, wait_s=0.0, train_s=seconds / 2, step_s=seconds)
    reporter.finish(STATE, folder, step=2, version=2)
    reporter.close()
    first = json.loads(folder.metrics.read_text(encoding="utf-8").splitlines()[0])
    assert first["kv_cache_use"] == 0.625
    assert first["mfu"] == pytest.approx(120 / 1 / 2 / 100)
    assert (first["tokens_trained_per_s"], first["gpus"], first["tokens_per_gpu_s"]) == (50, 4, 12.5)
    # Four GPUs at 3 an hour for 2 s are 3 / 450, for 100 tokens.
    assert first["cost_per_million_tokens"] == pytest.approx(4 * 3 * 2 / 3600 / 100 * 1e6)
    assert first["power_w"] == 350
    second = json.loads(folder.metrics.read_text(encoding="utf-8").splitlines()[1])
    assert ("prefix_hits" in first, second["prefix_hits"]) == (False, 0.4)
    summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    assert summary["tokens_trained_per_s"] == pytest.approx(200 / 8)
    assert summary["mfu"] == pytest.approx((0.6 * 1 + 0.2 * 3) / 4)
    assert summary["cost_per_million_tokens"] == pytest.approx(4 * 3 * 8 / 3600 / 200 * 1e6)
    assert summary["power_w"] == 350
