"""`slipstream up` and its sisters, run as a user runs them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.configs.load import create_run_folder
from slipstream.configs.paths import LEARNER, UP, hold_run_lock
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.launch.preflight import finished_problems, port_problems
from slipstream.tools.launch.progress import make_screen
from slipstream.tools.launch.supervise import GRACE_S, Supervisor
from slipstream.tools.launch.up import MODULES, ChildDied, Launch, Stopped, python
from tests.conftest import free_port
from tests.full_disk import files_of_at_most
from tests.tools.run_command import DEADLINE_S, DEMO, command, demo_config, slipstream

pytestmark = pytest.mark.timeout(300)

PORT_KEYS = ("redis.port", "buffer.bind", "weights.control_port", "weights.store_port", "weights.stream_port")


def with_ports(ports: Sequence[int]) -> list[str]:
    """Overrides that give a run these ports, in the order of `PORT_KEYS`."""
    redis, buffer, control, store, stream = ports
    address = f"tcp://127.0.0.1:{buffer}"
    return [
        f"redis.port={redis}", f"buffer.bind={address}", f"buffer.endpoint={address}",
        f"weights.control_port={control}", f"weights.store_port={store}", f"weights.stream_port={stream}",
    ]  # fmt: skip


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


def test_three_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    done = slipstream("up", DEMO, "learner.stps=3", "run.seed=x", "buffer.max_staleness=-1", folder=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)
    for key in ("learner.stps", "run.seed", "buffer.max_staleness"):
        assert any(key in line for line in lines)


def test_every_busy_port_is_named_with_its_key_and_nothing_is_started(tmp_path: Path) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORT_KEYS]
        ports = [listener.getsockname()[1] for listener in listeners]
        done = slipstream("up", DEMO, *with_ports(ports), folder=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == len(PORT_KEYS)
    for line, key, port in zip(lines, PORT_KEYS, ports, strict=True):
        assert line.startswith(f"error: {key}: port {port} on 127.0.0.1 is busy; ")
        assert "another port" in line
    assert list(tmp_path.iterdir()) == []


def test_two_keys_with_the_same_port_are_refused(tmp_path: Path) -> None:
    first, second, third, fourth = (free_port() for _ in range(4))
    (problem,) = port_problems(demo_config(tmp_path, *with_ports([first, second, third, first, fourth])))
    assert problem == f"weights.store_port: port {first} is also redis.port; give each its own"


def test_a_finished_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    done = slipstream("up", DEMO, *with_ports([free_port() for _ in PORT_KEYS]), folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: runs/demo holds a finished run: add --fresh")
    assert "model.path=runs/demo/model model.build=null to train its model further" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("half", ["", '{"steps": 12'])
def test_a_run_whose_summary_a_crash_cut_off_is_not_finished(tmp_path: Path, half: str) -> None:
    config = demo_config(tmp_path)
    folder = config.paths
    create_run_folder(folder, config)
    folder.summary.write_text(half)
    assert not finished_problems(config, fresh=False)
    done = slipstream("summary", folder.root, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: there is no complete {folder.summary}: the run isn't finished")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("free_bytes", "code", "remedy"), [(0, 2, "whose disk has room"), (10_000, 1, "see that runs/demo has room")]
)
def test_a_disk_without_room_for_the_run_is_told_in_a_line(
    tmp_path: Path, free_bytes: int, code: int, remedy: str
) -> None:
    with files_of_at_most(free_bytes):
        done = slipstream("up", DEMO, "--plain", *with_ports([free_port() for _ in PORT_KEYS]), folder=tmp_path)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert "error: " in done.stderr
    assert "File too large" in done.stderr
    assert remedy in done.stderr
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(("free_bytes", "words"), [(10**9, "(it printed nothing)"), (0, "is full)")])
def test_of_a_child_that_died_without_a_word_it_is_said_whether_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, words: str
) -> None:
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("silent", [sys.executable, "-c", "raise SystemExit(1)"])
        child.process.wait(DEADLINE_S)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))
        assert str(ChildDied(child)).endswith(words)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_of_a_child_that_was_killed_it_is_said_that_the_kernel_may_have_done_it_and_how_to_go_on(
    tmp_path: Path, number: signal.Signals, said: bool
) -> None:
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        child = supervisor.start("killed", [sys.executable, "-c", f"import os; os.kill(os.getpid(), {number:d})"])
        child.process.wait(DEADLINE_S)
        told = str(ChildDied(child))
    assert told.startswith(f"killed ended with signal {number.name}")
    assert ("want of memory" in told and "continues the run" in told) is said


def test_a_model_that_is_not_there_is_named_before_an_old_run_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    overrides = ["model={path: /models/typo, dtype: float32}", *with_ports([free_port() for _ in PORT_KEYS])]
    done = slipstream("up", DEMO, "--fresh", *overrides, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path=/models/typo holds no config.json")
    assert list(folder.parent.iterdir()) == [folder]


def test_keys_that_are_not_there_are_named_before_anything_is_started(tmp_path: Path) -> None:
    overrides = [f"security.keys={tmp_path / 'absent'}", *with_ports([free_port() for _ in PORT_KEYS])]
    done = slipstream("up", DEMO, *overrides, folder=tmp_path)
    assert done.returncode == 2
    assert str(tmp_path / "absent") in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_folder_stays_where_it_is_until_redis_has_forgotten_the_old_run(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    nobody = f"redis.url=redis://127.0.0.1:{free_port()}"
    with subprocess.Popen(
        command("up", DEMO, "--fresh", nobody, *with_ports([free_port() for _ in PORT_KEYS])),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("forgetting the old run in Redis")
            process.terminate()
            process.wait(DEADLINE_S)
        finally:
            process.kill()
    assert [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")] == ["demo"]


def test_a_redis_of_ones_own_that_is_away_is_named_with_the_reason_while_it_is_waited_for(tmp_path: Path) -> None:
    nobody = f"redis://127.0.0.1:{free_port()}"
    with subprocess.Popen(
        command("up", DEMO, f"redis.url={nobody}", *with_ports([free_port() for _ in PORT_KEYS])),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("a new run in ")
            assert process.stdout.readline().endswith(f"building the model and waiting for Redis at {nobody}\n")
            said = process.stdout.readline()
            assert f"no answer from Redis at {nobody}, waiting up to 120 s for it: " in said
            assert "Connection refused" in said
            process.terminate()
            process.wait(DEADLINE_S)
        finally:
            process.kill()


def test_a_folder_that_cannot_be_made_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = slipstream("up", DEMO, "run.dir=file", *with_ports([free_port() for _ in PORT_KEYS]), folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: run.dir=file: can't write file: File exists; name a folder")


@pytest.mark.parametrize("by", [UP, LEARNER])
def test_a_run_that_goes_on_is_not_opened_a_second_time_whatever_its_ports(tmp_path: Path, by: str) -> None:
    folder = tmp_path / "runs" / "demo"
    with hold_run_lock(demo_config(tmp_path).paths, by=by), socket.create_server(("127.0.0.1", 0)) as busy:
        before = list(folder.glob("*"))
        for options in ([], ["--fresh"], [f"redis.port={busy.getsockname()[1]}"]):
            done = slipstream("up", DEMO, *with_ports([free_port() for _ in PORT_KEYS]), *options, folder=tmp_path)
            assert done.returncode == 2
            assert "busy" not in done.stderr
            assert f"runs/demo is in use by another {by} (process " in done.stderr
        assert list(folder.glob("*")) == before


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["up", "absent.yaml"]])
def test_help_and_bad_configs_answer_without_loading_anything_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = """
import sys
from slipstream.tools.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    print({"torch", "vllm", "transformers", "matplotlib", "numpy", "redis", "zmq"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")


def test_a_child_that_dies_is_named_with_its_last_words_and_nothing_is_left_running(tmp_path: Path) -> None:
    done = slipstream("up", DEMO, "env.name=absent", *with_ports([free_port() for _ in PORT_KEYS]), folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "error: rollout ended with exit code 1; the last lines of runs/demo/logs/rollout.console:" in done.stderr
    assert "there is no env 'absent'" in done.stderr
    assert left_behind(tmp_path) == []


def test_each_mistake_that_a_child_finds_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("[]\n{}\n")
    tasks = f"env={{name: jsonl, options: {{path: {tmp_path / 'tasks.jsonl'}}}}}"
    done = slipstream("up", DEMO, tasks, *with_ports([free_port() for _ in PORT_KEYS]), folder=tmp_path)
    assert done.returncode == 1
    for number in (1, 2):
        (line,) = (line for line in done.stderr.splitlines() if f"tasks.jsonl:{number}: " in line)
        assert "rollout server failed" in line


def test_a_plug_in_is_found_by_its_name_though_the_folder_one_stands_in_has_that_name_too(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("import no_such_module_of_the_plug_in")
    config = tmp_path / "config.yaml"
    config.write_text(f"extends: {DEMO}\nrewards: [{{name: rewards:mine}}]\nrun: {{dir: {tmp_path}}}\n")
    done = subprocess.run(
        python(MODULES["rollout"], config),
        cwd=DEMO.parents[1],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "no_such_module_of_the_plug_in" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing_running_and_can_be_continued(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        command("up", DEMO, "--plain", *with_ports([free_port() for _ in PORT_KEYS])),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            until_all_are_started(tmp_path / "runs" / "demo" / "logs")
            os.killpg(process.pid, number)
            said = process.stdout.read()
            assert process.wait(DEADLINE_S) == 128 + number
        finally:
            process.kill()
    assert said.endswith("stopped; the same command (without --fresh) continues the run\n")
    assert left_behind(tmp_path) == []


def test_a_learner_has_as_long_to_save_its_step_as_it_may_wait_for_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stubborn.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(MODULES, "learner", "stubborn")
    deadlines = ["learner.wait_deadline_s=0.2", "rollout.group_deadline_s=0.1"]
    config = demo_config(tmp_path, *deadlines, *with_ports([free_port() for _ in PORT_KEYS]))
    create_run_folder(config.paths, config)
    with StopSignals() as signals, Supervisor(config.paths.logs, signals) as supervisor:
        with pytest.raises(Stopped, match="SIGTERM received"):
            launch = Launch(config, supervisor, signals, make_screen(plain=True), started_at=0.0)
            launch.start()
            launch.watch()
        told_at = time.monotonic()
        supervisor.stop("learner")
        assert time.monotonic() - told_at < GRACE_S / 2


@pytest.mark.parametrize(("saved", "words"), [(5, "; it does the 2 steps since its last checkpoint again"), (7, "")])
def test_of_steps_that_no_checkpoint_has_it_is_said_that_they_will_be_done_again(
    tmp_path: Path, saved: int, words: str
) -> None:
    config = demo_config(tmp_path)
    folder = config.paths
    (folder.checkpoints / f"step-{saved:06}").mkdir(parents=True)
    (folder.checkpoints / "step-000007.partial").mkdir()
    with StopSignals() as signals, Supervisor(tmp_path, signals) as supervisor:
        launch = Launch(config, supervisor, signals, make_screen(plain=True), started_at=0.0)
        folder.metrics.write_text('{"kind": "step", "step": 7}\n')
        assert launch.repeated_steps() == words


def test_a_run_whose_progress_is_read_no_more_goes_on_and_says_so_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("up", DEMO, "--plain", *with_ports([free_port() for _ in PORT_KEYS])),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline().startswith("a new run in")
            process.stdout.close()
            until_all_are_started(tmp_path / "runs" / "demo" / "logs")
            process.terminate()
            said = process.stderr.read()
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert said == "the progress can no longer be shown (Broken pipe); the run goes on\n"
    assert left_behind(tmp_path) == []


def test_a_run_whose_folder_is_moved_away_says_so_and_goes_on_in_a_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    with subprocess.Popen(
        command("up", DEMO, "--plain", *with_ports([free_port() for _ in PORT_KEYS])),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            until_all_are_started(folder / "logs")
            folder.rename(tmp_path / "elsewhere")
            said = process.stderr.readline()
            for file in ("config.yaml", "initial_model/config.json"):
                assert (folder / file).read_text() == (tmp_path / "elsewhere" / file).read_text()
            assert process.poll() is None
            process.terminate()
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
            assert process.stderr.read() == "", "it is said once"
        finally:
            process.kill()
    assert said.startswith("warning: runs/demo was moved or deleted. The run goes on in a new folder")
    assert left_behind(tmp_path) == []


def until_all_are_started(logs: Path) -> None:
    """Returns once the last child has its console file; fails at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (logs / "learner.console").exists():
        assert time.monotonic() < deadline, "the learner was not started in time"
        time.sleep(0.01)
