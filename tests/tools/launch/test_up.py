"""`slipstream up` in a process of its own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.configs.paths import LEARNER, UP, RunPaths, hold_run_lock
from slipstream.configs.runtime.errors import CERTAIN, DeadlineError
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.machine import Machine
from slipstream.tools.launch.placement import Role, place
from slipstream.tools.launch.ports import choose_port_base
from slipstream.tools.launch.processes import MODULES, ChildDied, RunProcesses, python
from slipstream.tools.launch.screens import make_screen
from slipstream.tools.launch.supervise import GRACE_S, Supervisor
from slipstream.tools.launch.up import Launch, Stopped
from slipstream.tools.launch.up import command as start_run
from tests.conftest import free_port
from tests.full_disk import files_of_at_most
from tests.tools.run_command import DEADLINE_S, DEMO, command, demo_config, slipstream, until

pytestmark = pytest.mark.timeout(300)

PORT_KEYS = ("redis.port", "buffer.bind", "weights.control_port", "weights.store_port", "weights.stream_port")


def port_overrides(ports: Sequence[int]) -> list[str]:
    """Overrides with these ports, in the order of `PORT_KEYS`."""
    redis, buffer, control, store, stream = ports
    address = f"tcp://127.0.0.1:{buffer}"
    return [
        f"redis.port={redis}", f"buffer.bind={address}", f"buffer.endpoint={address}",
        f"weights.control_port={control}", f"weights.store_port={store}", f"weights.stream_port={stream}",
    ]  # fmt: skip


LIGHT = "rollout.engine.name=hf"
"""The engine that a process imports and starts soonest."""


def up(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The demo, with its runs in `folder`."""
    return slipstream("up", DEMO, LIGHT, *arguments, folder=folder)


