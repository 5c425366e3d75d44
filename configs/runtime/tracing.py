"""Spans of a process's work in OpenTelemetry's form: JSON lines in the run's folder and, if wanted, OTLP over HTTP.

A line of a file is a request of OTLP in JSON, as collectors read them from files and take them by HTTP. Ids of traces
follow from the run and the group, step or policy version, so that all processes know them without messages.

Not by OpenTelemetry's SDK: one of its spans costs about 90 µs of CPU time, which for short answers is some percent of a
step; one of these costs a tenth.
"""

import atexit
import itertools
import os
import secrets
import socket
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import unquote

import msgspec

from slipstream.configs.runtime.logging import LogInterval, get_log

log = get_log("runtime.tracing")

Value = str | int | float | bool | Sequence[str]
"""Value of an attribute."""
Subject = tuple[Literal["group", "step", "version"], str | int]
"""A group by its id, a step by the steps done after it, or a policy version: each has a trace."""

PREFIX: Final = "slipstream."
"""Of the names of attributes in files and exports."""
MOST_WAITING: Final = 20_000
"""Spans that wait to be written; beyond that, new ones are dropped and counted."""
SPANS_PER_LINE: Final = 512
MOST_CHARACTERS: Final = 500
"""Of an attribute's text."""
FILE_BYTES: Final = 256 << 20
"""Size at which a file is renamed, in place of the one that was renamed before."""
INTERVAL_S: Final = 0.5
EXPORT_S: Final = 5.0
"""Deadline of a request to a collector."""
CLOSING_S: Final = 10.0
LOG_EVERY_S: Final = 60.0


class Span:
    """Something that the process does, from `with` to its end; what begins meanwhile in the same task is its child."""

    __slots__ = ("_add", "_before", "attributes", "end_ns", "error", "name", "parent", "span_id", "start_ns", "trace")

    def __init__(
        self,
        add: "Callable[[Span], None]",
        name: str,
        *,
        trace: str,
        span_id: str,
        parent: str,
        attributes: dict[str, Value],
    ) -> None:
        """`add` is called with the span at its end."""
        self._add = add
        self._before: Span | None = None
        self.name = name
        self.trace = trace
        self.span_id = span_id
        self.parent = parent
        self.attributes = attributes
        self.error = ""
        self.start_ns = self.end_ns = 0

    def note(self, **attributes: Value) -> None:
        """Adds attributes that are known only now."""
        self.attributes |= attributes

    def __enter__(self) -> Self:
        self._before = _current.get()
        _current.set(self)
        self.start_ns = time.time_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end_ns = time.time_ns()
        _current.set(self._before)  # no token: a task that is destroyed ends it in another context
        self._before = None
        if kind is not None:
            self.error = kind.__name__
        self._add(self)


class _NoSpan:
    """Stands for a span where nothing is traced."""

    def note(self, **attributes: Value) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""


AnySpan = Span | _NoSpan
_NO_SPAN: Final = _NoSpan()
_current: ContextVar[Span | None] = ContextVar("span", default=None)
_tracer: "Tracer | None" = None


def span(name: str, *, of: Subject | None = None, root: bool = False, **attributes: Value) -> AnySpan:
    """A span, to be used by `with`.

    Args:
        of: the group, step or version whose trace it belongs to; None: that of the present span, or of none.
        root: it is the one span above the others of that trace, in whichever process these are.
    """
    if _tracer is None:
        return _NO_SPAN
    return _tracer.span(name, of, root, attributes)


def record(name: str, start_ns: int, end_ns: int, *, of: Subject | None = None, **attributes: Value) -> None:
    """Records a span that is over. Times are in nanoseconds since 1970, by this host's clock."""
    if _tracer is None:
        return
    over = _tracer.span(name, of, False, attributes)
    over.start_ns, over.end_ns = start_ns, end_ns
    _tracer.add(over)


