"""A timeline as the JSON of Chrome's trace events, which Perfetto opens: tracks of processes, nested slices, arrows."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MICROSECONDS: Final = 1e6
FIRST_PID: Final = 1001
"""More than the rows of a track: Perfetto takes a row with the number of its track for a main thread."""


@dataclass(frozen=True)
class Slice:
    """A stretch of time on a track."""

    track: str
    """The process, such as a rollout server."""
    name: str
    start_s: float
    end_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    row: str = ""
    """Row of the track; empty: that of the slice `parent`, or a free one."""
    key: str = ""
    """Unique; empty: it contains no other."""
    parent: str = ""
    flows: Sequence[str] = ()
    """Slices that share one are joined by arrows, in the order of their starts."""


def trace_events(slices: Sequence[Slice], tracks: Sequence[str], *, about: Mapping[str, Any]) -> str:
    """The timeline as JSON; its time begins with the first slice.

    Args:
        tracks: in their order from top to bottom.
        about: facts on the whole, to which its begin is added, in seconds since 1970.
    """
    begin_s = min((each.start_s for each in slices), default=0.0)
    events: list[dict[str, Any]] = []
    places: list[tuple[Slice, int, int]] = []
    for pid, track in enumerate(tracks, start=FIRST_PID):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": track}})
        events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for tid, (row, nested) in enumerate(_rows([each for each in slices if each.track == track]), start=1):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row}})
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
            places += [(each, pid, tid) for each in nested]
    events += [_slice_event(each, pid, tid, begin_s) for each, pid, tid in places]
    events += _arrows(places, begin_s)
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "start_s": begin_s}},
        separators=(",", ":"),
    )


def _slice_event(each: Slice, pid: int, tid: int, begin_s: float) -> dict[str, Any]:
    start, end = _at(each.start_s, begin_s), _at(each.end_s, begin_s)
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": each.name, "cat": "slipstream", "ts": start,
        "dur": round(end - start, 3), "args": dict(each.facts),
    }  # fmt: skip


def _arrows(places: Iterable[tuple[Slice, int, int]], begin_s: float) -> list[dict[str, Any]]:
    """Arrows from each slice of a flow to the next."""
    flows = defaultdict[str, list[tuple[Slice, int, int]]](list)
    for each, pid, tid in places:
        for flow in each.flows:
            flows[flow].append((each, pid, tid))
    events = []
    for number, joined in enumerate(flows.values(), start=1):
        joined.sort(key=lambda place: place[0].start_s)
        for index, (each, pid, tid) in enumerate(joined if len(joined) > 1 else ()):
            phase = "s" if index == 0 else "f" if index == len(joined) - 1 else "t"
            # `bp`: to the slice around this time, not to the next one that begins.
            place = {"pid": pid, "tid": tid, "ts": _at(each.start_s, begin_s), "bp": "e"}
            events.append({"ph": phase, "id": number, "name": "group", "cat": "slipstream", **place})
    return events


def _at(time_s: float, begin_s: float) -> float:
    return round((time_s - begin_s) * MICROSECONDS, 3)


def _rows(slices: Sequence[Slice]) -> list[tuple[str, list[Slice]]]:
    """The slices of a track in rows, in each of which they follow or contain one another.

    A row of Perfetto can't show slices that overlap in part.
    """
    named, others = defaultdict[str, list[Slice]](list), list[_Row]()
    for each in sorted(slices, key=lambda each: (each.start_s, -each.end_s)):
        if each.row:
            named[each.row].append(each)
            continue
        for row in others:
            row.advance(each.start_s)
        inside = (row for row in others if row.open and row.open[-1].key == each.parent and each.parent)
        row = next((row for row in inside if each.end_s <= row.open[-1].end_s), None) or _free(others)
        row.slices.append(each)
        row.open.append(each)
    return [*named.items(), *((f"row {number}", row.slices) for number, row in enumerate(others, start=1))]


@dataclass
class _Row:
    slices: list[Slice] = field(default_factory=list)
    open: list[Slice] = field(default_factory=list)
    """Those that are not over, each inside of the one before."""

    def advance(self, time_s: float) -> None:
        """Ends what is over."""
        while self.open and self.open[-1].end_s <= time_s:
            self.open.pop()


def _free(rows: list[_Row]) -> _Row:
    """A row in which no slice is open, added if there is none."""
    found = next((row for row in rows if not row.open), None)
    if found is None:
        found = _Row()
        rows.append(found)
    return found
