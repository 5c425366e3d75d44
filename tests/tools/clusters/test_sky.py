"""The tasks that `slipstream sky` writes, and their scripts with a stand-in for docker."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.load import load_config
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from tests.tools.conftest import CommandLine
from tests.tools.run_command import DEMO

CASES = {
    "cpu": ["--nodes=3"],
    "gpus": [
        "--nodes=3", "--gpus-per-node=H100:8", "learner.parallel.dp_shard=8",
        "rollout.engine.options={tensor_parallel_size: 4}",
    ],
    "own Redis": ["--nodes=2", "--cpus-per-node=32", "redis.url=rediss://redis.example:6379/0"],
}  # fmt: skip
DOCKER = """#!/bin/bash
trap 'echo stopped >> "$HOME/calls"; exit 0' TERM
echo "$@" >> "$HOME/calls"
case "$*" in
    *" rollout "*) exit "$ROLLOUT_CODE" ;;
    *" learner "*|*slipstream.learner.cli*)
        until [ "$(wc -l < "$HOME/calls")" -gt "$SERVICES" ]; do sleep 0.05; done
        exit "$LEARNER_CODE" ;;
    *) while :; do sleep 0.05; done ;;
esac
"""
"""Services run until they are stopped; the learner ends once they run."""

Write = Callable[..., Path]


@pytest.fixture
def write(cli: CommandLine, tmp_path: Path) -> Write:
    def written(*arguments: str) -> Path:
        folder = tmp_path / "tasks"
        assert cli("sky", DEMO, "--image=registry.example/slipstream:1", f"--out={folder}", *arguments) == 0, cli.err
        return folder

    return written


def task(folder: Path, name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text())
    return read


@pytest.mark.parametrize("case", CASES)
def test_each_machine_gets_its_files_alone(case: str, write: Write) -> None:
    folder = write(*CASES[case])
    for name, own in (("trainer", {"buffer", "learner"}), ("rollout", {"rollout"})):
        mounts = task(folder, name)["file_mounts"]
        secrets = {Path(place).name.removesuffix(".key_secret") for place in mounts if place.endswith("_secret")}
        assert secrets == own
        assert f"~/slipstream/{name}.sh" in mounts
        for source in mounts.values():
            assert Path(source).parent.name == "keys" or Path(source).is_file()
        assert REDIS_PASSWORD_VARIABLE not in (folder / "rollout.sh").read_text()
        assert subprocess.run(["bash", "-n", folder / f"{name}.sh"], check=False).returncode == 0


def test_resources_of_machines_with_gpus(write: Write, cli: CommandLine) -> None:
    folder = write(*CASES["gpus"])
    trainer, rollout = task(folder, "trainer")["resources"], task(folder, "rollout")["resources"]
    assert trainer == {"accelerators": "H100:8", "ports": [5555, 5556, 5558], "autostop": 30}
    assert rollout["accelerators"] == "H100:8"
    assert rollout["use_spot"]
    script = (folder / "rollout.sh").read_text()
    assert re.findall(r'"device=([\d,]+)"', script) == ["0,1,2,3", "4,5,6,7"]
    assert "seq 2" in cli.out


def test_configuration_of_the_machines(write: Write) -> None:
    config = load_config(write(*CASES["cpu"]) / "config.yaml")
    assert (config.weights.transport, config.weights.bind) == ("stream", "0.0.0.0")
    assert config.redis.url == "redis://127.0.0.1:6399/0"
    assert (config.buffer.bind, config.buffer.endpoint) == ("tcp://0.0.0.0:5555", "tcp://127.0.0.1:5555")


def run(folder: Path, home: Path, name: str, **variables: str) -> tuple[int, list[str]]:
    """Exit code of a task's script on a machine whose home folder is `home`, and its calls of docker."""
    programs, machine = home / "bin", home / "slipstream"
    programs.mkdir(parents=True)
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    (machine / "keys").mkdir(parents=True)
    (machine / "keys" / "a_secret").touch()
    environment = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", **variables}
    done = subprocess.run(["bash", folder / f"{name}.sh"], env=environment, check=False, timeout=60)
    calls = home / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_trainer_waits_for_its_address(write: Write, tmp_path: Path) -> None:
    assert run(write(*CASES["cpu"]), tmp_path / "home", "trainer", TRAINER_IP="unknown") == (0, [])


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize(("case", "services"), [("cpu", 2), ("own Redis", 1)])
def test_services_end_with_the_learner(case: str, services: int, code: int, write: Write, tmp_path: Path) -> None:
    folder = write(*CASES[case])
    variables = {"TRAINER_IP": "203.0.113.5", "LEARNER_CODE": str(code), "SERVICES": str(services)}
    ended, calls = run(folder, tmp_path / "home", "trainer", **variables)
    assert ended == code
    assert any("weights.host=203.0.113.5" in call for call in calls)
    assert calls.count("stopped") == services
    assert len(calls) == 2 * services + 1


@pytest.mark.parametrize("code", [0, 3])
def test_failed_server_fails_the_job(code: int, write: Write, tmp_path: Path) -> None:
    folder = write(*CASES["gpus"])
    ended, calls = run(folder, tmp_path / "home", "rollout", TRAINER_IP="203.0.113.5", ROLLOUT_CODE=str(code))
    assert ended == code
    assert all("buffer.endpoint=tcp://203.0.113.5:5555" in call for call in calls)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--nodes=1"], "--nodes"),
        (["run.name=Demo_1"], "run.name=Demo_1"),
        (["--gpus-per-node=H100:2", "learner.ranks=4"], "learner.ranks=4"),
        (["--gpus-per-node=H100:2", "learner.ranks=1", "rollout.servers=3"], "rollout.servers=3"),
        (["--gpus-per-node=8"], "8"),
        (["weights.transport=gloo"], "weights.transport=gloo"),
        (["model.build=null", "model.path=/models/mine"], "model.path=/models/mine"),
        (["redis.url=unix:///run/redis.sock?db=0"], "redis.url"),
        (["--out=/proc/tasks"], "/proc/tasks"),
    ],
)
def test_what_can_not_work_is_refused(arguments: list[str], part: str, cli: CommandLine, tmp_path: Path) -> None:
    assert cli("sky", DEMO, "--image=i", f"--out={tmp_path / 'tasks'}", "--nodes=2", *arguments) == 2
    assert part in cli.err
    assert not list(tmp_path.iterdir())