def start_tracing(target: str | None, folder: Path, *, run: str, process: str, instance: str = "") -> None:
    """Traces this process from now on, if there is a target.

    Args:
        target: `file`; or the address of an OTLP collector, which gets the spans too; None: nothing is traced.
        folder: of the files; this process's is `<process>.jsonl`.
        run: name of the run, from which ids follow.
        instance: unique name of the process; empty: `process`.
    """
    global _tracer  # noqa: PLW0603  (one for each process)
    if target is None:
        return
    resource: dict[str, Value] = {
        "service.name": "slipstream",
        "service.instance.id": instance or process,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        f"{PREFIX}run": run,
    }
    writers = [_Writer("file", _SpanFile(folder / f"{process}.jsonl").append, resource)]
    if target != "file":
        writers.append(_Writer(target, _Collector(target).send, resource))
    _tracer = Tracer(run, writers)
    atexit.register(stop_tracing)


def stop_tracing() -> None:
    """Writes what is left, and traces nothing further."""
    global _tracer
    if _tracer is not None:
        stopped, _tracer = _tracer, None
        stopped.close()


class Tracer:
    """Makes the spans of this process and passes them to the writers."""

    def __init__(self, run: str, writers: "Sequence[_Writer]") -> None:
        self._run = run
        self._writers = writers
        self._ids = itertools.count(secrets.randbits(63))

    def span(self, name: str, of: Subject | None, root: bool, attributes: dict[str, Value]) -> Span:
        """A span that has not begun."""
        span_id = f"{next(self._ids) & 0xFFFFFFFFFFFFFFFF:016x}"
        above = _current.get()
        if of is not None:
            trace, top = derived_ids(self._run, *of)
            attributes[of[0]] = of[1]
            if root:
                return Span(self.add, name, trace=trace, span_id=top, parent="", attributes=attributes)
            parent = above.span_id if above is not None and above.trace == trace else top
            return Span(self.add, name, trace=trace, span_id=span_id, parent=parent, attributes=attributes)
        if above is None:
            return Span(self.add, name, trace=span_id * 2, span_id=span_id, parent="", attributes=attributes)
        return Span(self.add, name, trace=above.trace, span_id=span_id, parent=above.span_id, attributes=attributes)

    def add(self, over: Span) -> None:
        """Takes a span that is over."""
        for writer in self._writers:
            writer.add(over)

    def close(self) -> None:
        """Waits for the writers, for a bounded time."""
        for writer in self._writers:
            writer.close()


def derived_ids(run: str, kind: str, value: str | int) -> tuple[str, str]:
    """Ids of a trace and of its root: the same in all processes of a run."""
    digest = blake2b(f"{run}/{kind}/{value}".encode(), digest_size=24).hexdigest()
    return digest[:32], digest[32:]


class _Writer:
    """Writes spans in a thread of its own.

    Attributes:
        dropped: spans that found the queue full, or could not be written.
    """

    def __init__(self, name: str, write: Callable[[bytes], None], resource: Mapping[str, Value]) -> None:
        """`write` writes or sends a line, may block, and raises OSError."""
        self.dropped = 0
        self._name = name
        self._write = write
        self._resource = {"attributes": _attributes(resource, prefix="")}
        self._waiting = deque[Span]()
        self._closing = threading.Event()
        self._warnings = LogInterval(LOG_EVERY_S)
        self._thread = threading.Thread(target=self._work, name=f"traces {name}", daemon=True)
        self._thread.start()

    def add(self, over: Span) -> None:
        """Queues a span."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(over)
        else:
            self._drop(1, "they come faster than they are written")

    def close(self) -> None:
        """Writes what is left."""
        self._closing.set()
        self._thread.join(CLOSING_S)
        if self.dropped:
            log.warning("not all spans were written", target=self._name, dropped=self.dropped)

    def _work(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(INTERVAL_S)  # before the last round: what it finds was complete then
            while self._waiting:
                spans = [self._waiting.popleft() for _ in range(min(SPANS_PER_LINE, len(self._waiting)))]
                try:
                    self._write(self._line(spans))
                except OSError as error:
                    self._drop(len(spans), str(error))

    def _drop(self, spans: int, reason: str) -> None:
        self.dropped += spans
        if self._warnings.due():
            log.warning("spans dropped", target=self._name, dropped=self.dropped, reason=reason)

    def _line(self, spans: Iterable[Span]) -> bytes:
        scopes = [{"scope": {"name": "slipstream"}, "spans": [_otlp(over) for over in spans]}]
        return msgspec.json.encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": scopes}]})


def _otlp(over: Span) -> dict[str, Any]:
    """A span in OTLP's JSON, whose 64-bit numbers are texts."""
    found = {
        "traceId": over.trace,
        "spanId": over.span_id,
        "parentSpanId": over.parent,
        "name": over.name,
        "kind": 1,
        "startTimeUnixNano": str(over.start_ns),
        "endTimeUnixNano": str(over.end_ns),
        "attributes": _attributes(over.attributes, prefix=PREFIX),
    }
    return found | {"status": {"code": 2, "message": over.error}} if over.error else found


