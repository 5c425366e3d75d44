"""Records of an RL training beside its own steps: rollout servers, ledger, weight updates, evaluations, the summary."""

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from slipstream.buffer.wire.messages import EvalReport, ServerStatus, State
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.metrics.efficiency import Efficiency
from slipstream.learner.metrics.events import EventLog
from slipstream.learner.metrics.fleet import FleetRecord
from slipstream.learner.metrics.reporter import WINDOW_S, Reporter
from slipstream.learner.metrics.signal import SignalWatch
from slipstream.learner.metrics.summary import read_records, summarise
from slipstream.learner.metrics.trackers import Tracker
from slipstream.learner.weights.members import SyncMetrics

log = get_log("learner.reporter")

MISMATCH_LIMIT = {"float32": 1e-4, "bfloat16": 5e-2}
"""Mean |log π_prox - log μ| above which engine and learner disagree, by the dtype of the model."""


@dataclass(frozen=True)
class RunRecords:
    """Records of a run beside the metrics of its steps."""

    efficiency: Efficiency
    """Metrics of each step on the run's GPUs."""
    events: EventLog
    fleet: FleetRecord
    """State of the rollout servers."""


class RLReporter(Reporter):
    """Reporter of an RL training."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        sync: SyncMetrics,
        *,
        steps: int,
        dtype: str,
        signal: SignalWatch,
        eval_reward: str | None,
        started: float,
        records: RunRecords,
    ) -> None:
        """Args:
        sync: of the weights' publisher, which updates it.
        dtype: in which the model computes.
        signal: takes the metrics of each step.
        eval_reward: reward whose mean evaluations report; None: the weighted sum.
        """
        super().__init__(trackers, steps=steps, started=started)
        self._sync = sync
        self._eval_reward = eval_reward
        self._signal = signal
        self._mismatch_limit = MISMATCH_LIMIT[dtype]
        self._records = records
        self._rollout_gpus: set[str] = set()
        self._servers: deque[tuple[float, float, float, int, int, int]] = deque()

    def continued(self, step: int, version: int) -> None:
        """Records that the run goes on from the checkpoint of a step."""
        self._records.events.add("restart", "the learner continues", step=step, policy_version=version)

    def observe(self, state: State, *, step: int) -> None:
        """Takes the buffer's state while the learner waits, when `step` steps are done."""
        self._records.fleet.observe(state, step=step)

    def step_finished(
        self, step: int, metrics: Mapping[str, float], *, wait_s: float, train_s: float, step_s: float
    ) -> None:
        """Logs the record of the step, with the use of the GPUs."""
        use = self._records.efficiency.of_step(metrics, train_s=train_s, step_s=step_s, rollout_gpus=self._rollout_gpus)
        super().step_finished(step, {**metrics, **use}, wait_s=wait_s, train_s=train_s, step_s=step_s)

    def rollout_metrics(self, state: State, *, step: int) -> dict[str, float]:
        """Metrics of ledger and rollout servers, from the buffer's state after a step."""
        self._records.events.step = step
        self._rollout_gpus = {gpu for server in state.servers for gpu in server.gpus}
        self._records.fleet.observe(state, step=step)
        return {**_ledger_metrics(state), **self._server_metrics(state.servers)}

    def sync_metrics(self) -> dict[str, float]:
        """Metrics of the weight updates."""
        sync = self._sync
        latest = {
            "weight_sync_s": sync.published_s,
            "generation_stall_s": sync.stalls_s,
            "weights/deviation": sync.deviations,
        }
        return {
            **{name: values[-1] for name, values in latest.items() if values},
            "weights/members": sync.members,
            "weights/evictions": sync.evictions,
            "weights/unreached": sync.unreached,
        }

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns when a step's metrics show that training can't succeed."""
        self._check_mismatch(step, metrics)
        self._signal.observe(step, metrics)

    def _check_mismatch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns when engine and learner disagree on log-probs at the same weights."""
        if metrics.get("mismatch_abs", 0.0) > self._mismatch_limit:
            log.warning("engine and learner disagree", step=step, mismatch_abs=metrics["mismatch_abs"])

    def evaluated(self, step: int, reports: Sequence[EvalReport], mismatch: Mapping[str, float] | None = None) -> None:
        """Logs evaluations that have finished when `step` steps are done.

        Args:
            mismatch: metrics of the engine mismatch on their answers.
        """
        mismatch = mismatch or {}
        self._check_mismatch(step, mismatch)
        for report in reports:
            if report.failed:
                log.warning(
                    "held-out tasks not answered",
                    policy_version=report.version,
                    failed=report.failures,
                    answered=report.tasks,
                )
            elif not report.tasks:
                log.warning(
                    "nothing evaluated: no rollout server had this version before the next evaluation was due, or the "
                    "env has no held-out tasks",
                    policy_version=report.version,
                )
                continue
            metrics = _evaluation_metrics(report)
            log.info("evaluated", **metrics)
            self.log({"kind": "eval", "time_s": self.since_start_s(), "step": step, **metrics, **mismatch})

    def finish(
        self, state: State, paths: RunPaths, *, step: int, version: int, uploads: Mapping[str, int] | None = None
    ) -> None:
        """Writes the summary, which marks the run as finished. Raises: OSError.

        Args:
            uploads: their number by outcome; None: there are none.
        """
        self._records.fleet.observe(state, step=step, final=True)
        metrics = summarise(
            read_records(paths.metrics),
            last_step=step,
            policy_version=version,
            state=state,
            published_s=self._sync.published_s,
            stalls_s=self._sync.stalls_s,
            wall_s=self.since_start_s(),
            startup_s=self.startup_s(),
        )
        metrics["eval_reward"] = self._eval_reward
        if uploads is not None:
            metrics["uploads"] = uploads
        write_atomically(paths.summary, [json.dumps(metrics, indent=2).encode(), b"\n"])

    def _server_metrics(self, servers: Sequence[ServerStatus]) -> dict[str, float]:
        """Rates of all rollout servers together, over the last seconds, or since the last step if that is longer."""
        now = time.monotonic()
        metrics: dict[str, float] = {
            "groups_in_flight_limit": sum(server.groups_limit for server in servers),
            "engine_deaths": sum(server.engine_deaths for server in servers),
            "requests_restarted": sum(server.requests_restarted for server in servers),
        }
        known = [server.kv_cache_use for server in servers if server.kv_cache_use is not None]
        if known:
            metrics["kv_cache_use"] = fmean(known)
        self._servers.append(
            (
                now,
                sum(server.busy_s for server in servers),
                sum(server.up_s for server in servers),
                sum(server.tokens_generated for server in servers),
                sum(server.prompt_tokens for server in servers),
                sum(server.cached_tokens for server in servers),
            )
        )
        # The baseline is the newest entry that is older than the window.
        while len(self._servers) > 1 and now - self._servers[1][0] > WINDOW_S:
            self._servers.popleft()
        totals = zip(self._servers[0], self._servers[-1], strict=True)
        _, busy_s, up_s, tokens, prompt_tokens, cached_tokens = (last - first for first, last in totals)
        if up_s <= 0:  # servers report about once a second, and one may have left
            return metrics
        if prompt_tokens > 0:
            metrics["prefix_hits"] = min(1.0, max(0.0, cached_tokens / prompt_tokens))
        return metrics | {
            "generator_idle_fraction": min(1.0, max(0.0, 1 - busy_s / up_s)),
            "tokens_generated_per_s": tokens / up_s * len(servers),
        }


def _evaluation_metrics(report: EvalReport) -> dict[str, float]:
    return {
        "policy_version": report.version,
        "score": report.score if report.tasks else math.nan,
        **report.estimates,
        "lower_bound": report.lower_bound,
        "coverage": report.coverage,
        "tasks": report.tasks,
        "failed": report.failed,
        **{f"failed/{reason}": tasks for reason, tasks in report.failures.items()},
        "eval_s": report.eval_s,
    }


def _ledger_metrics(state: State) -> dict[str, float]:
    states = ("issued", "in_flight", "ready", "leased", "trained", "filtered", "expired", "reissued", "skipped_tasks")
    return {
        **{f"buffer/{name}": getattr(state.counts, name) for name in states},
        "buffer/spilled_groups": state.counts.spilled,
        "buffer/spilled_bytes": state.counts.spilled_bytes,
        "buffer/spill_errors": state.counts.spill_errors,
        **{f"buffer/answers_dropped/{reason}": answers for reason, answers in state.counts.answers_dropped.items()},
        **{f"buffer/length_bias/{name}": distance for name, distance in state.length_bias.items()},
        **{f"buffer/tasks/{outcome}": tasks for outcome, tasks in state.tasks.items()},
    }
