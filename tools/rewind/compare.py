"""The differences of two runs, as far as their folders have them, and the likely cause."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from slipstream.configs import RunConfig
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.metrics.starts import read_starts
from slipstream.tools.follow import MISSING, number, parse_lines
from slipstream.tools.ledger.open import OpenLedger, find_run, with_ledger
from slipstream.tools.rewind.series import (
    FEWEST_WINDOWS,
    SHORTEST,
    Parting,
    RunMetrics,
    first_difference,
    parting,
    read_metrics,
)
from slipstream.tools.rewind.settings import Difference, differences

STALENESS: Final = ("staleness_mean", "staleness_max", "staleness_in_flight", "staleness_in_queue")
SCHEDULED: Final = frozenset({"lr", "critic_lr", "process_reward_lr"})
"""Metrics without noise."""
_OF_A_START: Final = frozenset({"started_at", "command", "folder"})
"""Facts in run.json that differ between any two starts."""
SHOWN_CHARACTERS: Final = 60
Pair = tuple[Any, Any]
"""Values in A and B."""


@dataclass(frozen=True)
class Side:
    """One of the two runs, as far as its folder has it."""

    folder: RunPaths
    config: RunConfig
    metrics: RunMetrics
    identity: Mapping[str, str]
    """Facts on tasks, tokenizer and initial model that the ledger has fixed."""
    identity_error: str
    """The reason why there is no identity, or an empty text."""
    start: Mapping[str, Any] | None
    """Versions and machine of the latest start; None where they are not recorded."""
    groups: Mapping[int, Sequence[str]]
    """Groups by step, where recorded."""


@dataclass(frozen=True)
class MetricDifference:
    """A metric whose values differ.

    Attributes:
        differs_at: first step at which they differ at all.
        parting: where they differ by more than noise, if they do.
    """

    name: str
    differs_at: int
    parting: Parting | None


@dataclass(frozen=True)
class Comparison:
    """The differences of two runs, most important first."""

    a: Side
    b: Side
    settings: Sequence[Difference]
    versions: Mapping[str, Pair] | None
    """None where a run has not recorded them."""
    data: Mapping[str, Pair] | None
    other_groups_at: int | None
    """First step that trained other groups, where both runs recorded them."""
    common_steps: int
    metrics: Sequence[MetricDifference]
    causes: Sequence[str]


def read_side(run: str) -> Side:
    """Everything on a run. Raises: ConfigError when there is no such run, SlipstreamError when it can't be read."""
    folder, config = find_run(run)
    identity, error = _identity(folder)
    try:
        metrics = read_metrics(folder)
        start, groups = next(reversed(read_starts(folder.starts)), None), _groups(folder)
    except OSError as failed:
        raise SlipstreamError(f"{failed.filename} can't be read: {failed.strerror}") from None
    return Side(folder, config, metrics, identity, error, start, groups)


def _identity(folder: RunPaths) -> tuple[dict[str, str], str]:
    """The identity in the run's ledger; without a readable one, the reason."""
    found: dict[str, str] = {}

    async def read(opened: OpenLedger) -> int:
        found.update(opened.identity)
        return 0

    try:
        with_ledger(str(folder.root), read)
    except SlipstreamError as error:
        return {}, str(error)
    return found, ""


def _groups(folder: RunPaths) -> dict[int, list[str]]:
    """Groups by trained step; of a repeated step, the later ones."""
    try:
        records = parse_lines(folder.steps.read_bytes())
    except FileNotFoundError:
        return {}
    return {
        record["step"]: list(map(str, record["groups"]))
        for record in records
        if isinstance(record.get("step"), int) and isinstance(record.get("groups"), list)
    }


# --- comparison -------------------------------------------------------------------------------------------------------


