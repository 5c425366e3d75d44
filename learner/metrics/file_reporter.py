"""Records of a training on rows of files: the use of the GPUs, measurements on validation rows, the summary."""

import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.metrics.efficiency import Efficiency
from slipstream.learner.metrics.events import EventLog
from slipstream.learner.metrics.reporter import Reporter
from slipstream.learner.metrics.summary import EDGE_STEPS, Metrics, efficiency, mean, read_records
from slipstream.learner.metrics.trackers import Tracker

log = get_log("learner.reporter")

RECORD: Final = {"kind", "time_s", "step", "loss"}
"""Fields of a measurement that the summary has elsewhere."""
DROPPED: Final = "rows_dropped/"
"""Prefix of the metrics that count rows that were left out, by reason."""


class FileReporter(Reporter):
    """Reporter of a training on rows of files."""

    def __init__(
        self, trackers: Sequence[Tracker], *, steps: int, started: float, use: Efficiency, events: EventLog
    ) -> None:
        super().__init__(trackers, steps=steps, started=started)
        self._use = use
        self._events = events

    def continued(self, step: int) -> None:
        """Records that the run goes on from the checkpoint of a step."""
        self._events.add("restart", "the learner continues", step=step)

    def step_finished(
        self, step: int, metrics: Mapping[str, float], *, wait_s: float, train_s: float, step_s: float
    ) -> None:
        """Logs the record of the step, with the use of the GPUs."""
        self._events.step = step
        use = self._use.of_step(metrics, train_s=train_s, step_s=step_s, rollout_gpus=())
        super().step_finished(step, {**metrics, **use}, wait_s=wait_s, train_s=train_s, step_s=step_s)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a measurement on the validation rows when `step` steps are done."""
        log.info("validated", step=step, **metrics)
        self.log({"kind": "eval", "time_s": self.since_start_s(), "step": step, **metrics})

    def finish(self, paths: RunPaths, *, trainer: str, step: int) -> None:
        """Writes the summary, which marks the run as finished. Raises: OSError."""
        metrics = {
            "trainer": trainer,
            **summarise_steps(read_records(paths.metrics, None), last_step=step),
            "wall_s": self.since_start_s(),
            "startup_s": self.startup_s(),
        }
        write_atomically(paths.summary, [json.dumps(metrics, indent=2).encode(), b"\n"])


def summarise_steps(records: Sequence[Metrics], *, last_step: int) -> dict[str, Any]:
    """Summary of the steps and measurements; None where records are missing.

    Args:
        records: all of the run, also from before a restart; of a step trained twice, the last counts.
        last_step: last step of the run.
    """
    by_step = {record["step"]: record for record in records if record.get("kind") == "step"}
    steps = [by_step[step] for step in sorted(by_step) if step <= last_step]
    measured = {record["step"]: record for record in records if record.get("kind") == "eval"}
    validated = [measured[step] for step in sorted(measured) if step <= last_step]
    losses = [record.get("loss") for record in validated]
    known = [loss for loss in losses if loss is not None]
    edge = max(1, min(EDGE_STEPS, len(steps) // 3))
    reasons = sorted({name for step in steps for name in step if name.startswith(DROPPED)})
    return {
        "steps": len(steps),
        "epochs": steps[-1].get("epoch") if steps else None,
        "loss_first": _loss(steps[:edge]),
        "loss_last": _loss(steps[-edge:]),
        "validation_loss_first": losses[0] if losses else None,
        "validation_loss_last": losses[-1] if losses else None,
        "validation_loss_best": min(known, default=None),
        "validation_last": {name: value for name, value in measured[max(measured)].items() if name not in RECORD}
        if measured
        else None,
        "tokens_trained": round(sum(step.get("tokens") or 0 for step in steps)),
        "rows_trained": round(sum(step.get("rows") or 0 for step in steps)),
        "rows_dropped": {
            name.removeprefix(DROPPED): round(sum(step.get(name) or 0 for step in steps)) for name in reasons
        },
        "step_s_median": statistics.median(step["step_s"] for step in steps) if steps else None,
        "learner_idle_fraction": _idle(steps),
        **efficiency(steps),
    }


def _loss(steps: Collection[Metrics]) -> float | None:
    return mean(step.get("loss") for step in steps)


def _idle(steps: Collection[Metrics]) -> float | None:
    loop_s = sum(step["step_s"] for step in steps)
    return sum(step["wait_s"] for step in steps) / loop_s if loop_s else None
