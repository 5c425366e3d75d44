"""Metrics of a run as series over its steps, and where two of them part. Pure functions, but for the readers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

from slipstream.configs.paths import RunPaths, is_run_locked
from slipstream.learner.metrics.catalog import STEP
from slipstream.tools.follow import Record, number, parse_lines
from slipstream.tools.summary import last_of_each_step

WINDOWS: Final = 20
"""Number of windows into which the common steps are cut, and the bounds of their length."""
SHORTEST, LONGEST = 3, 50
FEWEST_WINDOWS: Final = 4
DEVIATIONS: Final = 5.0
"""Standard errors by which the means of two windows in a row must differ."""
ROUNDING: Final = 1e-6
"""Relative difference below which numbers count as equal."""
_TIMED_UNITS: Final = frozenset({"s", "actions/s", "groups", "servers", "bytes", "steps", "version", "W", "USD"})
"""Units of metrics that depend on time and place, not on what is trained."""
_TIMED: Final = (
    "buffer/",
    "weights/",
    "servers/",
    "engine_deaths",
    "requests_restarted",
    "learner_idle",
    "generator_idle",
)

Series = Mapping[int, float]
"""Values by step; NaN where the record has null, which is how values that are not finite are written."""


@dataclass(frozen=True)
class Restart:
    """A start after the first: `step` is the first step that was trained after it."""

    step: int
    repeated: int
    """Steps that were trained again."""


@dataclass(frozen=True)
class RunMetrics:
    """The records of a run's `metrics.jsonl`."""

    state: str
    """`finished`, `running`, or `stopped`."""
    steps: Sequence[Record]
    """Of a step that was repeated after a restart, the later record."""
    evaluations: Sequence[Record]
    restarts: Sequence[Restart]

    def series(self, name: str) -> Series:
        """A metric over the steps that have it."""
        return {int(record["step"]): _value(record, name) for record in self.steps if name in record}

    def names(self) -> list[str]:
        """Metrics of its steps that describe the training, in the order of the records; not those of time and place."""
        present = dict.fromkeys(name for record in self.steps for name, value in record.items() if _is_number(value))
        return [name for name in present if not is_timed(name)]


def read_metrics(folder: RunPaths) -> RunMetrics:
    """The metrics of a finished, running or crashed run; without a file there are none. Raises: OSError."""
    try:
        records = parse_lines(folder.metrics.read_bytes())
    except FileNotFoundError:
        records = []
    steps = [record for record in records if record.get("kind") == "step" and isinstance(record.get("step"), int)]
    finished = any(record.get("kind") == "finish" for record in records[-1:])
    state = "running" if is_run_locked(folder) else "finished" if finished else "stopped"
    evaluations = [record for record in records if record.get("kind") == "eval"]
    return RunMetrics(state, last_of_each_step(steps), evaluations, find_restarts(steps))


def find_restarts(steps: Sequence[Record]) -> list[Restart]:
    """Restarts between step records in the order of the file: the step, or the time since the start, went back."""
    found = []
    for before, after in pairwise(steps):
        back = int(before["step"]) + 1 - int(after["step"])
        if back > 0 or (number(after, "time_s") or 0.0) < (number(before, "time_s") or 0.0):
            found.append(Restart(int(after["step"]), max(0, back)))
    return found


@cache
def is_timed(name: str) -> bool:
    """True for a metric that depends on time and place, not on what is trained."""
    if name.startswith(_TIMED):
        return True
    return any(metric.unit in _TIMED_UNITS and metric.matches(name) for metric in STEP)


def first_difference(a: Series, b: Series) -> int | None:
    """The first step at which two series differ at all; None if they are equal on all steps that both have."""
    return next((step for step in sorted(a.keys() & b.keys()) if not _equal(a[step], b[step])), None)


@dataclass(frozen=True)
class Parting:
    """The first of two windows in a row whose means differ by more than noise."""

    first: int
    """First step of the window."""
    last: int
    a: float
    """Mean over the window in run A."""
    b: float
    deviations: float
    """Difference of the means in standard errors."""


def parting(a: Series, b: Series) -> Parting | None:
    """The first window with a difference beyond the noise of both series; None without one, or for short series.

    The steps that both have are cut into windows. The noise of a window's mean is estimated in each run alone, from
    the second differences of its windows' means and of its single steps (the larger of the two counts): a trend
    cancels. From the difference is taken what a run itself changes from this window to a neighbour (the smaller
    change): one run may be a window ahead. The rest must have the same sign and exceed DEVIATIONS standard errors in
    two windows in a row. A value that is not finite in one run alone is a difference at that step.
    """
    steps = sorted(a.keys() & b.keys())
    infinite = next((step for step in steps if math.isfinite(a[step]) != math.isfinite(b[step])), None)
    finite = [step for step in steps if math.isfinite(a[step]) and math.isfinite(b[step])]
    found = _parting_of_means(finite, a, b)
    if infinite is not None and (found is None or infinite <= found.last):
        return Parting(infinite, infinite, a[infinite], b[infinite], math.inf)
    return found