@contextmanager
def running(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The same while it runs."""
    with subprocess.Popen(
        command("up", DEMO, LIGHT, "--plain", *arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line of stdout."""
    assert process.stdout is not None
    return process.stdout.readline()


def left_behind(folder: Path) -> list[str]:
    """Command lines of the processes that work in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder or str(folder) in (process / "cmdline").read_text():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile
    return found


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, *, instead_of: Iterable[Role] = ()) -> str:
    """The name of a module with this code, which runs in place of some processes of a run."""
    (folder / "substitute.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    for role in instead_of:
        monkeypatch.setitem(MODULES, role, "substitute")
    return "substitute"


@contextmanager
def launching(folder: Path, *overrides: str) -> Iterator[tuple[Launch, RunConfig, Supervisor]]:
    """A run of the demo on free ports, which is supervised by this process."""
    config = demo_config(folder, f"run.port_base={choose_port_base(RunPaths(folder))}", *overrides)
    create_run_folder(config.paths, config)
    with StopSignals() as signals, Supervisor(config.paths.logs, signals) as supervisor:
        processes = RunProcesses(config, place(Machine((0, 1)), config), supervisor, started_at=0.0)
        yield (
            Launch(config, processes, supervisor, signals, make_screen(plain=True), started_at=0.0),
            config,
            supervisor,
        )


# --- check ------------------------------------------------------------------------------------------------------------


def test_busy_ports_are_named_and_nothing_is_started(tmp_path: Path) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORT_KEYS]
        ports = [listener.getsockname()[1] for listener in listeners]
        done = up(tmp_path, *port_overrides(ports))
    assert done.returncode == 2
    for line, key, port in zip(done.stderr.splitlines(), PORT_KEYS, ports, strict=True):
        assert line.startswith(f"error: {key}: port {port} ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--fresh", "security.keys=absent"], "absent"), ([], "--fresh")],
    ids=["keys", "finished"],
)
def test_refused_start_leaves_an_old_run_alone(tmp_path: Path, arguments: list[str], named: str) -> None:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    done = up(tmp_path, *arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert [*folder.parent.iterdir(), *folder.iterdir()] == [folder, folder / "summary.json"]


@pytest.mark.parametrize(("by", "options"), [(UP, ["--fresh"]), (LEARNER, [])])
def test_running_run_is_refused_whatever_its_ports(tmp_path: Path, by: str, options: list[str]) -> None:
    folder = tmp_path / "runs" / "demo"
    with hold_run_lock(demo_config(tmp_path).paths, by=by), socket.create_server(("127.0.0.1", 0)) as busy:
        before = list(folder.glob("*"))
        done = up(tmp_path, *options, f"redis.port={busy.getsockname()[1]}")
        assert done.returncode == 2
        assert "busy" not in done.stderr
        assert all(part in done.stderr for part in ("runs/demo", f" {by} ", "process "))
        assert list(folder.glob("*")) == before


# --- start ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free_bytes", [0, 10_000])
def test_full_disk_is_reported_in_one_line(tmp_path: Path, free_bytes: int) -> None:
    with files_of_at_most(free_bytes):
        done = up(tmp_path, "--plain")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "File too large" in line
    assert "disk has room" in line
    assert left_behind(tmp_path) == []


def test_old_folder_stays_until_redis_forgot_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    # The same up to here for all runs, and some seconds long.
    monkeypatch.setattr("slipstream.tools.launch.up.start_ahead", lambda *_: {})
    monkeypatch.setattr("slipstream.tools.launch.up._check", lambda config: None)
    monkeypatch.setattr("slipstream.tools.launch.up.REDIS_DEADLINE_S", 0.2)
    overrides = f"run.dir={folder.parent}", f"redis.url=redis://127.0.0.1:{free_port()}"
    with pytest.raises(DeadlineError, match="did not answer"):
        start_run([str(DEMO), "--fresh", *overrides])
    assert [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")] == ["demo"]


def test_unreachable_redis_is_named_while_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    monkeypatch.setattr("slipstream.tools.launch.up.REDIS_DEADLINE_S", 1.0)
    with launching(tmp_path, f"redis.url={url}") as (launch, _, _):
        assert launch.run(undo_steps=False) == 1
    printed = capsys.readouterr()
    _, waiting = [line for line in printed.out.splitlines() if url in line]
    assert f"{url}, " in waiting
    assert "1 s" in waiting
    assert "Connection refused" in waiting
    assert url in printed.err


def test_children_get_only_the_secrets_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {REDIS_PASSWORD_VARIABLE, "SWANLAB_API_KEY", "JUDGES_KEY", "OTHERS_KEY", "AWS_SECRET_ACCESS_KEY"}
    for name in secrets:
        monkeypatch.setenv(name, "hidden")
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "name = os.environ['SLIPSTREAM_SUPERVISED'].split(':')[1].strip(';')\n"
        "part = Path(sys.argv[1]).with_name(f'{name}.part')\n"
        "part.write_text('\\n'.join(os.environ))\n"
        "part.rename(part.with_suffix('.variables'))\n"
        "time.sleep(600)\n"
    )
    module(tmp_path, monkeypatch, code, instead_of=[*MODULES])
    judges = [
        f"{{name: {name}, options: {{url: 'http://127.0.0.1:1/v1', model: m, api_key_variable: {key}}}}}"
        for name, key in (("judge", "JUDGES_KEY"), ("my:judge", "OTHERS_KEY"))
    ]
    overrides = "learner.ranks=2", "learner.checkpoint.upload=s3://bucket", f"rewards=[{', '.join(judges)}]"
    with launching(tmp_path, *overrides) as (launch, config, supervisor):
        launch.start()
        redis = supervisor.children["redis"].process.pid
        got = {"redis": Path(f"/proc/{redis}/environ").read_text().split("\0")}
        for name in (*MODULES, "learner-1"):
            file = config.paths.root / f"{name}.variables"
            until(file.exists)
            got[name] = file.read_text().splitlines()
    assert {name: {each.split("=")[0] for each in variables} & secrets for name, variables in got.items()} == {
        "redis": set(),
        "buffer": {REDIS_PASSWORD_VARIABLE},
        "learner": {REDIS_PASSWORD_VARIABLE, "SWANLAB_API_KEY", "AWS_SECRET_ACCESS_KEY"},
        "learner-1": {REDIS_PASSWORD_VARIABLE},
        "rollout": {"JUDGES_KEY", "OTHERS_KEY"},
    }


def test_plug_in_wins_over_a_package_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("import no_such_module_of_the_plug_in")
    config = tmp_path / "config.yaml"
    config.write_text(f"extends: {DEMO}\nrewards: [{{name: rewards:mine}}]\nrun: {{dir: {tmp_path}}}\n")
    done = subprocess.run(
        python(MODULES["rollout"], config),
        cwd=DEMO.parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == CERTAIN
    assert "no_such_module_of_the_plug_in" in done.stderr


# --- watch ------------------------------------------------------------------------------------------------------------


def test_dead_child_is_quoted_and_everything_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It can be built before the start, but not in a process of the run.
    moody = module(
        tmp_path,
        monkeypatch,
        "import os\nfrom slipstream.env.builtin.digits import Digits\n"
        "def Env():\n    if 'SLIPSTREAM_SUPERVISED' in os.environ:\n        raise RuntimeError('not here')\n"
        "    return Digits('copy')\n",
    )
    done = up(tmp_path, f"env={{name: {moody}:Env}}")
    assert done.returncode == 1
    assert "error: rollout " in done.stderr
    assert "exit code 2" in done.stderr
    assert "runs/demo/logs/rollout.console" in done.stderr
    assert len([line for line in done.stderr.splitlines() if "RuntimeError: not here" in line]) == 1
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "free_bytes", "named", "absent"),
    [
        ("raise SystemExit(1)", 10**9, "exit code 1", "is full"),
        ("raise SystemExit(1)", 0, "is full", "dmesg"),
        ("import os; os.kill(os.getpid(), 9)", 10**9, "dmesg", "is full"),
        ("import os; os.kill(os.getpid(), 15)", 10**9, "signal SIGTERM", "dmesg"),
    ],
    ids=["silent", "full disk", "SIGKILL", "SIGTERM"],
)
def test_dead_child_error_has_the_likely_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, free_bytes: int, named: str, absent: str
) -> None:
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("child", [sys.executable, "-c", code])
        child.process.wait(DEADLINE_S)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
        message = str(ChildDied(child))
    assert named in message
    assert absent not in message


def test_full_disk_ends_the_run_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module(tmp_path, monkeypatch, "import signal\nsignal.pause()\n", instead_of=[*MODULES])
    monkeypatch.setattr("slipstream.tools.launch.up.FULL_DISK_S", 0.5)
    with launching(tmp_path) as (launch, _, _):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        assert launch.run(undo_steps=False) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "runs" / "demo") in line
    assert "full" in line


def test_summary_has_placement_and_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = "import os, signal\nif os.environ['SLIPSTREAM_PROCESS'].startswith('learner'): os._exit(0)\nsignal.pause()\n"
    module(tmp_path, monkeypatch, ends, instead_of=[*MODULES])
    with launching(tmp_path, "rollout.servers=2", "learner.ranks=2") as (launch, config, supervisor):
        config.paths.summary.write_text('{"steps": 7}')
        assert launch.run(undo_steps=False) == 0
        assert supervisor.children == {}
    summary = json.loads(config.paths.summary.read_text())
    assert (summary["steps"], summary["restarts"]) == (7, {})
    names = {"redis", "buffer", "rollout", "rollout-1", "learner", "learner-1"}
    assert summary["placement"]["processes"].keys() == names


# --- stop -------------------------------------------------------------------------------------------------------------


def test_run_goes_on_without_stdout_and_folder_and_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    with running(tmp_path) as process:
        assert "new run" in line_of(process)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        log = folder / "logs" / "learner.jsonl"
        until(lambda: log.exists() and "learner ready" in log.read_text())  # it makes the folder too
        folder.rename(tmp_path / "elsewhere")
        closed, moved = process.stderr.readline(), process.stderr.readline()
        for file in ("config.yaml", "initial_model/config.json"):
            assert (folder / file).read_text() == (tmp_path / "elsewhere" / file).read_text()
        assert process.poll() is None
        process.terminate()
        assert process.stderr.read() == ""
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert "Broken pipe" in closed
    assert moved.startswith("warning: runs/demo ")
    assert left_behind(tmp_path) == []


def test_learner_gets_its_wait_deadline_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(600)\n"
    )
    module(tmp_path, monkeypatch, code, instead_of=["learner"])
    with launching(tmp_path, "learner.wait_deadline_s=0.2", "rollout.group_deadline_s=0.1") as (launch, _, supervisor):
        launch.start()
        with pytest.raises(Stopped, match="SIGTERM"):
            launch.watch()
        stopped_at = time.monotonic()
        supervisor.stop("learner")
        assert time.monotonic() - stopped_at < GRACE_S / 2


@pytest.mark.parametrize(("saved", "note"), [(5, "2 steps"), (7, "")])
def test_steps_without_checkpoint_are_noted(tmp_path: Path, saved: int, note: str) -> None:
    with launching(tmp_path) as (launch, config, _):
        checkpoints = config.paths.checkpoints
        (checkpoints / f"step-{saved:06}").mkdir(parents=True)
        (checkpoints / "step-000007.partial").mkdir()
        config.paths.metrics.write_text('{"kind": "step", "step": 7}\n')
        assert note in launch.repeated_steps()
        assert bool(launch.repeated_steps()) == bool(note)
