"""`slipstream trace`: the life of a group, or of the groups of a step, as a timeline that Perfetto opens.

Sources: the histories in the ledger, `metrics.jsonl`, and the spans in `traces/` where `tracking.trace` was on. Times
are of Redis's clock. A host whose clock is ahead or behind is found by its spans: a server's work on a group lies
between the ticket's issue and the group's arrival, a learner's report of a step around its entry in the ledger.
"""

import argparse
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from slipstream.buffer.store.reader import Event, GroupRecord
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.tracing import TracedSpan, derived_ids, read_spans
from slipstream.learner.metrics.summary import read_records
from slipstream.tools.cli import at_least, new_file, printable
from slipstream.tools.ledger.open import RUN_HELP, OpenLedger, find_run, with_ledger
from slipstream.tools.ledger.trace_events import Slice, trace_events

LEDGER: Final = "ledger"
"""Track of the groups' states."""
LEARNER: Final = "learner"
STATE_NAMES: Final = {"issued": "in flight"}
"""Names of states in a timeline, where they differ."""
NEEDED: Final = {"kind", "step", "wait_s", "train_s", "step_s"}
"""Keys without which a record of the metrics is left out."""
PHASES: Final = NEEDED | {"publish_s", "policy_version", "reward"}
"""Keys of the metrics that are read."""
LAST_STEPS: Final = 4
LAST_STATE_S: Final = 0.001
"""Length of a state that has no end."""


@dataclass
class Selection:
    """Groups and steps to show, and the records of them."""

    run: str
    name: str
    """Name of the selection, for messages and the file."""
    steps: list[int] = field(default_factory=list)
    """As in metrics.jsonl: the steps done after each."""
    group_ids: list[str] = field(default_factory=list)
    records: dict[str, GroupRecord] = field(default_factory=dict)
    """Of the ledger, by the group's id."""
    metrics: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """By step."""
    spans: list[TracedSpan] = field(default_factory=list)

    def groups_of(self, step: int) -> list[str]:
        """Those of the groups that a step used."""
        return [group_id for group_id, record in self.records.items() if step - 1 in record.steps]

    def trained_at(self, step: int) -> float | None:
        """Time at which the ledger has the step's groups as trained."""
        events = (event for group_id in self.groups_of(step) for event in self.records[group_id].history)
        return next((event.at for event in events if _trained_in(event) == step - 1), None)