def _attributes(values: Mapping[str, Value], *, prefix: str) -> list[dict[str, Any]]:
    return [{"key": prefix + name, "value": _value(value)} for name, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    match value:
        case str():
            return {"stringValue": _text(value)}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"arrayValue": {"values": [{"stringValue": _text(each)} for each in value]}}


def _text(value: str) -> str:
    """The text as JSON can hold it: a policy chooses the names of the tools that it calls."""
    shown = value[:MOST_CHARACTERS]
    return shown if shown.isascii() else shown.encode(errors="replace").decode()


class _SpanFile:
    """A file of limited size: a full one is kept as `<name>.1.jsonl` until the next is full."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, line: bytes) -> None:
        """Appends a line, to a new file if the old one was moved away. Raises: OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            file.write(line + b"\n")
            if file.tell() > FILE_BYTES:
                self._path.rename(self._path.with_suffix(".1.jsonl"))


class _Collector:
    """An OTLP collector that takes JSON by HTTP."""

    def __init__(self, url: str) -> None:
        """OpenTelemetry's variable `OTEL_EXPORTER_OTLP_HEADERS` has headers for it, such as keys."""
        self._url = url if url.endswith("/v1/traces") else url.rstrip("/") + "/v1/traces"
        given = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
        pairs = (pair.partition("=") for pair in given.split(",") if "=" in pair)
        self._headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}

    def send(self, line: bytes) -> None:
        """Sends spans. Raises: OSError when the collector is away, or refuses."""
        headers = self._headers | {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, line, headers)
        try:
            with urllib.request.urlopen(request, timeout=EXPORT_S) as answer:
                answer.read()
        except (HTTPException, ValueError) as error:  # no valid answer, or a header that can't be sent
            raise OSError(f"{type(error).__name__}: {error}") from error


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedSpan:
    """A span as a file has it."""

    process: str
    """Unique name of the process that recorded it."""
    host: str
    name: str
    trace: str
    start_s: float
    """Seconds since 1970, by the clock of the process's host."""
    end_s: float
    span_id: str
    parent: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def read_spans(folder: Path) -> Iterator[TracedSpan]:
    """All spans of a run's files; lines that a killed process did not finish are skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                try:
                    resources = msgspec.json.decode(line)["resourceSpans"]
                    spans = [_read_span(each, resource) for resource in resources for each in _spans_of(resource)]
                except (msgspec.DecodeError, KeyError, TypeError, ValueError):
                    continue
                yield from spans


def _spans_of(resource: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for scope in resource["scopeSpans"]:
        yield from scope["spans"]


def _read_span(found: Mapping[str, Any], resource: Mapping[str, Any]) -> TracedSpan:
    recorded_by = _read_attributes(resource["resource"]["attributes"])
    return TracedSpan(
        process=str(recorded_by["service.instance.id"]),
        host=str(recorded_by["host.name"]),
        name=found["name"],
        trace=found["traceId"],
        start_s=int(found["startTimeUnixNano"]) / 1e9,
        end_s=int(found["endTimeUnixNano"]) / 1e9,
        span_id=found["spanId"],
        parent=found["parentSpanId"],
        attributes=_read_attributes(found["attributes"]),
        error=found.get("status", {}).get("message", ""),
    )


def _read_attributes(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {each["key"].removeprefix(PREFIX): _read_value(each["value"]) for each in found}


def _read_value(value: Mapping[str, Any]) -> Any:
    ((kind, found),) = value.items()
    if kind == "arrayValue":
        return [_read_value(each) for each in found["values"]]
    return int(found) if kind == "intValue" else found
