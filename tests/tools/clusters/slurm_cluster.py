"""A Slurm cluster of several nodes on this machine, with files, sockets and a munge key of its own."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from tests.tools.run_command import until

NODES = 3
GPUS = 2
"""On each node: device files that stand for GPUs."""
CONFIGURATION = """\
ClusterName=check
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout=15
MessageTimeout=60
KillWait=30
SchedulerParameters=requeue_delay=1,sched_interval=2
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 Sockets=1 CoresPerSocket=4 \
ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Context in which the cluster runs; its end ends the daemons and all that jobs have started."""

    def __init__(self, folder: Path, *, first_port: int) -> None:
        self._folder = folder
        host = socket.gethostname().partition(".")[0]
        for name in ("munge", "state", *(f"spool-n{node}" for node in range(1, NODES + 1))):
            (folder / name).mkdir(mode=0o700)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = {"port": first_port, "first": first_port + 1, "last": first_port + NODES}
        text = CONFIGURATION.format(host=host, folder=folder, nodes=NODES, gpus=GPUS, **ports)
        (folder / "slurm.conf").write_text(text)
        devices = (
            f"NodeName=n{node} Name=gpu File=/dev/tty[{GPUS * node - 1}-{GPUS * node}]" for node in range(1, NODES + 1)
        )
        (folder / "gres.conf").write_text("\n".join(devices) + "\n")
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as started:
            started.callback(self._stop)
            munge = self._folder / "munge"
            files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            self._start(
                "munged",
                "munged",
                "--foreground",
                "--force",
                *(f"--{key}={munge / name}" for key, name in files.items()),
            )
            until((munge / "socket").exists)
            self._start("slurmctld", "slurmctld", "-D")
            for node in range(1, NODES + 1):
                self.start_node(f"n{node}")
            until(lambda: self("sinfo", "--noheader", "--format=%t %D") == f"idle {NODES}")
            started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def __call__(self, *command: object) -> str:
        """The output of a command of Slurm."""
        words = [str(word) for word in command]
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        ).stdout.strip()

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kills a node's daemon and all that runs on it."""
        self._daemons[name].kill()
        tasks = self.processes(SLURMD_NODENAME=name)
        parents = {parent for child, parent in _parents().items() if child in tasks}  # slurmstepd lacks the variable
        _kill(_with_children(parents & set(self.processes())))
        self._daemons[name].wait()

    def processes(self, **variables: str) -> dict[int, dict[str, str]]:
        """The environments of this cluster's processes that have these variables, by process id."""
        wanted = {"SLURM_CONF": self.environment["SLURM_CONF"], **variables}.items()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                text = (folder / "environ").read_bytes().decode(errors="replace")
                environment = dict(line.partition("=")[::2] for line in text.split("\0") if line)
                if wanted <= environment.items():
                    found[int(folder.name)] = environment
        return found

    def _start(self, name: str, *command: str) -> None:
        with (self._folder / f"{name}.out").open("wb") as output:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def _stop(self) -> None:
        while processes := self.processes():  # a job may be starting some
            _kill(_with_children(set(processes)))
        for daemon in self._daemons.values():
            daemon.wait()


def _parents() -> dict[int, int]:
    """The parent of each process."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            found[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    return found


def _with_children(processes: set[int]) -> set[int]:
    """The processes and all that they have started: Redis overwrites its environment."""
    parents, family = _parents(), set(processes)
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
