"""Files on the rollout servers: `servers.json`, its history, and the events of servers."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from slipstream.buffer.wire.messages import LedgerCounts, ServerStatus, State
from slipstream.configs.paths import RunPaths
from slipstream.learner.metrics import fleet as fleet_module
from slipstream.learner.metrics.events import EventLog
from slipstream.learner.metrics.fleet import FEW_SERVERS, FleetRecord
from tests.full_disk import files_of_at_most


def state(*servers: ServerStatus, version: int = 5) -> State:
    return State(request=0, version=version, counts=LedgerCounts(), servers=list(servers), evals=[])


def server(name: str, up_s: float, **others: Any) -> ServerStatus:
    """A server that is busy a quarter of its time, and generates 100 tokens a second."""
    return ServerStatus(server=name, up_s=up_s, busy_s=up_s / 4, tokens_generated=round(100 * up_s), **others)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(paths: RunPaths, clock: Clock) -> FleetRecord:
    return FleetRecord(paths, EventLog(paths.events, started=0.0), started=0.0, clock=clock)


def test_state_and_rates_of_servers_are_written(fleet: FleetRecord, paths: RunPaths, clock: Clock) -> None:
    for seconds in range(21):
        clock.now = 100.0 + seconds
        known = {"kv_cache_use": 0.5, "running": 3, "waiting": 1, "stall_s": 0.02, "update_s": 0.4, "gpus": ["GPU-a"]}
        reached = server(
            "r0", 30.0 + seconds, version=4, prompt_tokens=80 * seconds, cached_tokens=60 * seconds, **known
        )
        fleet.observe(state(reached, server("r1", 1.0 + seconds, version=7)), step=seconds)
    found = json.loads(paths.servers.read_text(encoding="utf-8"))
    assert (found["time_s"], found["step"], found["version"]) == (120.0, 20, 5)
    first, second = found["servers"]
    assert first == first | known | {"server": "r0", "version": 4, "lag": 1, "up_s": 50.0}
    assert first["tokens_per_s"] == pytest.approx(100)
    assert first["idle_fraction"] == pytest.approx(0.75)
    assert (second["lag"], second["kv_cache_use"], second["stall_s"]) == (0, None, None)
    assert (first["prefix_hits"], second["prefix_hits"]) == (0.75, None)
    history = lines(paths.servers_history)
    assert [line["step"] for line in history] == [0, 10, 20]
    last = history[-1]
    assert (last["server_count"], last["lag_max"], last["kv_cache_use"], last["running"]) == (2, 1, 0.5, 3)
    assert last["tokens_per_s"] == pytest.approx(200)
    assert [each["server"] for each in last["servers"]] == ["r0", "r1"]


def test_state_is_written_once_a_second_and_at_the_end(fleet: FleetRecord, paths: RunPaths, clock: Clock) -> None:
    fleet.observe(state(server("r0", 1.0)), step=1)
    clock.now += 0.5
    fleet.observe(state(server("r0", 1.5)), step=2)
    assert json.loads(paths.servers.read_text(encoding="utf-8"))["step"] == 1
    fleet.observe(state(), step=3, final=True)
    assert json.loads(paths.servers.read_text(encoding="utf-8")) | {"step": 3, "servers": []}
    assert [event["kind"] for event in lines(paths.events)] == ["server_joined"]


def test_servers_that_come_go_and_crash_are_events(fleet: FleetRecord, paths: RunPaths) -> None:
    r0, r1 = server("r0", 5.0), server("r1", 5.0)
    for step, servers in enumerate([[r0], [r0, r1], [structs.replace(r0, engine_deaths=1), r1], [r1], [r0, r1]]):
        fleet.observe(state(*servers), step=step)
    found = [(event["step"], event["kind"], event["server"]) for event in lines(paths.events)]
    assert found == [
        (0, "server_joined", "r0"),
        (1, "server_joined", "r1"),
        (2, "engine_death", "r0"),
        (3, "server_lost", "r0"),
        (4, "server_joined", "r0"),
    ]


def test_rates_start_anew_with_a_server(fleet: FleetRecord, paths: RunPaths, clock: Clock) -> None:
    for up_s in (50.0, 60.0, 2.0):
        clock.now += 10
        fleet.observe(state(server("r0", up_s)), step=1)
    (found,) = json.loads(paths.servers.read_text(encoding="utf-8"))["servers"]
    assert (found["tokens_per_s"], found["idle_fraction"]) == (None, None)


def test_many_servers_have_sums_alone_in_the_history(fleet: FleetRecord, paths: RunPaths) -> None:
    strange = ServerStatus(server="nan", up_s=float("nan"), kv_cache_use=float("nan"), running=2)
    fleet.observe(state(strange, *(server(f"r{i}", 1.0) for i in range(FEW_SERVERS))), step=1)
    (line,) = lines(paths.servers_history)
    assert (line["server_count"], line["kv_cache_use"], line["running"]) == (FEW_SERVERS + 1, None, 2)
    assert "servers" not in line


def test_history_is_thinned_and_a_restart_appends(
    fleet: FleetRecord, paths: RunPaths, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "MOST_LINES", 8)
    for step in range(20):
        clock.now += 10
        fleet.observe(state(server("r0", 1.0 + step)), step=step)
    clock.now += 10
    again = FleetRecord(paths, EventLog(paths.events, started=0.0), started=0.0, clock=clock)
    again.observe(state(server("r0", 30.0)), step=20)
    steps = [line["step"] for line in lines(paths.servers_history)]
    assert len(steps) <= 8
    assert steps == sorted(steps)
    assert (steps[0], steps[-3:]) == (0, [18, 19, 20])


def test_full_disk_costs_these_files_only(fleet: FleetRecord, paths: RunPaths, clock: Clock) -> None:
    with capture_logs() as logs, files_of_at_most(0):
        fleet.observe(state(server("r0", 1.0)), step=1)
    clock.now += 10
    fleet.observe(state(server("r0", 2.0)), step=2)
    assert not paths.servers.exists()
    assert [line["log_level"] for line in logs] == ["warning"] * 2  # of the events and of the state, once each