def _parting_of_means(steps: Sequence[int], a: Series, b: Series) -> Parting | None:
    length = min(max(len(steps) // WINDOWS, SHORTEST), LONGEST)
    windows = [steps[start : start + length] for start in range(0, len(steps) - length + 1, length)]
    if len(windows) < FEWEST_WINDOWS:
        return None
    means_a, means_b = ([statistics.fmean(run[step] for step in window) for window in windows] for run in (a, b))
    error_a, error_b = (
        _error([run[step] for step in steps], means, length) for run, means in ((a, means_a), (b, means_b))
    )
    over = [
        _over(means_a[place], means_b[place], max(_drift(means_a, place), _drift(means_b, place)), error_a, error_b)
        for place in range(len(windows))
    ]
    for place, (now, following) in enumerate(pairwise(over)):
        if min(abs(now), abs(following)) > DEVIATIONS and now * following > 0:
            return Parting(windows[place][0], windows[place][-1], means_a[place], means_b[place], abs(now))
    return None


def _over(a: float, b: float, drift: float, *errors: float) -> float:
    """Excess of the difference over the drift, in standard errors; 0 for a difference of rounding."""
    error = math.hypot(*errors)
    over = abs(b - a) - drift
    if over <= ROUNDING * max(abs(a), abs(b)):
        return 0.0
    return math.copysign(over / error if error else math.inf, b - a)


def _drift(means: Sequence[float], place: int) -> float:
    """Change of a window's mean from or to its neighbours: the smaller one."""
    neighbours = [*means[max(0, place - 1) : place], *means[place + 1 : place + 2]]
    return min(abs(means[place] - neighbour) for neighbour in neighbours)


def _error(values: Sequence[float], means: Sequence[float], length: int) -> float:
    """Standard error of the mean of a window of `length` values."""
    return max(noise(values) / math.sqrt(length), noise(means))


def noise(values: Sequence[float]) -> float:
    """Standard deviation of a series about its local trend: of its second differences, by their median where many
    are not 0, because single spikes are no noise.
    """
    bends = [abs(y - (x + z) / 2) for x, y, z in zip(values, values[1:], values[2:], strict=False)]
    if not bends:
        return 0.0
    # The variance of a second difference of independent values is 1.5 times theirs; the median of a normal
    # distribution's absolute value is 0.6745 of its standard deviation.
    typical = statistics.median(bends) / 0.6745
    return (typical or math.sqrt(statistics.fmean(bend * bend for bend in bends))) / math.sqrt(1.5)


def _value(record: Record, name: str) -> float:
    value = number(record, name)
    return math.nan if value is None else value


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


# --- one series -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """Condition of a broken metric: below or above a bound or, without either, not finite."""

    below: float | None = None
    above: float | None = None

    def holds(self, value: float) -> bool:
        """True for a broken value. One that is not finite is broken in any case."""
        if not math.isfinite(value):
            return True
        return (self.below is not None and value < self.below) or (self.above is not None and value > self.above)

    def __str__(self) -> str:
        bounds = [
            f"{word} {bound:g}" for word, bound in (("below", self.below), ("above", self.above)) if bound is not None
        ]
        return " or ".join(bounds) or "not finite"


def crossing(series: Series, condition: Condition, *, confirm: int) -> int | None:
    """The first of `confirm` steps in a row at which the condition holds; None if there is none.

    At the end of the series fewer suffice: a run may have ended by it.
    """
    steps, since = sorted(series), None
    for step in steps:
        if not condition.holds(series[step]):
            since = None
            continue
        since = step if since is None else since
        if len([one for one in steps if since <= one <= step]) >= confirm:
            return since
    return since


@dataclass(frozen=True)
class Jump:
    """The step at which a series is farthest from its values before."""

    step: int
    value: float
    usual: float
    """Median of the values before."""
    deviations: float
    """Distance in standard deviations of the series' noise before."""


def jump(series: Series, first: int, last: int, *, before: int = 20) -> Jump | None:
    """The largest jump in the steps from `first` to `last`, against up to `before` steps before each; None if there
    are too few.
    """
    found: Jump | None = None
    for step in sorted(step for step in series if first <= step <= last):
        earlier = [series[one] for one in range(step - before, step) if one in series and math.isfinite(series[one])]
        if len(earlier) < SHORTEST:
            continue
        usual, noise_before = (
            statistics.median(earlier),
            max(noise(earlier), ROUNDING * abs(statistics.median(earlier))),
        )
        distance = abs(series[step] - usual) if math.isfinite(series[step]) else math.inf
        deviations = distance / noise_before if noise_before else (math.inf if distance else 0.0)
        if found is None or deviations > found.deviations:
            found = Jump(step, series[step], usual, deviations)
    return found
