"""`slipstream trace`: timelines of groups and steps from ledger, metrics and spans."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime import tracing
from slipstream.configs.runtime.tracing import record, start_tracing
from slipstream.tools.ledger.trace_events import Slice, trace_events
from tests.tools.conftest import CommandLine
from tests.tools.ledger.conftest import SERVER

HOUR_S = 3600.0


def timeline(cli: CommandLine, config: RunConfig, *options: object) -> list[dict[str, Any]]:
    """Slices as dictionaries with `track`, `row`, `start` and `end` in seconds; all other events are consistent."""
    out = config.paths.root / "out.json"
    assert cli("trace", config.paths.root, *options, "--out", out) == 0, cli.err
    return read_slices(out.read_text())


def read_slices(text: str) -> list[dict[str, Any]]:
    events = json.loads(text)["traceEvents"]
    tracks = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    rows = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    slices = [
        {
            **each, "track": tracks[each["pid"]], "row": rows[each["pid"], each["tid"]],
            "start": each["ts"] / 1e6, "end": (each["ts"] + each["dur"]) / 1e6,
        }
        for each in events if each["ph"] == "X"
    ]  # fmt: skip
    for row in rows:  # one after or inside the other, or the row can't be shown
        stack: list[float] = []
        for each in sorted(
            (each for each in slices if (each["pid"], each["tid"]) == row), key=lambda each: (each["ts"], -each["dur"])
        ):
            while stack and stack[-1] <= each["start"] + 1e-9:
                stack.pop()
            assert not stack or each["end"] <= stack[-1] + 1e-9
            stack.append(each["end"])
    flows: dict[int, list[str]] = {}
    for each in events:
        if each["ph"] in ("s", "t", "f"):
            flows.setdefault(each["id"], []).append(each["ph"])
    assert all(phases[0] == "s" and set(phases[1:-1]) <= {"t"} for phases in flows.values())
    return slices


def write_metrics(config: RunConfig) -> None:
    phases = {"wait_s": 0.002, "train_s": 0.001, "publish_s": 0.001, "step_s": 0.005}
    lines = [{"kind": "step", "step": step, "reward": 0.5, **phases} for step in (1, 2)]
    config.paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_step_without_spans_shows_ledger_and_phases(cli: CommandLine, played: RunConfig) -> None:
    write_metrics(played)
    slices = timeline(cli, played, "--step", 1)
    states = [(each["row"], each["name"]) for each in slices if each["track"] == "ledger"]
    of_each = ["in flight", "ready", "leased", "trained", "durable"]
    assert states == [(f"group {number}", state) for number in (1, 2) for state in of_each]
    assert [each["name"] for each in slices if each["track"] == SERVER] == ["group 1", "group 2"]
    learner = {each["name"]: each for each in slices if each["track"] == "learner"}
    assert set(learner) == {"step 1", "wait", "train", "publish"}
    trained = next(each for each in slices if each["name"] == "trained")
    assert learner["train"]["end"] == pytest.approx(trained["start"], abs=1e-5)
    assert learner["wait"]["start"] == pytest.approx(trained["start"] - 0.003, abs=1e-5)
    assert "tracking.trace" in cli.out


@pytest.mark.parametrize(
    ("options", "groups"), [(["--last", "1"], {"3", "4"}), ([], {"1", "2", "3", "4"}), (["--group", "9"], {"9"})]
)
def test_groups_are_chosen(cli: CommandLine, played: RunConfig, options: Sequence[str], groups: set[str]) -> None:
    write_metrics(played)
    slices = timeline(cli, played, *options)
    assert {each["args"]["group"] for each in slices if each["track"] == "ledger"} == groups
    if "9" in groups:
        assert slices[1]["name"] == "filtered"


@pytest.mark.parametrize("skew_s", [0.0, HOUR_S, -HOUR_S])
def test_spans_of_a_skewed_clock_are_aligned(cli: CommandLine, played: RunConfig, skew_s: float) -> None:
    """The server's spans lie between issue and arrival in the ledger, however its clock differs."""
    write_metrics(played)
    ledger = timeline(cli, played, "--group", "1")
    start = json.loads((played.paths.root / "out.json").read_text())["otherData"]["start_s"]
    arrival_s = start + next(each["start"] for each in ledger if each["name"] == "ready")
    issue_s = start + next(each["start"] for each in ledger if each["name"] == "in flight")
    now_ns = round((issue_s + skew_s) * 1e9) + 1000
    end_ns = round((arrival_s + skew_s) * 1e9) - 1000
    start_tracing("file", played.paths.traces, run=played.run.name, process="rollout", instance=SERVER)
    with tracing.span("group", of=("group", "1"), root=True) as traced:
        record("generate", now_ns, end_ns - 500)
        record("reward", end_ns - 400, end_ns - 100, reward="exact_match")
    assert isinstance(traced, tracing.Span)
    traced.start_ns, traced.end_ns = now_ns, end_ns
    record("group", now_ns, end_ns, of=("group", "2"))  # at the same time: on a row of its own
    record("stall", now_ns + 100, now_ns + 200)
    record("stall", now_ns + round(1e12), now_ns + round(2e12))  # long after
    tracing.stop_tracing()
    slices = timeline(cli, played, "--group", "1")
    of_server = {each["name"]: each for each in slices if each["track"] == SERVER}
    assert set(of_server) == {"group 1", "generate", "reward exact_match", "stall"}
    assert of_server["generate"]["row"] == of_server["group 1"]["row"] != of_server["stall"]["row"]
    flight = next(each for each in slices if each["name"] == "in flight")
    assert (
        flight["start"] - 1e-5 <= of_server["group 1"]["start"] <= of_server["group 1"]["end"] <= flight["end"] + 1e-5
    )
    assert ("clock of" in cli.out) == bool(skew_s)
    assert "tracking.trace" not in cli.out


