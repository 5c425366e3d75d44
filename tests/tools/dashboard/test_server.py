"""The dashboard's server as a process: every route, live files, and what it refuses."""

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.configs.paths import LEARNER, RunPaths, hold_run_lock
from slipstream.tools.dashboard.columns import MetricsTable
from tests.conftest import free_port
from tests.tools.conftest import CommandLine
from tests.tools.dashboard.recorded import HOSTILE_TEXT, append, evaluation, make_run, step
from tests.tools.dashboard.served import Server, served
from tests.tools.ledger.conftest import embedded, play
from tests.tools.run_command import DEADLINE_S


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `a` and `b`, and one of which only metrics are left."""
    folder = tmp_path_factory.mktemp("dashboard")
    make_run(folder, "a")
    make_run(folder, "b", "learner.steps=70", "run.port_base=20000")
    bare = folder / "runs" / "bare"
    bare.mkdir()
    append(bare / "metrics.jsonl", step(1))
    return folder / "runs"


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Server]:
    with served(runs) as server:
        yield server


# --- routes -----------------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_their_states(server: Server, runs: Path) -> None:
    with hold_run_lock(RunPaths(runs / "b"), by=LEARNER):
        listed = {run["id"]: run for run in server.get("runs")}
    assert listed.keys() == {"a", "b", "bare"}
    assert (listed["a"]["state"], listed["b"]["state"]) == ("stopped", "running")
    assert listed["a"] | {"updated_at": 0} == {
        "id": "a", "name": "a", "folder": str(runs / "a"), "state": "stopped", "step": 4, "steps": 9,
        "started_at": 1000.5, "updated_at": 0, "trainer": "rl", "reward": 0.4, "score": 0.25, "loss": None,
    }  # fmt: skip


def test_a_run_has_configuration_versions_and_warnings(server: Server) -> None:
    run = server.get("runs/b")
    assert run["config"]["learner"]["steps"] == 70
    assert (run["changed"]["learner.steps"], run["changed"]["run.name"]) == (70, "b")
    assert "learner.seed" not in run["changed"]
    assert run["run"] == [{"started_at": 1000.5, "packages": {"torch": "2.13.0"}}]
    assert [warning["process"] for warning in run["warnings"]] == ["learner"]


def test_comparison_has_the_keys_that_differ(server: Server) -> None:
    keys = {row["key"]: row["values"] for row in server.get("compare", runs="a,b")["keys"]}
    assert keys["learner.steps"] == {"a": 400, "b": 70}
    assert "model.build" not in keys
    assert not any("port" in key for key in keys), "they follow from run.port_base"


@pytest.mark.parametrize(
    ("query", "steps", "columns"),
    [
        ({"keys": "reward"}, [1, 2, 3, 4], {"reward": [0.1, 0.2, 0.3, 0.4]}),
        ({"keys": "score/*,nothing", "from": 2, "to": 3}, [2, 3], {"score/exact_match": [0.5, 0.5]}),
        ({"keys": "score", "kind": "eval"}, [0, 2], {"score": [0, 0.25]}),  # step 2 made version 1
        ({"keys": "reward", "points": 3}, [1, 3, 4], {"reward": [0.1, 0.3, 0.4]}),
    ],
)
def test_series_are_columns(server: Server, query: Any, steps: list[int], columns: Any) -> None:
    series = server.get("runs/a/series", **query)
    assert (series["step"], series["columns"]) == (steps, columns)
    assert len(series["time_s"]) == len(steps)


def test_events_servers_and_catalogue(server: Server) -> None:
    (event,) = server.get("runs/a/events")
    assert (event["kind"], event["step"]) == ("throttle", 2)
    assert server.get("runs/a/events", after=1) == []
    assert server.get("runs/a/servers")["servers"][0]["server"] == "r0"
    assert server.get("runs/a/servers", history=1) == {"time_s": [0, 10, 20], "columns": {"tokens_per_s": [0, 1, 2]}}
    assert {"name": "reward", "unit": "", "kind": "step"}.items() <= server.get("metrics")[4].items()


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ({"sort": "-reward", "limit": 2}, ["step-000000001-0", "step-000000003-0"]),
        ({"sort": "-step", "limit": 1, "offset": 1}, ["step-000000003-1"]),
        ({"sort": "-staleness", "limit": 1}, ["step-000000003-0"]),
        ({"query": "R551"}, ["step-000000003-1"]),
        ({"from": 2, "chosen": "worst", "task": 5}, ["step-000000003-1"]),
        ({"task": 6}, []),
        ({"kind": "eval"}, ["eval-000000001-0"]),
    ],
)
def test_samples_are_searched(server: Server, query: Any, ids: list[str]) -> None:
    assert [sample["id"] for sample in server.get("runs/a/samples", **query)["samples"]] == ids


def test_a_sample_has_columns_of_its_tokens(server: Server) -> None:
    sample = server.get("runs/a/samples/step-000000001-0")
    assert (sample["group_id"], sample["task"], sample["env"], sample["reward"]) == ("12", 5, "digits", 1.0)
    assert sample["staleness"] == 0, "the oldest token is of version 0, the latest version at step 1"
    prompt, action = sample["stretches"]
    assert (prompt["role"], prompt["tokens"]["text"]) == ("prompt", ["3", "2", "1", "r"])
    assert action["tokens"] == {
        "text": action["tokens"]["text"],
        "id": [3, 1, 5],
        "version": [0, 2, 2],
        "logprob": [-0.5, -0.5, -0.5],
        "ratio": [1.0, 2.0, 0.5],
        "advantage": [1.0, 2.0, 0.5],
        "trained": [1, 1, 0],
        "entropy": [1.0, 2.0, 0.5],
    }
    assert "".join(action["tokens"]["text"]) == action["text"]


def test_prompts_that_were_sampled_at_several_steps(server: Server) -> None:
    (prompt,) = server.get("runs/a/prompts")
    assert (prompt["task"], prompt["samples"], prompt["first"], prompt["last"]) == (5, 4, 1, 3)
    assert [sample["number"] for sample in server.get("runs/a/prompts/5")["samples"]] == [1, 1, 3, 3]


def test_answers_are_compressed(server: Server) -> None:
    assert server.client.get("/api/metrics").headers["content-encoding"] == "gzip"


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_groups_and_account_come_from_a_copy_that_ends_with_the_server(tmp_path: Path) -> None:
    config = make_run(
        tmp_path, "a", "buffer.max_staleness=20", "rollout.group_size=2", "learner.groups_per_step=2",
        f"redis.port={free_port()}", "redis.fsync=always", "rewards=[{name: exact_match}]",
    )  # fmt: skip
    with embedded(config):
        play(config)
    with served(config.paths.root) as server:
        listed = server.get("runs/a/groups", sort="id", limit=100)
        assert [group["id"] for group in listed["groups"]] == [str(number) for number in range(1, 13)]
        counts = dict.fromkeys(("issued", "ready", "leased", "trained", "durable"), 2)
        assert listed["counts"] == counts | {"filtered": 1, "expired": 0, "reissued": 1}
        ready = server.get("runs/a/groups", state="ready", limit=1)
        assert (ready["total"], ready["groups"][0]["reward"]) == (2, 0.5)
        group = server.get("runs/a/groups/3")
        assert (group["state"], group["steps"]) == ("trained", [1])
        assert [event["state"] for event in group["history"]] == ["issued", "ready", "leased", "trained"]
        assert [answer["reward"] for answer in group["samples"]] == [1.0, 0.0]
        assert {"text", "id", "version", "logprob"} <= group["samples"][0]["stretches"][1]["tokens"].keys()
        assert "'99'" in server.get("runs/a/groups/99", status=404)["error"]
        assert {"rows", "total", "groups"} <= server.get("runs/a/account").keys()
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert len(workers) == 2, "one reader and one copy, however many requests"
        psutil.Process(server.process.pid).children()[0].kill()
        assert server.client.get("/api/runs/a/groups").status_code in (200, 404)
        assert server.get("runs/a/groups")["total"] > 0, "by a new reader"
        workers += psutil.Process(server.process.pid).children(recursive=True)
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_missing_ledger_is_named_to_concurrent_requests(server: Server) -> None:
    with ThreadPoolExecutor() as threads:
        asked = ("groups", "groups/1", "account", "groups/2")
        for answer in threads.map(lambda what: server.get(f"runs/a/{what}", status=404), asked):
            assert "redis" in answer["error"]


# --- live files -------------------------------------------------------------------------------------------------------


class Stream:
    """A client of the live events."""

    def __init__(self, server: Server, run: str, **headers: str) -> None:
        self._reply = server.client.stream("GET", f"/api/runs/{run}/stream", headers=headers)
        self.last_id = ""

    def __enter__(self) -> "Stream":
        self._lines = self._split(self._reply.__enter__().iter_bytes())
        return self

    @staticmethod
    def _split(parts: Iterator[bytes]) -> Iterator[str]:
        """The lines. `iter_lines` would split at other characters too."""
        rest = b""
        for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode() for line in lines)

    def __exit__(self, *_: object) -> None:
        self._reply.__exit__(None, None, None)

    def next(self, *kinds: str) -> Any:
        """The data of the next event of these kinds."""
        kind, found = "", None
        for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "id":
                self.last_id = value
            elif name == "event":
                kind = value
            elif name == "data" and kind in kinds:
                found = json.loads(value)
            elif not line and found is not None:
                return found
        raise AssertionError(f"the stream ended without {kinds}")


def test_stream_follows_the_files_and_resumes_without_a_gap(server: Server, runs: Path) -> None:
    metrics = runs / "b" / "metrics.jsonl"
    with Stream(server, "b") as stream:
        assert stream.next("state") == {"state": "stopped"}
        assert stream.next("servers")["version"] == 2
        append(metrics, step(5), evaluation(2, 0.5))
        assert stream.next("step")["step"] == 5
        assert stream.next("eval")["score"] == 0.5
        append(runs / "b" / "events.jsonl", {"kind": "warning", "text": "first"})
        assert stream.next("event")["text"] == "first"
        seen = stream.last_id
    append(metrics, step(6, entropy=float("nan")), step(7))
    append(runs / "b" / "events.jsonl", {"kind": "warning", "text": HOSTILE_TEXT})
    with Stream(server, "b", **{"Last-Event-ID": seen}) as stream:
        assert stream.next("step") == step(6, entropy=None)
        assert stream.next("step")["step"] == 7
        assert stream.next("event")["text"].startswith("<script>")
        append(metrics, step(8))
        assert stream.next("step")["step"] == 8
    assert server.get("runs/b/series", keys="reward")["step"] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_stream_of_a_run_that_was_started_over_is_reset(server: Server, runs: Path) -> None:
    metrics = runs / "bare" / "metrics.jsonl"
    with Stream(server, "bare") as stream:
        stream.next("state")
        fresh = metrics.with_name("fresh")
        append(fresh, step(1, reward=0.75))
        fresh.replace(metrics)
        assert stream.next("reset") == {}
    assert server.get("runs/bare/series", keys="reward")["columns"] == {"reward": [0.75]}
    with Stream(server, "bare", **{"Last-Event-ID": "999999.0"}) as stream:
        assert stream.next("reset") == {}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:7788", ""])
def test_another_host_is_refused(server: Server, host: str) -> None:
    reply = server.client.get("/api/runs", headers={"Host": host})
    assert (reply.status_code, reply.json().keys()) == (400, {"error"})


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "LOCALHOST"])
def test_loopback_names_are_answered_under_a_strict_policy(server: Server, host: str) -> None:
    reply = server.client.get("/", headers={"Host": host})
    assert reply.status_code == 200
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_requests_of_another_sites_page_are_refused(server: Server) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert server.client.get("/", headers=foreign).status_code == 200
    assert server.client.get("/api/runs", headers=foreign).status_code == 403
    assert server.client.get("/api/runs", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/a", "/", "/app.js"])
def test_nothing_can_be_written(server: Server, method: str, path: str) -> None:
    assert server.client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..%2fa", "/api/runs/%2e%2e/series", "/api/runs/a/samples/..%2f..%2fconfig.yaml", "/../app.py",
        "/api/runs/a/samples/step-000000001-0%00", "/%2e%2e/app.py", "/..%2fapp.py", "/api/runs/a/samples/step-1-9999",
    ],
)  # fmt: skip
def test_no_path_leaves_the_folders(server: Server, path: str) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:  # clients resolve `..`
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert connection.makefile("rb").readline().split()[1] == b"404"


@pytest.mark.parametrize(
    ("path", "status", "named"),
    [
        ("runs/aa", 404, "known: "), ("runs/a/samples/none", 404, "'none'"), ("nothing", 404, "/api/nothing"),
        ("runs/a/series?from=x", 400, "from='x'"), ("compare?runs=a,c", 404, "'c'"),
    ],
)  # fmt: skip
def test_errors_name_what_was_asked_for(server: Server, path: str, status: int, named: str) -> None:
    reply = server.client.get(f"/api/{path}")
    assert reply.status_code == status
    assert named in reply.json()["error"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "step", "step": 1e999, "reward": 1}', b'{"kind": "step"', b"[" * 100_000, b"\xff\xfe{}", b"null",
        b'{"kind": "step", "step": 2, "reward": ' + b"9" * 400 + b"}", b'{"kind": {}, "step": []}',
        b'{"kind": "step", "step": "2", "reward": NaN}', b"x" * (5 << 20),
    ],
)  # fmt: skip
def test_a_line_that_is_no_record_costs_that_line_only(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(step(1)).encode() + b"\n" + line + b"\n" + json.dumps(step(3)).encode() + b"\n")
    table = MetricsTable(path)
    table.update()
    series = table.series(keys=["reward"])
    assert dict(zip(series["step"], series["columns"]["reward"], strict=True)).items() >= {1: 0.1, 3: 0.3}.items()
    assert table.offset == path.stat().st_size


def test_hostile_text_is_data(server: Server) -> None:
    reply = server.client.get("/api/runs/a/events")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()[0]["text"] == HOSTILE_TEXT.replace("\ud800", "?")


def test_missing_files_are_normal(server: Server, runs: Path) -> None:
    (runs / "bare" / "config.yaml").write_text("no: {such: key}\n- nor yaml")
    (runs / "bare" / "run.json").write_text("[[")
    run = server.get("runs/bare")
    assert (run["config"], run["changed"], run["run"], run["summary"], run["warnings"]) == ({}, {}, None, None, [])
    assert server.get("runs/bare/samples") == {
        "total": 0,
        "samples": [],
        "note": server.get("runs/bare/samples")["note"],
    }
    assert server.get("runs/bare/servers") is None
    assert server.get("runs/bare/prompts") == server.get("runs/bare/events") == []


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_busy_port_and_an_unknown_folder_are_refused(cli: CommandLine, server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    assert cli("dashboard", tmp_path, "--port", port) == 2
    assert f"--port {port}" in cli.err
    (tmp_path / "runs" / "known").mkdir(parents=True)
    (tmp_path / "runs" / "known" / "config.yaml").write_text("")
    assert cli("dashboard", "unknown", folder=tmp_path) == 2
    assert "'unknown'" in cli.err
    assert "known" in cli.err


def test_ctrl_c_ends_it_although_clients_listen(runs: Path) -> None:
    with served(runs, ending=128 + signal.SIGINT) as server, Stream(server, "a") as stream:
        stream.next("state")
        server.process.send_signal(signal.SIGINT)
        server.process.wait(DEADLINE_S)