def _trained_in(event: Event) -> int | None:
    """The step (0-based) after which a group was trained; None for other events."""
    found = re.search(r"at step (\d+)", event.detail) if event.state in ("trained", "ready") else None
    return None if found is None else int(found[1])


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream trace`; returns 0.

    Raises: ConfigError when there is no such run, SlipstreamError when nothing is known of the group or step.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream trace",
        description="Write the life of a group, or of a step's groups, as a timeline for https://ui.perfetto.dev or "
        "chrome://tracing: states in the ledger, phases of the learner and, of runs with tracking.trace, what each "
        f"process did. Without an option: of the last {LAST_STEPS} steps. Nothing is changed.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=at_least(1), metavar="N", help="a step, as numbered in metrics.jsonl")
    chosen.add_argument("--group", metavar="ID", help="a group; `slipstream ledger show RUN` lists ids")
    chosen.add_argument("--last", type=at_least(1), metavar="N", default=LAST_STEPS, help="the last N steps")
    parser.add_argument("--out", type=new_file, metavar="FILE", help="default: trace-RUN-….json in this folder")
    arguments = parser.parse_args(argv)
    folder, config = find_run(arguments.run)
    metrics = _metrics(folder)
    selection = _selection(config.run.name, arguments, latest=max(metrics, default=0))
    problem = _read_ledger(arguments.run, selection)
    others = _complete(selection, read_spans(folder.traces))
    selection.metrics = {step: metrics[step] for step in selection.steps if step in metrics}
    spans = _of_interest(selection, read_spans(folder.traces), others)
    shifts = clock_shifts(selection.records, spans)
    selection.spans = _meanwhile(selection, [_moved(span, shifts) for span in spans], others)
    slices = timeline(selection)
    if not slices:
        raise SlipstreamError(
            f"nothing is known of {selection.name} of run {folder.name}: "
            + (problem or "it does not exist, or the ledger has forgotten it (buffer.retention)")
        )
    out: Path = arguments.out or Path(f"trace-{folder.name}-{selection.name.replace(' ', '-')}.json")
    tracks = _tracks(slices)
    try:
        out.write_text(
            trace_events(slices, tracks, about={"run": selection.run, "subject": selection.name}), encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error.strerror}; --out names another place") from None
    for host, shift_s in shifts.items():
        print(f"the clock of {printable(host)} differs from Redis's: its spans are moved by {shift_s:+.3f} s")
    if problem:
        print(printable(f"without the ledger: {problem}"), file=sys.stderr)
    if not spans:
        print("with tracking.trace=file a run also shows what each process did: this one has no spans")
    print(f"{out}: {len(slices):,} slices on {len(tracks)} tracks; open it in https://ui.perfetto.dev")
    return 0


def _metrics(folder: RunPaths) -> dict[int, Mapping[str, Any]]:
    """Records of steps, by step; of a step that was trained twice, the last."""
    if not folder.metrics.exists():
        return {}
    records = (record for record in read_records(folder.metrics, PHASES) if record.keys() >= NEEDED)
    return {record["step"]: record for record in records if record["kind"] == "step"}


def _selection(run: str, arguments: argparse.Namespace, *, latest: int) -> Selection:
    if arguments.group is not None:
        return Selection(run, f"group {arguments.group}", group_ids=[arguments.group])
    if arguments.step is not None:
        return Selection(run, f"step {arguments.step}", [arguments.step])
    first = max(1, latest - arguments.last + 1)
    return Selection(run, f"steps {first} to {latest}", list(range(first, latest + 1)))


def _read_ledger(run: str | None, selection: Selection) -> str:
    """Adds the groups' records to a selection; returns why there are none, otherwise an empty text.

    Raises: ConfigError when the ledger is not that of the run.
    """

    async def work(opened: OpenLedger) -> int:
        if selection.steps:
            used = await opened.reader.used_in(selection.steps[0] - 1, selection.steps[-1] - 1)
            selection.group_ids = [group_id for step in sorted(used) for group_id in sorted(used[step], key=int)]
        selection.records = {record.id: record for record in await opened.reader.histories(selection.group_ids)}
        return 0

    try:
        with_ledger(run, work)
    except ConfigError:
        raise
    except SlipstreamError as error:
        return str(error)
    return ""


# --- spans: read twice, because the files of a long run are too large to be kept --------------------------------------


def _complete(selection: Selection, spans: Iterable[TracedSpan]) -> set[str]:
    """Adds the steps that used the group, or groups that only the learner's spans still know.

    Returns: the traces of all groups and steps.
    """
    steps = {step + 1 for record in selection.records.values() for step in record.steps}
    known, traces = set(selection.group_ids), set[str]()
    for span in spans:
        if span.attributes.keys() & {"group", "step"}:
            traces.add(span.trace)
        step = span.attributes.get("step")
        if span.name == "lease" and step is not None and (leased := span.attributes.get("groups")):
            if step in selection.steps:
                selection.group_ids += [group_id for group_id in leased if group_id not in known]
                known.update(leased)
            elif known.intersection(leased):
                steps.add(step)
    selection.steps = selection.steps or sorted(steps)
    return traces


def _of_interest(selection: Selection, spans: Iterable[TracedSpan], others: Set[str]) -> list[TracedSpan]:
    """Spans of a selection's groups and steps, and those of no group and no step."""
    wanted = {derived_ids(selection.run, "group", group_id)[0] for group_id in selection.group_ids}
    wanted |= {derived_ids(selection.run, "step", step)[0] for step in selection.steps}
    return [span for span in spans if span.trace in wanted or span.trace not in others]


def _meanwhile(selection: Selection, spans: Sequence[TracedSpan], others: Set[str]) -> list[TracedSpan]:
    """Spans of a selection's groups and steps, and of the others those at the same time."""
    times = [time_s for span in spans if span.trace in others for time_s in (span.start_s, span.end_s)]
    times += [event.at for record in selection.records.values() for event in record.history if event.state != "durable"]
    first_s, last_s = min(times, default=math.inf), max(times, default=-math.inf)
    ids = set(selection.group_ids)
    return [
        span
        for span in spans
        if span.trace in others
        or (
            (span.start_s <= last_s and span.end_s >= first_s)
            and (span.name != "store" or ids.intersection(span.attributes.get("groups", ())))
        )
    ]


# --- clocks -----------------------------------------------------------------------------------------------------------


def clock_shifts(records: Mapping[str, GroupRecord], spans: Iterable[TracedSpan]) -> dict[str, float]:
    """Seconds to add to the times of each host whose clock contradicts the ledger's; others are left out."""
    least, most = defaultdict[str, float](lambda: -math.inf), defaultdict[str, float](lambda: math.inf)
    for span in spans:
        for early_s, late_s in _bounds(records, span):
            least[span.host] = max(least[span.host], early_s)
            most[span.host] = min(most[span.host], late_s)
    return {
        host: (least[host] + most[host]) / 2
        for host in least
        if not least[host] <= 0 <= most[host] and math.isfinite(least[host] + most[host])
    }


def _bounds(records: Mapping[str, GroupRecord], span: TracedSpan) -> Iterator[tuple[float, float]]:
    """Least and greatest shift of a span's times with which they agree with the ledger."""
    match span.name:
        case "group":
            record = records.get(span.attributes["group"])
            times = {} if record is None else {event.state: event.at for event in reversed(record.history)}
            if "ready" in times:
                yield times["issued"] - span.start_s, times["ready"] - span.end_s
        case "report":
            step = span.attributes["step"] - 1
            events = (event for record in records.values() if step in record.steps for event in record.history)
            for at in {event.at for event in events if _trained_in(event) == step}:
                yield at - span.end_s, at - span.start_s


def _moved(span: TracedSpan, shifts: Mapping[str, float]) -> TracedSpan:
    shift_s = shifts.get(span.host, 0.0)
    return replace(span, start_s=span.start_s + shift_s, end_s=span.end_s + shift_s) if shift_s else span


# --- slices -----------------------------------------------------------------------------------------------------------


def timeline(selection: Selection) -> list[Slice]:
    """All slices of a selection."""
    traced_groups = {span.attributes["group"] for span in selection.spans if span.name == "group"}
    traced_steps = {span.attributes["step"] for span in selection.spans if span.name == "step"}
    return [
        *(each for record in selection.records.values() for each in _states(record)),
        *(
            each
            for record in selection.records.values()
            if record.id not in traced_groups
            for each in _in_flight(record)
        ),
        *(each for step in selection.metrics if step not in traced_steps for each in _phases(selection, step)),
        *(_span_slice(selection, span) for span in selection.spans),
    ]


def _states(record: GroupRecord) -> Iterator[Slice]:
    """A group's states, on a row of its own; the last, which does not end, is short."""
    row, history = f"group {record.id}", record.history
    last_s = history[-1].at + LAST_STATE_S if history else 0.0
    ends = [event.at for event in history[1:]] + [last_s]
    for event, end_s in zip(history, ends, strict=True):
        facts = {"group": record.id, "detail": event.detail, "version": record.number("version")}
        flows = [row] if event.state == "ready" else []
        yield Slice(LEDGER, STATE_NAMES.get(event.state, event.state), event.at, end_s, facts, row=row, flows=flows)


def _in_flight(record: GroupRecord) -> Iterator[Slice]:
    """The time from ticket to arrival, on the track of the server: without spans that is all that is known."""
    for event, following in pairwise(record.history):
        if event.state == "issued":
            name, server = f"group {record.id}", record.fields.get("server", "")
            facts = {"group": record.id, "until": following.state}
            yield Slice(server, name, event.at, following.at, facts, flows=[name])


def _phases(selection: Selection, step: int) -> Iterator[Slice]:
    """The learner's phases in a step by its metrics, placed by the time of its entry in the ledger."""
    metrics, trained_at = selection.metrics[step], selection.trained_at(step)
    if trained_at is None:
        return
    train_s, wait_s = metrics["train_s"], metrics["wait_s"]
    start_s = trained_at - train_s - wait_s
    facts = {key: metrics[key] for key in ("step", "reward", "policy_version") if key in metrics}
    key = f"step {step}"
    yield Slice(LEARNER, key, start_s, start_s + metrics["step_s"], facts, key=key)
    yield Slice(LEARNER, "wait", start_s, start_s + wait_s, parent=key)
    flows = [f"group {group_id}" for group_id in selection.groups_of(step)]
    yield Slice(LEARNER, "train", start_s + wait_s, trained_at, parent=key, flows=flows)
    yield Slice(LEARNER, "publish", trained_at, trained_at + metrics.get("publish_s", 0.0), parent=key)


def _span_slice(selection: Selection, span: TracedSpan) -> Slice:
    named, flows = span.attributes.get(span.name), list[str]()
    if span.name == "group":
        flows = [f"group {named}"]
    elif span.name == "train":
        # Of another step, if the span that has its number was dropped.
        steps = [step for step in selection.steps if derived_ids(selection.run, "step", step)[0] == span.trace]
        flows = [f"group {group_id}" for step in steps for group_id in selection.groups_of(step)]
    return Slice(
        span.process,
        span.name if named is None else f"{span.name} {named}",
        span.start_s,
        span.end_s,
        {**span.attributes, **({"error": span.error} if span.error else {})},
        key=span.span_id,
        parent=span.parent,
        flows=flows,
    )


def _tracks(slices: Iterable[Slice]) -> list[str]:
    """Tracks from top to bottom: the ledger, the buffer, rollout servers, the learner's ranks."""
    tracks = {each.track for each in slices}
    first = [track for track in (LEDGER, "buffer") if track in tracks]
    last = sorted(track for track in tracks if track == LEARNER or track.startswith(f"{LEARNER}-"))
    return [*first, *sorted(tracks - {*first, *last}), *last]