def test_spans_whose_step_was_dropped_are_shown(cli: CommandLine, played: RunConfig) -> None:
    write_metrics(played)
    with played.paths.metrics.open("a") as file:
        file.write('{"kind": "step", "step": 3}\n{"step": 4}\n')
    start_tracing("file", played.paths.traces, run=played.run.name, process="learner", instance="learner-0")
    now_ns = time.time_ns()
    record("train", now_ns, now_ns + 1000, of=("step", 9))
    record("lease", now_ns, now_ns + 1000, of=("step", 9), groups=["1"])
    tracing.stop_tracing()
    assert "learner-0" not in {each["track"] for each in timeline(cli, played, "--step", 1)}
    (played.paths.root / "out.json").unlink()
    assert cli("trace", played.paths.root, "--step", 1, "--out", "/proc/trace.json") == 2
    assert "/proc/trace.json" in cli.err


def test_crashed_run_is_read_from_its_folder(cli: CommandLine, crashed: RunConfig) -> None:
    assert {each["track"] for each in timeline(cli, crashed, "--group", "3")} == {"ledger", SERVER}


@pytest.mark.parametrize("options", [["--step", "77"], ["--group", "no-group"]])
def test_unknown_is_an_error(cli: CommandLine, played: RunConfig, options: Sequence[str]) -> None:
    assert cli("trace", played.paths.root, *options, folder=played.paths.root) == 1
    assert options[1] in cli.err
    assert not list(played.paths.root.glob("*.json"))


def test_overlapping_slices_get_rows_and_arrows_follow_time() -> None:
    now = time.time()
    slices = [
        Slice("b", "late", now + 2, now + 3, flows=["g"]),
        Slice("a", "parent", now, now + 2, key="p", flows=["g"]),
        Slice("a", "child", now + 0.5, now + 1, parent="p"),
        Slice("a", "other", now + 0.6, now + 0.9),
        Slice("a", "long child", now + 0.7, now + 5, parent="p"),
        Slice("a", "named", now, now + 1, row="mine", flows=["alone"]),
    ]
    rows = {each["name"]: each["row"] for each in read_slices(trace_events(slices, ["a", "b"], about={}))}
    assert rows["parent"] == rows["child"]
    assert rows["named"] == "mine"
    assert len({rows["parent"], rows["other"], rows["long child"]}) == 3


def test_default_file_lies_in_the_working_folder(cli: CommandLine, played: RunConfig, tmp_path: Path) -> None:
    assert cli("trace", played.paths.root, "--group", "1", folder=tmp_path) == 0
    (out,) = tmp_path.glob("*.json")
    assert out.name in cli.out
