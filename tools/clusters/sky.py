"""`slipstream sky`: a run as two tasks of SkyPilot, a trainer on demand and rollout servers on spot machines."""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final

from slipstream.configs import RunConfig
from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.load import dump_config, load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.yaml_text import write_yaml
from slipstream.tools.cli import at_least
from slipstream.tools.clusters.roles import (
    LEAST_SHARED_BYTES,
    RENDEZVOUS_PORT,
    Role,
    cluster_roles,
    cluster_settings,
)
from slipstream.tools.launch.placement import Role as RoleName

UNKNOWN: Final = "unknown"
"""Value of TRAINER_IP before the machine is there."""
FOLDER: Final = "~/slipstream"
"""On the machines: configuration, keys, and the run's folder."""
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "trainer": ("buffer.key_secret", "learner.key_secret", "buffer.key", "learner.key", "rollout.key"),
    "rollout": ("rollout.key_secret", "buffer.key", "learner.key"),
}
NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
"""A name that every cloud takes for a machine, with an ending."""
IDLE_MINUTES: Final = 30
"""Time after the end of the trainer's script at which its machine is stopped; its disk stays."""
LEAST_CPUS: Final = 4
RESTARTS: Final = 5
"""Failures of a rollout server after which its job is given up; preemptions do not count."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream sky`; returns 0. Raises: ConfigError with all that can't work, before anything is written."""
    parser = run_parser("Write a run as tasks of SkyPilot, rollout servers on spot machines.", prog="slipstream sky")
    parser.add_argument("--image", required=True, help="image with the packages of every process")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="its files are written over")
    parser.add_argument("--nodes", type=at_least(2), required=True, help="machines: the trainer, and spot machines")
    parser.add_argument("--gpus-per-node", type=_gpus, metavar="NAME:N", help="such as H100:8 (default: none)")
    parser.add_argument("--cpus-per-node", type=at_least(1), metavar="N", help="at least")
    arguments, config = read_run_arguments(parser, argv)
    gpu, gpus = arguments.gpus_per_node or (None, 0)
    roles = cluster_roles(config, nodes=arguments.nodes, gpus_per_node=gpus, cpus_per_node=arguments.cpus_per_node)
    tasks = Tasks(
        config=load_config(arguments.config, [*arguments.overrides, *machine_settings(config)]),
        roles={role.name: role for role in roles},
        image=arguments.image,
        folder=arguments.out.absolute(),
        gpu=gpu,
        cpus=arguments.cpus_per_node,
    )
    if problems := _problems(config, tasks, nodes=arguments.nodes):
        raise ConfigError(problems)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name, text in tasks.files.items():
            (arguments.out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out={arguments.out} can't be written: {error.strerror}; name another folder") from None
    print("\n".join(tasks.steps))
    return 0


def machine_settings(config: RunConfig) -> list[str]:
    """The overrides of the processes: folders in the containers, Redis for the trainer alone, weights as a stream.

    The trainer's address is known once it is there: the tasks add it.
    """
    local = cluster_settings(config, redis_host="127.0.0.1", buffer_host="127.0.0.1", learner_host="127.0.0.1")
    return [*local, "weights.transport=stream", "run.dir=/slipstream/runs", "security.keys=/slipstream/keys"]


def _problems(config: RunConfig, tasks: "Tasks", *, nodes: int) -> list[str]:
    """Settings that can't work on machines of several clouds."""
    problems, path = [], config.model.path
    learner, rollout = tasks.roles["learner"], tasks.roles["rollout"]
    if not NAME.fullmatch(config.run.name):
        problems.append(
            f"run.name={config.run.name} must be a name for machines: up to 30 lower-case letters, digits and -, the "
            "first a letter; set run.name"
        )
    if learner.nodes > 1:
        problems.append(
            f"learner.ranks={config.learner.ranks}: the trainer is one machine, but its {learner.processes} ranks take "
            f"{learner.nodes}; name machines with more GPUs, or set learner.ranks"
        )
    elif rollout.nodes > nodes - 1:
        problems.append(
            f"rollout.servers={config.rollout.servers}: {rollout.processes} servers don't fit on the {nodes - 1} spot "
            "machines; name more --nodes, or set rollout.servers"
        )
    if path is not None and (path.is_absolute() or path.is_dir()):
        problems.append(f"model.path={path} is a folder of this machine: name a model of a hub")
    if config.weights.transport not in ("auto", "stream"):
        problems.append(
            f"weights.transport={config.weights.transport} needs one network; machines of several clouds take stream"
        )
    if config.redis.url is not None and config.redis.url.startswith("unix:"):
        problems.append(f"redis.url={config.redis.url} is on this machine; leave it out")
    return problems


def _gpus(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Za-z0-9-]+):([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no kind and number of GPUs such as H100:8")
    return match[1], int(match[2])


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks of a run.

    Attributes:
        config: as the processes read it.
        folder: where the files are written, from which SkyPilot copies configuration and keys.
        gpu: SkyPilot's name of the GPUs; None: no GPUs.
        cpus: of each machine, at least; None: not given.
    """

    config: RunConfig
    roles: Mapping[RoleName, Role]
    image: str
    folder: Path
    gpu: str | None
    cpus: int | None

    @property
    def files(self) -> dict[str, str]:
        """The content of each file, by its name."""
        trainer, rollout = self._machine(self.roles["learner"]), self._machine(self.roles["rollout"])
        trainer |= {"ports": self._ports, "autostop": IDLE_MINUTES}
        rollout |= {"use_spot": True, "job_recovery": {"max_restarts_on_errors": RESTARTS}}
        return {
            "config.yaml": dump_config(self.config),
            "trainer.yaml": write_yaml(self._task("trainer", trainer)),
            "trainer.sh": self.trainer,
            "rollout.yaml": write_yaml(self._task("rollout", rollout)),
            "rollout.sh": self.rollout,
        }

    @property
    def trainer(self) -> str:
        """The script that runs Redis, buffer and all ranks of the learner."""
        learner = self.roles["learner"]
        services = []
        if redis := self.roles.get("redis"):
            # The server listens where the buffer does: here on loopback alone.
            local = f"buffer.bind=tcp://127.0.0.1:{self._ports[0]}"
            services.append(self._run(redis, ["python", "-P", "-m", redis.module], local) + " &")
        services.append(self._run(self.roles["buffer"], ["buffer"]) + " &")
        start = [f'if [ "$TRAINER_IP" = {UNKNOWN} ]; then', '    echo "the machine is there"', "    exit 0", "fi"]
        return _script(*start, *services, self._run(learner, self._learner(learner), 'weights.host="$TRAINER_IP"'))

    @property
    def rollout(self) -> str:
        """The script that runs the rollout servers of one spot machine; one that fails ends all."""
        role = self.roles["rollout"]
        settings = ['weights.host="$TRAINER_IP"', f'buffer.endpoint="tcp://$TRAINER_IP:{self._ports[0]}"']
        servers = [self._run(role, ["rollout"], *settings, index=index) + " &" for index in range(role.per_node)]
        return _script(*servers, *["wait -n"] * role.per_node)

    @property
    def steps(self) -> list[str]:
        """Shell commands that start the run, follow it, and end it."""
        name, folder = self.config.run.name, shlex.quote(str(self.folder))
        address = f"--env TRAINER_IP=$(sky status --ip {name})"
        each = f"for number in $(seq {self.roles['rollout'].nodes}); do"
        secrets = " ".join(f"--secret {variable}" for variable in self._secrets("learner"))
        return [
            f"slipstream keys new {folder}/keys",
            f"sky launch -y -c {name} {folder}/trainer.yaml",
            f"sky exec -d {name} {folder}/trainer.yaml {address}   # as well, if used: {secrets}",
            f"{each} sky jobs launch -y -d -n {name}-rollout-$number {folder}/rollout.yaml {address}; done",
            f"sky logs {name}",
            f"rsync -a {name}:slipstream/runs/{name} .   # the results",
            f"{each} sky jobs cancel -y -n {name}-rollout-$number; done; sky down -y {name}   # at the end",
        ]

    # --- parts --------------------------------------------------------------------------------------------------------

    @property
    def _ports(self) -> list[int]:
        """Ports that rollout servers reach: the buffer's, and the learner's for weights."""
        weights = self.config.weights
        return [self.roles["buffer"].ports["buffer.bind"], weights.control_port, weights.stream_port]

    def _task(self, name: str, resources: Mapping[str, Any]) -> dict[str, Any]:
        files = ["config.yaml", f"{name}.sh", *(f"keys/{file}" for file in KEYS[name])]
        return {
            "name": f"{self.config.run.name}-{name}",
            "resources": dict(resources),
            "envs": {"TRAINER_IP": UNKNOWN},
            "file_mounts": {f"{FOLDER}/{file}": f"{self.folder}/{file}" for file in files},
            "run": f"bash {FOLDER}/{name}.sh",
        }

    def _machine(self, role: Role) -> dict[str, Any]:
        """A machine for the processes of a role on one node."""
        if self.gpu is None:
            return {"cpus": f"{self.cpus or LEAST_CPUS}+"}
        return {"accelerators": f"{self.gpu}:{role.per_node * role.gpus}"}

    def _learner(self, role: Role) -> list[str]:
        if role.processes == 1:
            return ["learner"]
        ranks = [f"--nproc-per-node={role.processes}", "--master-addr=127.0.0.1", f"--master-port={RENDEZVOUS_PORT}"]
        return ["torchrun", "--nnodes=1", *ranks, f"--shutdown-timeout={ceil(role.grace_s)}", "-m", role.module]

    def _run(self, role: Role, program: Sequence[str], *settings: str, index: int = 0) -> str:
        """A line that runs a program of the image.

        Args:
            index: of a rollout server on its machine.
        """
        options = [f"--stop-timeout={ceil(role.grace_s)}"]
        options += [f"--env={key}={value}" for key, value in role.environment.items()]
        options += [f"--env={variable}" for variable in self._secrets(role.name)]
        if role.name in ("learner", "rollout"):
            options.append(f"--shm-size={role.shared_memory_bytes or LEAST_SHARED_BYTES}")
        if role.gpus:
            count = role.per_node if role.name == "learner" else role.gpus
            devices = ",".join(str(index * role.gpus + device) for device in range(count))
            options.append(f"--gpus='\"device={devices}\"'")
        words = [*options, shlex.quote(self.image), *program, "/slipstream/config.yaml", *settings]
        return '"${container[@]}" ' + " ".join(words)

    def _secrets(self, name: RoleName) -> tuple[str, ...]:
        """Variables that docker passes on if they are set."""
        role = self.roles[name]
        return (*role.secrets, "HF_TOKEN") if name in ("learner", "rollout") else role.secrets


def _script(*lines: str) -> str:
    return _HEAD + "\n".join(lines) + "\n"


_HEAD: Final = """\
#!/bin/bash
set -eu
cd ~/slipstream
mkdir -p runs
chmod 600 keys/*_secret
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT

# An array, not a function: the signal is for docker itself, which passes it on.
container=(
    docker run --rm --init --network=host --user="$(id -u):$(id -g)" --env=HOME=/slipstream
    --volume="$PWD:/slipstream"
)

"""
