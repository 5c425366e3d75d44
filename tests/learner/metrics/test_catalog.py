"""The catalogue has every metric of a run with all options, and no other."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.schema.learner import OptimizerConfig, ProcessRewardConfig
from slipstream.learner.metrics.catalog import CATALOG, Kind, Metric
from slipstream.learner.metrics.rl_reporter import RLReporter
from slipstream.learner.metrics.signal import SignalWatch
from slipstream.learner.metrics.trackers import JsonlTracker
from slipstream.learner.parallel.mesh import World
from slipstream.learner.upload import RunStore, Uploader
from slipstream.learner.weights.members import SyncMetrics
from slipstream.tools.launch.machine import Machine
from slipstream.tools.launch.placement import place
from slipstream.tools.summary import extend_summary
from tests.learner.experts import record_with_experts, write_experts
from tests.learner.metrics.test_rl_reporter import build_records
from tests.learner.recorded import RECORDED_STEPS, run_config, step_groups
from tests.learner.trainers.rl.loops import learner_that_continues, third_step

STEPS = 4
ALL_OPTIONS: dict[str, Any] = {
    "advantage": "gae", "critic": {"optimizer": {"lr": 3e-3, "warmup_steps": 0}}, "kl": {"coefficient": 0.1},
    "streams": {"ce": 0.1, "ref_kl": 0.1},
    "loss": {"name": "ppo", "entropy_bonus": 0.01},
    "correction": {"rejections": [{"level": "token", "estimator": "k1", "high": 1.5}], "veto": 1e-9},
    "throttle": {"max_kl": 1.0}, "router_replay": True, "distill": {"teachers": [{}]},
}  # fmt: skip


def keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of all numbers, `section.key` in sections."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")
        elif name != "kind":
            yield prefix + name


def run_folder(config: RunConfig, world: World, groups: Path) -> Path:
    """The folder of a run of two steps, with servers, weight updates and evaluations."""
    learner = learner_that_continues(STEPS - 2, config, world)
    root = learner.loop.root
    assert root is not None
    sync = SyncMetrics(members=1)
    for figures in (sync.published_s, sync.stalls_s, sync.deviations):
        figures.append(0.1)
    learner.loop.reporter = root.reporter = RLReporter(
        [JsonlTracker(config.paths.metrics)], sync, steps=STEPS, dtype="float32",
        signal=SignalWatch(rewarded=True, group_relative=True, fixed_length=False),
        eval_reward=None, started=time.monotonic(), records=build_records(config.paths),
    )  # fmt: skip
    third = third_step(groups, config)
    of_own_version = replace(third.rows, versions_BT=torch.full_like(third.rows.versions_BT, STEPS - 1))
    learner.feed.take.side_effect = [
        replace(third, step=step, rows=of_own_version, consuming_version=STEPS - 1) for step in range(STEPS - 2, STEPS)
    ]

    def state(step: int) -> m.State:
        server = m.ServerStatus(
            server="r0",
            up_s=10.0 * step,
            busy_s=5.0 * step,
            tokens_generated=100 * step,
            prompt_tokens=9 * step,
            kv_cache_use=0.5,
        )
        counts = m.LedgerCounts(reasons={"filtered:length": 1}, answers_dropped={"reward_timeout": 1})
        return m.State(
            request=0, version=0, counts=counts, servers=[server], evals=[], length_bias={"trained": 0.1},
            tasks={"solved": 1},
        )  # fmt: skip

    names = ("score_interval", "pass_at_k", "pass_at_k_interval", "maj_at_k", "maj_at_k_interval")
    report = m.EvalReport(
        version=STEPS + 1, score=1.0, tasks=8, failures={"superseded": 1}, eval_s=0.1, group_ids=["4-0"],
        estimates=dict.fromkeys(names, 0.5),
    )  # fmt: skip
    learner.buffer.take_evals.return_value = [report]
    learner.buffer.trained.side_effect = state
    learner.buffer.finish.return_value = state(STEPS)
    learner.loop.read_groups = lambda ids: step_groups(STEPS + 1, config)
    learner.loop.uploads = Uploader(RunStore("memory://store", run="run"), config.paths, keep=1)
    learner.loop.run()
    placed = place(Machine((0, 1)), config).as_record()
    extend_summary(config.paths, placement=placed, restarts={"learner": 1})
    return config.paths.root


@pytest.fixture(scope="module")
def found(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, set[str]]:
    """Keys of the records of a mixture of experts and of its summary, by kind."""
    base_folder = tmp_path_factory.mktemp("run")
    write_experts(base_folder / "model")
    base = run_config(base_folder / "model", base_folder, steps=STEPS, **ALL_OPTIONS)
    process = {"process_reward": ProcessRewardConfig(optimizer=OptimizerConfig(warmup_steps=0))}
    base = base.model_copy(update={"learner": base.learner.model_copy(update=process)})  # no advantage needs both
    groups = base_folder / "groups"
    record_with_experts(groups, RECORDED_STEPS, base)
    config = base.model_copy(update={"eval": base.eval.model_copy(update={"tasks": 8})})
    folder = run_folder(config, world, groups)
    by_kind: dict[Any, set[str]] = {"summary": set(keys(json.loads((folder / "summary.json").read_text())))}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_kind[record["kind"]] = by_kind.get(record["kind"], set()) | set(keys(record))
    return by_kind


@pytest.mark.parametrize("kind", CATALOG)
def test_every_metric_is_in_catalogue(kind: Kind, found: dict[Kind, set[str]]) -> None:
    assert found[kind]
    assert not {key for key in found[kind] if not any(metric.matches(key) for metric in CATALOG[kind])}


@pytest.mark.parametrize("kind", CATALOG)
def test_every_catalogued_metric_exists(kind: Kind, found: dict[Kind, set[str]]) -> None:
    names = [Metric((name,), "", "") for metric in CATALOG[kind] for name in metric.names]
    assert not [metric.names for metric in names if not any(metric.matches(key) for key in found[kind])]