def compare(a: Side, b: Side) -> Comparison:
    """All differences."""
    settings = differences(a.config, b.config)
    known = a.start is not None and b.start is not None
    versions = differing(_flat(a.start or {}), _flat(b.start or {})) if known else None
    data = differing(a.identity, b.identity) if a.identity and b.identity else None
    common = {int(record["step"]) for record in a.metrics.steps} & {int(record["step"]) for record in b.metrics.steps}
    recorded = sorted(a.groups.keys() & b.groups.keys())
    other_groups_at = next((step for step in recorded if a.groups[step] != b.groups[step]), None)
    metrics = metric_differences(a.metrics, b.metrics)
    found = Comparison(a, b, settings, versions, data, other_groups_at, len(common), metrics, ())
    return replace(found, causes=likely_causes(found))


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Values by key where they differ; None where one has no such key."""
    return {key: (a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys, without facts that differ between any two starts."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if prefix or key not in _OF_A_START:
            flat |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, Mapping) else {f"{prefix}{key}": inner}
    return flat


def metric_differences(a: RunMetrics, b: RunMetrics) -> list[MetricDifference]:
    """Metrics that differ, those that part first first."""
    found = []
    for name in dict.fromkeys([*a.names(), *b.names()]):
        first, second = a.series(name), b.series(name)
        differs_at = first_difference(first, second)
        if differs_at is not None:
            at = parting(first, second)
            if name in SCHEDULED:
                at = Parting(differs_at, differs_at, first[differs_at], second[differs_at], math.inf)
            found.append(MetricDifference(name, differs_at, at))
    found += _evaluations(a, b)
    return sorted(found, key=lambda metric: (metric.parting.first if metric.parting else math.inf, metric.differs_at))


def _evaluations(a: RunMetrics, b: RunMetrics) -> Iterator[MetricDifference]:
    """The evaluations' score: it parts where the intervals of a policy version, and of the next one, don't overlap."""
    ours, theirs = (
        {
            record["policy_version"]: record
            for record in run.evaluations
            if isinstance(record.get("policy_version"), int)
        }
        for run in (a, b)
    )
    differs_at, apart, last = None, None, None
    for version in sorted(ours.keys() & theirs.keys()):
        one, other, step = ours[version], theirs[version], int(number(ours[version], "step") or 0)
        x, y = number(one, "score"), number(other, "score")
        if x is None or y is None:
            continue
        differs_at = step if differs_at is None and x != y else differs_at
        interval = (number(one, "score_interval") or 0.0) + (number(other, "score_interval") or 0.0)
        over = abs(x - y) > interval
        if over and last is not None and apart is None:
            apart = last
        # The intervals are 1.96 standard errors.
        last = Parting(step, step, x, y, 1.96 * abs(x - y) / interval if interval else math.inf) if over else None
    if differs_at is not None:
        yield MetricDifference("score (evaluation)", differs_at, apart)


# --- causes -----------------------------------------------------------------------------------------------------------


def likely_causes(found: Comparison) -> list[str]:
    """Sentences, the likeliest cause first: by what acts on the metrics that part first."""
    parted = {metric.name: metric.parting for metric in found.metrics if metric.parting}
    first = min(parted.values(), key=lambda at: at.first, default=None)
    if first is None:
        return [_no_parting(found)]
    known = list(_causes(found, parted, first))
    return known or ["no recorded difference: generation is sampled, and runs of equal settings can part like this too"]


def _causes(found: Comparison, parted: Mapping[str, Parting], first: Parting) -> Iterator[str]:
    yield from _causes_by_settings([one for one in found.settings if not one.is_timing], parted)
    settings = {one.key for one in found.settings}
    for key, values in (found.data or {}).items():
        if key not in settings:
            yield f"the data differs: {key} is {shown(values[0])} in A and {shown(values[1])} in B"
    yield from _restarts(found, first)
    yield from _causes_by_settings([one for one in found.settings if one.is_timing], parted)
    if found.versions:
        yield f"versions or machine differ ({', '.join(found.versions)}), which changes rounding and pace"
    yield from _pace(found, parted)
    if found.other_groups_at is not None:
        step = found.other_groups_at
        yield f"the runs train other groups from step {step} on, {_before(step, first.first)} the first metric parts"


def _no_parting(found: Comparison) -> str:
    if not found.metrics:
        return f"no metric differs in the {found.common_steps:,} steps that both runs have"
    at = min(metric.differs_at for metric in found.metrics)
    if found.common_steps < FEWEST_WINDOWS * SHORTEST:
        return f"values differ from step {at} on; {found.common_steps} common steps are too few to tell noise"
    text = f"values differ from step {at} on, but none by more than noise"
    return text + ("" if any(one.acts_on for one in found.settings) else ": equal settings sample other answers")


def _causes_by_settings(settings: Iterable[Difference], parted: Mapping[str, Parting]) -> Iterator[str]:
    """Settings that act on a metric that parts, by the step of the earliest one."""
    causes = []
    for setting in settings:
        hit = [(at.first, name) for name, at in parted.items() if name.startswith(tuple(setting.acts_on))]
        if hit:
            first = ", ".join(f"{name} (step {step})" for step, name in sorted(hit)[:3])
            values = f"{shown(setting.a)} in A, {shown(setting.b)} in B"
            what = "when groups arrive, and with it on" if setting.is_timing else "on"
            causes.append((min(hit)[0], f"{setting.key} ({values}) acts {what} what parts: {first}"))
    # A stable sort: of settings whose metrics part at the same step, the more direct one stays first.
    yield from (text for _, text in sorted(causes, key=lambda cause: cause[0]))


def _restarts(found: Comparison, first: Parting) -> Iterator[str]:
    for label, side in (("A", found.a), ("B", found.b)):
        for restart in side.metrics.restarts:
            if restart.step <= first.last:
                repeated = f", repeating {restart.repeated} steps" if restart.repeated else ""
                yield f"run {label} was restarted at step {restart.step}{repeated}, before the first metric parts"


def _pace(found: Comparison, parted: Mapping[str, Parting]) -> Iterator[str]:
    staleness = [(parted[name].first, name) for name in STALENESS if name in parted]
    if staleness:
        step, name = min(staleness)
        reward = parted.get("reward")
        compared = f", {_before(step, reward.first)} reward does" if reward else ""
        yield f"{name} parts at step {step}{compared}: generation and training kept another pace"


def _before(step: int, other: int) -> str:
    return "before" if step < other else "at the step at which" if step == other else "after"


def shown(value: Any) -> str:
    """A setting or fact as short text."""
    if value is None:
        return MISSING
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
