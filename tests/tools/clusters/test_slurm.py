"""`slipstream slurm`: the script by configuration, and refusals. Runs on a real cluster: `test_slurm_cluster.py`."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from slipstream.configs.runtime.passwords import LEARNERS_SECRETS
from tests.tools.conftest import CommandLine


def steps_of(script: str) -> dict[str, list[str]]:
    """The words of srun by the name of the step."""
    lines = re.findall(r"^(?:keep (\S+) (.*) & \w+.*|learn\(\) { step (\S+) (.*); })$", script, re.MULTILINE)
    return {line[0] or line[2]: shlex.split(line[1] or line[3]) for line in lines}


def directives_of(script: str) -> dict[str, str]:
    """The options of sbatch."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


@pytest.fixture
def render(cli: CommandLine, tmp_path: Path) -> "Render":
    return Render(cli, tmp_path)


class Render:
    """The script of a demo, whose syntax bash finds correct."""

    def __init__(self, cli: CommandLine, folder: Path) -> None:
        self._cli = cli
        self._folder = folder

    def __call__(self, *arguments: str) -> str:
        demo = Path("configs/demo.yaml").absolute()
        assert self._cli("slurm", demo, f"run.dir={self._folder}", "--dry-run", *arguments) == 0, self._cli.err
        script = self._cli.out
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
        assert list(self._folder.iterdir()) == []
        return script


def test_job_of_one_node(render: Render, tmp_path: Path) -> None:
    script = render("--nodes=1", "--cpus-per-node=10")
    options = directives_of(script)
    assert (options["job-name"], options["nodes"], options["cpus-per-task"]) == ("demo", "1", "10")
    assert {"requeue", "no-kill"} <= options.keys()
    assert options["dependency"] == "singleton"
    assert options["signal"] == "B:USR1@120"
    assert options["output"] == f"{tmp_path}/demo/logs/slurm.console"
    assert not {"exclusive", "gres"} & options.keys()
    steps = steps_of(script)
    assert list(steps) == ["redis", "buffer", "rollout", "learner"]
    assert "--overlap" in steps["redis"]
    assert {"--exact", "--gres=none"} <= {*steps["rollout"]} & {*steps["learner"]}
    assert "--cpus-per-task=$cores_rollout" in steps["rollout"]
    assert "OMP_NUM_THREADS=$cores_learner" in steps["learner"]
    assert {"first=127.0.0.1", "cores_rollout=4", "cores_learner=4"} <= set(script.splitlines())
    assert "buffer.bind=tcp://127.0.0.1:$((port + 1))" in script
    assert "bash" not in steps["learner"]


def test_ranks_and_servers_on_gpus(render: Render) -> None:
    script = render("--nodes=4", "--gpus-per-node=8", "--cpus-per-node=34", "learner.ranks=16", "rollout.servers=3")
    assert directives_of(script)["gres"] == "gpu:8"
    steps = steps_of(script)
    assert list(steps) == ["redis", "buffer", "rollout", "rollout-1", "rollout-2", "learner"]
    assert {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--gres=gpu:8"} <= {*steps["learner"]}
    assert "--nodelist=${nodes[0]},${nodes[1]}" in steps["learner"]
    assert "cores_learner=4" in script.splitlines()
    assert "export MASTER_ADDR=$first MASTER_PORT=$((port + 5))" in script
    nodes = {name: next(word for word in words if "nodelist" in word) for name, words in steps.items()}
    assert [nodes[name] for name in ("rollout", "rollout-1", "rollout-2")] == [
        f"--nodelist=${{nodes[{node}]}}" for node in (2, 3, 2)
    ]
    assert "--gres=gpu:1" in steps["rollout-2"]
    assert "SLIPSTREAM_PROCESS=rollout-2" in steps["rollout-2"]


@pytest.mark.parametrize(
    ("arguments", "rollout", "learner"),
    [
        (["--nodes=1"], "/ 2", "/ 2"),
        (["--nodes=2", "rollout.servers=3"], "/ 3", "/ 1"),
        (["--nodes=2", "--gpus-per-node=8", "rollout.engine.options={tensor_parallel_size: 2}"], "* 2 / 8", "* 1 / 8"),
    ],
)
def test_whole_nodes_are_divided_by_the_job(arguments: list[str], rollout: str, learner: str, render: Render) -> None:
    lines = render(*arguments).splitlines()
    for name, share in (("rollout", rollout), ("learner", learner)):
        (line,) = [line for line in lines if line.startswith(f"cores_{name}=")]
        expression = f"SLURM_CPUS_ON_NODE {share}"
        assert line == f"cores_{name}=$(({expression} > 0 ? {expression} : 1))"


def test_steps_get_only_their_secrets(render: Render) -> None:
    steps = steps_of(render("--nodes=2", "tracking.swanlab={}"))
    withheld = {name: {words[at + 1] for at, word in enumerate(words) if word == "-u"} for name, words in steps.items()}
    assert withheld == {
        "redis": set(LEARNERS_SECRETS) - {"SLIPSTREAM_REDIS_PASSWORD"},
        "buffer": set(LEARNERS_SECRETS) - {"SLIPSTREAM_REDIS_PASSWORD"},
        "rollout": set(LEARNERS_SECRETS),
        "learner": set(),
    }


def test_options_reach_sbatch_and_keys_the_processes(render: Render, tmp_path: Path) -> None:
    given = ("--partition=gpu", "--account=lab", "--time=8:00:00", "--notice-s=300", "--sbatch=--qos=high")
    script = render(
        "--nodes=2",
        *given,
        "run.port_base=9000",
        "redis.url=redis://elsewhere:6379/0",
        "run.name=a b".replace(" ", "-"),
    )
    options = directives_of(script)
    assert [options[name] for name in ("partition", "account", "time", "qos", "signal", "job-name")] == [
        *("gpu", "lab", "8:00:00", "high"),
        "B:USR1@300",
        "a-b",
    ]
    assert "exclusive" in options
    assert re.search(r"^port=9000$", script, re.MULTILINE)
    assert "redis.url" not in script
    assert f"security.keys={tmp_path}/a-b/keys" in script


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes=0"], ["0 is less than 1"]),
        ([], ["--nodes"]),
        (["--nodes=1", "--gpus-per-node=1"], ["1 + 1 GPUs"]),
        (["--nodes=1", "--sbatch=qos"], ["qos"]),
        (["--nodes=1", "learner.trainer={name: sft, data: rows.jsonl}"], ["=sft", "torchrun"]),
    ],
)
def test_refusals(arguments: list[str], words: list[str], cli: CommandLine, tmp_path: Path) -> None:
    assert cli("slurm", Path("configs/demo.yaml").absolute(), f"run.dir={tmp_path}", "--dry-run", *arguments) == 2
    assert all(word in cli.err for word in words), cli.err


def test_sbatch_is_needed(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli("slurm", Path("configs/demo.yaml").absolute(), f"run.dir={tmp_path}", "--nodes=1") == 1
    assert "sbatch" in cli.err
    keys = tmp_path / "demo" / "keys"
    assert (keys.stat().st_mode & 0o777, len(list(keys.iterdir()))) == (0o700, 6)
