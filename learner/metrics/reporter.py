"""Metrics records of any training, passed to its trackers; on rank 0."""

import time
from collections import deque
from collections.abc import Mapping, Sequence

from slipstream.configs.runtime.logging import get_log
from slipstream.learner.metrics.trackers import Record, Tracker

log = get_log("learner.reporter")

WINDOW_S = 2.0
"""Rates and shares are over so much time, or over one step if that takes longer."""


class Reporter:
    """Completes the records of steps and passes all records to the trackers."""

    def __init__(self, trackers: Sequence[Tracker], *, steps: int, started: float) -> None:
        """Args:
        steps: of the whole training.
        started: start of the run, by this host's monotonic clock.
        """
        self._trackers = trackers
        self._steps = steps
        self._started = started
        self._first_step_at: float | None = None
        self._times: deque[tuple[float, float, float]] = deque()

    def step_started(self) -> None:
        """A step has its batch; the first call marks the end of the start-up."""
        if self._first_step_at is None:
            self._first_step_at = time.monotonic()
            log.info("training the first step")

    def step_finished(
        self, step: int, metrics: Mapping[str, float], *, wait_s: float, train_s: float, step_s: float
    ) -> None:
        """Logs the record of the step after which `step` steps are done."""
        now = time.monotonic()
        self._times.append((now, wait_s, step_s))
        while now - self._times[0][0] > WINDOW_S:
            self._times.popleft()
        self.log(
            {
                "kind": "step",
                "time_s": self.since_start_s(),
                "step": step,
                "steps": self._steps,
                **metrics,
                "wait_s": wait_s,
                "train_s": train_s,
                "step_s": step_s,
                "learner_idle_fraction": sum(wait for _, wait, _ in self._times) / sum(s for _, _, s in self._times),
            }
        )

    def log(self, record: Record) -> None:
        """Passes a record to all trackers."""
        for tracker in self._trackers:
            tracker.log(record)

    def close(self) -> None:
        """Logs the end of the run and closes the trackers."""
        self.log({"kind": "finish", "time_s": self.since_start_s()})
        for tracker in self._trackers:
            tracker.close()

    def since_start_s(self) -> float:
        """Time since the start of the run."""
        return time.monotonic() - self._started

    def startup_s(self) -> float:
        """Time from the start of the run to its first step, or until now if there was none."""
        return (self._first_step_at or time.monotonic()) - self._started
