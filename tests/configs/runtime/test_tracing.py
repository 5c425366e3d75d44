"""Spans: their ids and nesting, the files, export to a collector, and what is dropped."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from structlog.testing import capture_logs

from slipstream.configs.runtime import tracing
from slipstream.configs.runtime.tracing import TracedSpan, derived_ids, read_spans, record, span, start_tracing

RUN = "a-run"


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    tracing.stop_tracing()


def recorded(folder: Path, work: Callable[[], None], *, target: str | None = "file") -> list[TracedSpan]:
    start_tracing(target, folder, run=RUN, process="rollout", instance="server-1")
    work()
    tracing.stop_tracing()
    return list(read_spans(folder))


def test_nothing_is_written_without_a_target(tmp_path: Path) -> None:
    def work() -> None:
        with span("group", of=("group", "1"), root=True) as traced:
            traced.note(tokens=1)
        record("stall", 0, 1)

    assert recorded(tmp_path / "traces", work, target=None) == []
    assert not (tmp_path / "traces").exists()


def test_ids_follow_from_the_subject_and_children_from_the_task(tmp_path: Path) -> None:
    async def play(group: str) -> None:
        with span("group", of=("group", group), root=True, server="server-1") as traced:
            await asyncio.gather(*(generate(samples) for samples in (1, 2)))
            traced.note(tokens=7)

    async def generate(samples: int) -> None:
        with span("generate", samples=samples):
            await asyncio.sleep(0)

    def work() -> None:
        async def both() -> None:
            await asyncio.gather(play("17"), play("18"))

        asyncio.run(both())
        with span("store", groups=["17", "18"]):
            record("late", 5, 9, of=("group", "17"), tool="\ud800" + "x" * 10_000)
        with pytest.raises(KeyError), span("fails", of=("version", 3)):
            raise KeyError

    spans = recorded(tmp_path, work)
    trace, root = derived_ids(RUN, "group", "17")
    assert derived_ids("other", "group", "17")[0] != trace
    of_17 = [each for each in spans if each.trace == trace]
    assert [(each.name, each.parent, dict(each.attributes)) for each in of_17] == [
        ("generate", root, {"samples": 1}),
        ("generate", root, {"samples": 2}),
        ("group", "", {"server": "server-1", "group": "17", "tokens": 7}),
        ("late", root, {"tool": "?" + "x" * 499, "group": "17"}),
    ]
    assert all(each.start_s <= each.end_s and each.process == "server-1" for each in spans)
    store, fails = (next(each for each in spans if each.name == name) for name in ("store", "fails"))
    assert (store.parent, store.attributes["groups"]) == ("", ["17", "18"])
    assert (fails.error, fails.trace) == ("KeyError", derived_ids(RUN, "version", 3)[0])
    assert len({each.span_id for each in spans}) == len(spans)


def test_lines_are_requests_of_otlp(tmp_path: Path) -> None:
    def work() -> None:
        with span("step", of=("step", 1), groups=["1"], rank=0, share=0.5, last=True):
            pass

    recorded(tmp_path, work)
    (line,) = (tmp_path / "rollout.jsonl").read_text().splitlines()
    protocol: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    json_format: Any = pytest.importorskip("google.protobuf.json_format")
    # OTLP has ids in hexadecimal digits, where other JSON of protobuf has base64: both are letters and digits.
    request = json_format.Parse(line, protocol.ExportTraceServiceRequest())
    (resource,) = request.resource_spans
    assert {each.key for each in resource.resource.attributes} >= {"service.name", "service.instance.id", "host.name"}
    (over,) = resource.scope_spans[0].spans
    values = {each.key: each.value for each in over.attributes}
    assert over.start_time_unix_nano <= over.end_time_unix_nano
    assert (values["slipstream.step"].int_value, values["slipstream.share"].double_value) == (1, 0.5)
    assert values["slipstream.last"].bool_value
    assert values["slipstream.groups"].array_value.values[0].string_value == "1"


class Collector(HTTPServer):
    """Takes requests and keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.taken: list[tuple[str, str, bytes]] = []


class Taker(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((self.path, self.headers["x-key"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_collector_gets_what_the_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20key,other=1")
    with Collector() as collector:
        Thread(target=collector.serve_forever, daemon=True).start()

        def work() -> None:
            with span("group", of=("group", "1")):
                pass

        (written,) = recorded(tmp_path, work, target=f"http://127.0.0.1:{collector.server_port}")
        collector.shutdown()
    ((path, key, body),) = collector.taken
    assert (path, key) == ("/v1/traces", "a key")
    assert json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"] == written.span_id


def test_absent_collector_and_full_queue_cost_only_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 3)
    monkeypatch.setattr(tracing, "INTERVAL_S", 60.0)  # nothing is written before the end
    started = time.monotonic()

    def work() -> None:
        for number in range(5):
            with span("group", of=("group", number)):
                pass

    with capture_logs() as logs:
        assert len(recorded(tmp_path, work, target="http://127.0.0.1:9")) == 3
    dropped = {line["target"]: line["dropped"] for line in logs if line["event"] == "not all spans were written"}
    assert dropped == {"file": 2, "http://127.0.0.1:9": 5}
    assert time.monotonic() - started < 30
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("traces")]


def test_full_file_is_kept_once_and_half_lines_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FILE_BYTES", 1)
    for number in range(3):
        spans = recorded(tmp_path, lambda number=number: record("stall", number, number + 1))  # type: ignore[misc]
    assert [each.start_s for each in spans] == [2e-9]
    with (tmp_path / "learner.jsonl").open("w") as file:
        file.write('{"resourceSpans": [{"resource"\n{"other": 1}\n[]\n')
    assert len(list(read_spans(tmp_path))) == 1
