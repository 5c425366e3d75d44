"""Turns what happens in the loop into metrics records, rates and the summary; on rank 0."""

import json
import time
from collections import deque
from collections.abc import Mapping

from slipstream.buffer.wire.messages import EvalReport, ServerStatus, State
from slipstream.configs import RunConfig
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.checkpoint import Progress
from slipstream.learner.metrics.summary import read_records, summarise
from slipstream.learner.metrics.trackers.base import Tracker
from slipstream.learner.weights.distribution import SyncFigures

log = get_log("learner.reporter")

WINDOW_S = 2.0
MISMATCH_LIMIT = {"float32": 1e-4, "bfloat16": 5e-2}


class Reporter:
    """One run's figures."""

    def __init__(self, trackers: list[Tracker], sync: SyncFigures, config: RunConfig, *, started: float) -> None:
        self._trackers = trackers
        self._sync = sync
        self._steps = config.learner.steps
        self._eval_reward = config.eval.reward
        self._mismatch_limit = MISMATCH_LIMIT[config.model.dtype]
        self._started = started
        self._first_step_at: float | None = None
        self._record: dict[str, float | int | str] = {}
        self._servers: deque[tuple[float, float, float, int]] = deque()
        self._learner: deque[tuple[float, float, float]] = deque()

    def step_started(self) -> None:
        """The first call marks the end of the start-up."""
        if self._first_step_at is None:
            self._first_step_at = time.monotonic()

    def step_trained(self, done: int, figures: Mapping[str, float], state: State) -> None:
        """A step's figures and the buffer's state are known."""
        self._record = {
            "kind": "step",
            "time_s": self._since_start(),
            "step": done,
            "steps": self._steps,
            **figures,
            **_ledger_figures(state),
            **self._server_figures(state.servers),
        }
        self._judge_mismatch(done, figures)

    def step_timed(
        self, *, policy_version: int, wait_s: float, train_s: float, publish_s: float, step_s: float
    ) -> None:
        """The step is over: its record is complete and goes out."""
        now = time.monotonic()
        self._learner.append((now, wait_s, step_s))
        while now - self._learner[0][0] > WINDOW_S:
            self._learner.popleft()
        loop_s = sum(step for _, _, step in self._learner)
        self._record |= {
            "policy_version": policy_version,
            "wait_s": wait_s,
            "train_s": train_s,
            "publish_s": publish_s,
            "step_s": step_s,
            "learner_idle_fraction": sum(wait for _, wait, _ in self._learner) / loop_s,
        }
        if self._sync.published_s:
            self._record["weight_sync_s"] = self._sync.published_s[-1]
        if self._sync.stalls_s:
            self._record["generation_stall_s"] = self._sync.stalls_s[-1]
        if self._sync.deviations:
            self._record["weights/deviation"] = self._sync.deviations[-1]
        self._record |= {
            "weights/members": self._sync.members,
            "weights/evictions": self._sync.evictions,
            "weights/unreached": self._sync.unreached,
        }
        self._log(self._record)

    def evaluated(self, done: int, reports: list[EvalReport], mismatch: Mapping[str, float] | None = None) -> None:
        """Evaluations have finished, and so many steps are done; `mismatch` is what their answers showed of it."""
        mismatch = mismatch or {}
        self._judge_mismatch(done, mismatch)
        for report in reports:
            if report.failed:
                log.warning(
                    "held-out tasks could not be answered",
                    policy_version=report.version,
                    failed=report.failed,
                    answered=report.tasks,
                )
            elif not report.tasks:
                log.warning(
                    "nothing was evaluated: no rollout server had this version before the next evaluation was due, or "
                    "the env has no held-out tasks",
                    policy_version=report.version,
                )
            if not report.tasks:
                continue
            log.info("evaluated", policy_version=report.version, score=report.score, tasks=report.tasks)
            self._log(
                {
                    "kind": "eval",
                    "time_s": self._since_start(),
                    "step": done,
                    "policy_version": report.version,
                    "score": report.score,
                    "tasks": report.tasks,
                    "failed": report.failed,
                    "eval_s": report.eval_s,
                    **mismatch,
                }
            )

    def finish(self, progress: Progress, state: State, folder: RunPaths) -> None:
        """Writes the summary, by which the run counts as finished, and closes the trackers. Raises: OSError."""
        first_step_at = self._first_step_at or time.monotonic()
        figures = summarise(
            read_records(folder.metrics),
            last_step=progress.step,
            policy_version=progress.version,
            state=state,
            published_s=self._sync.published_s,
            stalls_s=self._sync.stalls_s,
            wall_s=self._since_start(),
            startup_s=first_step_at - self._started,
        )
        figures["eval_reward"] = self._eval_reward
        write_atomically(folder.summary, [json.dumps(figures, indent=2).encode(), b"\n"])
        self._log({"kind": "finish", "time_s": self._since_start()})
        for tracker in self._trackers:
            tracker.close()

    def _judge_mismatch(self, done: int, figures: Mapping[str, float]) -> None:
        if figures.get("mismatch_abs", 0.0) > self._mismatch_limit:
            log.warning("engine and learner disagree", step=done, mismatch_abs=figures["mismatch_abs"])

    def _log(self, record: Mapping[str, float | int | str]) -> None:
        for tracker in self._trackers:
            tracker.log(record)

    def _since_start(self) -> float:
        return time.monotonic() - self._started

    def _server_figures(self, servers: list[ServerStatus]) -> dict[str, float]:
        """Rates of all rollout servers together, over the last seconds, or since the last step if that is longer."""
        now = time.monotonic()
        deaths: dict[str, float] = {
            "engine_deaths": sum(server.engine_deaths for server in servers),
            "requests_restarted": sum(server.requests_restarted for server in servers),
        }
        self._servers.append(
            (
                now,
                sum(server.busy_s for server in servers),
                sum(server.up_s for server in servers),
                sum(server.tokens_generated for server in servers),
            )
        )
        # What the others are compared with is the newest that is older than the window.
        while len(self._servers) > 1 and now - self._servers[1][0] > WINDOW_S:
            self._servers.popleft()
        (_, busy, up, tokens), (_, busy_now, up_now, tokens_now) = self._servers[0], self._servers[-1]
        if up_now <= up:  # servers report about once a second, and one may have gone
            return deaths
        return deaths | {
            "generator_idle_fraction": min(1.0, max(0.0, 1 - (busy_now - busy) / (up_now - up))),
            "tokens_generated_per_s": (tokens_now - tokens) / (up_now - up) * len(servers),
        }


def _ledger_figures(state: State) -> dict[str, float]:
    states = ("issued", "in_flight", "ready", "leased", "trained", "filtered", "expired", "reissued")
    return {
        **{f"buffer/{name}": getattr(state.counts, name) for name in states},
        **{f"buffer/length_bias/{name}": distance for name, distance in state.length_bias.items()},
        **{f"buffer/tasks/{outcome}": tasks for outcome, tasks in state.tasks.items()},
    }
