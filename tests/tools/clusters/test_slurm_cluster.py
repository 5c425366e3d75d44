"""Runs through `slipstream slurm` on a real cluster of three nodes on this machine: `make slurm-check`."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.tools.launch.ports import choose_ports
from tests.tools.clusters.slurm_cluster import GPUS, NODES, SlurmCluster
from tests.tools.run_command import DEMO, slipstream, until_within

SLURM_CHECK = "SLIPSTREAM_SLURM_CHECK"
RUN_S = 900.0
"""For a whole run of the demo on a busy machine."""
pytestmark = [
    pytest.mark.skipif(SLURM_CHECK not in os.environ, reason="`make slurm-check` sets up Slurm"),
    pytest.mark.timeout(2 * RUN_S),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), first_port=choose_ports(NODES + 1)) as started:
        yield started


class Job:
    """A run of the demo as a job."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *arguments: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run = folder / "runs" / "demo"
        command = ("slurm", DEMO, f"run.dir={folder / 'runs'}", f"--nodes={NODES}", *arguments)
        done = slipstream(*command, folder=folder, environment=cluster.environment)
        assert done.returncode == 0, done.stderr
        found = re.search(r"batch job (\d+)", done.stdout)
        assert found, done.stdout
        self.id = found[1]

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines), default=0)

    @property
    def record(self) -> dict[str, str]:
        """What Slurm knows of the job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster("scontrol", "show", "job", "--oneliner", self.id)))

    def wait_for_steps(self, steps: int) -> None:
        until_within(RUN_S, lambda: self.steps >= steps)

    def wait_for_end(self) -> None:
        until_within(RUN_S, lambda: self.record["JobState"] not in ("RUNNING", "PENDING", "COMPLETING", "REQUEUED"))

    def output(self, name: str = "slurm") -> str:
        return (self.run / "logs" / f"{name}.console").read_text()

    def require_trained(self) -> None:
        """Fails unless the run ended well, with a sound ledger."""
        assert (self.record["JobState"], self.record["ExitCode"]) == ("COMPLETED", "0:0"), self.output()
        assert json.loads((self.run / "summary.json").read_text())["eval_score"] >= 0.99
        verified = slipstream("ledger", "verify", self.run, folder=self.folder)
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_lost_node_and_requeue_leave_run_whole(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A node with a rollout server is lost in the middle; later the job gets notice of its end, and is queued again."""
    job = Job(cluster, tmp_path, "learner.checkpoint.every_steps=25")
    job.wait_for_steps(60)
    cluster.kill_node("n3")
    until_within(RUN_S, lambda: job.record["NumNodes"] == str(NODES - 1))
    after = job.steps
    job.wait_for_steps(after + 20)  # the other server goes on
    cluster.start_node("n3")
    cluster("scancel", "--batch", "--signal=USR1", job.id)
    until_within(RUN_S, lambda: job.record["Restarts"] == "1")
    saved = max(int(path.name.removeprefix("step-")) for path in (job.run / "checkpoints").glob("step-*"))
    assert saved >= after + 20
    job.wait_for_end()
    job.require_trained()


def test_killed_learner_of_two_nodes_continues(cluster: SlurmCluster, tmp_path: Path) -> None:
    arguments = ("learner.ranks=2", "rollout.servers=1", "learner.checkpoint.every_steps=20")
    job = Job(cluster, tmp_path, *arguments)
    job.wait_for_steps(30)
    ranks = cluster.processes(WORLD_SIZE="2")
    assert {environment["SLURMD_NODENAME"] for environment in ranks.values()} == {"n1", "n2"}
    os.kill(max(ranks), 9)
    job.wait_for_end()
    job.require_trained()
    assert "the learner ended with exit code 137; latest checkpoint: step 20" in job.output()


def test_steps_get_gpus_of_their_own(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Two servers and two ranks on two nodes, by device files that stand for GPUs."""
    job = Job(cluster, tmp_path, f"--gpus-per-node={GPUS}", "rollout.servers=4", "learner.ranks=2")
    job.wait_for_steps(2)
    seen = [
        (
            environment["SLURMD_NODENAME"],
            environment.get("SLIPSTREAM_PROCESS", "learner"),
            environment["CUDA_VISIBLE_DEVICES"],
        )
        for environment in cluster.processes().values()
        if "CUDA_VISIBLE_DEVICES" in environment and "OMP_NUM_THREADS" in environment
    ]
    assert set(seen) == {
        ("n1", "learner", "0,1"),
        ("n2", "rollout", "0"),
        ("n2", "rollout-2", "1"),
        ("n3", "rollout-1", "0"),
        ("n3", "rollout-3", "1"),
    }
    cluster("scancel", "--batch", "--signal=INT", job.id)
    job.wait_for_end()
    assert job.record["ExitCode"] == "143:0"
