"""`slipstream slurm`: a run as one Slurm job, with a step for each process and one for all ranks of the learner."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from slipstream.configs import RunConfig
from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.runtime.errors import CERTAIN, ConfigError, SlipstreamError
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.rollout_servers.cli import PROCESS_VARIABLE
from slipstream.tools.cli import at_least
from slipstream.tools.clusters.roles import RENDEZVOUS, Role, cluster_roles, cluster_settings, server_nodes
from slipstream.tools.launch.preflight import keys_folder, prepare_shared_folder
from slipstream.tools.launch.restarts import MOST_ALIKE, MOST_DELAY_S

NOTICE_S: Final = 120
FIRST_PORT, LAST_PORT, PORTS = 20_000, 32_000, 6
"""Range of the ports, which follow from the job's number: jobs may share a node."""
SUBMIT_DEADLINE_S: Final = 60.0
SOUND_S: Final = 600
"""A process that lived longer worked: its failure is the first of a new row."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A run as a Slurm job."""

    config: RunConfig
    nodes: int
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    """Unset: the job takes whole nodes."""
    notice_s: int = NOTICE_S
    """Time before its limit at which the job stops in order, to be queued again."""
    options: tuple[str, ...] = ()
    """Further options of sbatch."""
    python: str = sys.executable

    @property
    def roles(self) -> tuple[Role, ...]:
        """The table of roles. Raises: ConfigError with all that can't work."""
        return cluster_roles(
            self.config, nodes=self.nodes, gpus_per_node=self.gpus_per_node, cpus_per_node=self.cpus_per_node
        )


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream slurm`; returns 0 once the job is queued.

    Raises: ConfigError, before anything is written, for what can't work; SlipstreamError when sbatch refuses.
    """
    parser = run_parser(
        "Submit a run as a Slurm job. It continues by itself when it is queued again.", prog="slipstream slurm"
    )
    parser.add_argument("--nodes", type=at_least(1), required=True, help="nodes of the job")
    parser.add_argument("--gpus-per-node", type=at_least(0), default=0, metavar="N", help="default: none")
    parser.add_argument("--cpus-per-node", type=at_least(1), metavar="N", help="default: whole nodes")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--time", metavar="LIMIT", help="such as 8:00:00; the job is queued again when it is over")
    parser.add_argument(
        "--notice-s",
        type=at_least(1),
        default=NOTICE_S,
        metavar="N",
        help=f"seconds before the limit at which it stops in order (default: {NOTICE_S})",
    )
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="another option, such as --sbatch=--qos=high"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script; nothing is written or submitted")
    arguments, config = read_run_arguments(parser, argv)
    job = SlurmJob(
        config=config,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_node=arguments.cpus_per_node,
        notice_s=arguments.notice_s,
        options=_options(arguments),
    )
    script = job_script(job)
    if arguments.dry_run:
        print(script, end="")
        return 0
    print(prepare_shared_folder(config), flush=True)
    file = config.paths.root / "slurm.sh"
    file.write_text(script, encoding="utf-8")
    print(_submit(file))
    print(f"output in {config.paths.logs}; `scancel JOB` stops the run, and the same command continues it")
    return 0


def _options(arguments: argparse.Namespace) -> tuple[str, ...]:
    named = {key: getattr(arguments, key) for key in ("partition", "account", "time")}
    options = [*(f"--{key}={value}" for key, value in named.items() if value is not None), *arguments.sbatch]
    if wrong := [option for option in options if not option.startswith("-") or "\n" in option]:
        raise ConfigError(f"--sbatch={wrong[0]!r} must be an option of sbatch, such as --sbatch=--qos=high")
    return tuple(options)


def _submit(script: Path) -> str:
    """Sbatch's answer. Raises: SlipstreamError."""
    try:
        done = subprocess.run(
            ["sbatch", str(script)], capture_output=True, text=True, check=False, timeout=SUBMIT_DEADLINE_S
        )
    except FileNotFoundError:
        raise SlipstreamError(
            f"there is no sbatch on this machine: run the command on a login node of the cluster; {script} is written"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlipstreamError(f"sbatch gave no answer within {SUBMIT_DEADLINE_S:g} s: see `sinfo`") from None
    if done.returncode:
        raise SlipstreamError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip()


# --- script -----------------------------------------------------------------------------------------------------------


def job_script(job: SlurmJob) -> str:
    """The batch script of a run. Raises: ConfigError with all that can't work."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _directives(job)), *_variables(job)]
    return "\n".join([*lines, _FUNCTIONS, *_starts(job), _END])


def _directives(job: SlurmJob) -> list[str]:
    """Options of sbatch; those that the user has given come last."""
    size = "--exclusive" if job.cpus_per_node is None else f"--cpus-per-task={job.cpus_per_node}"
    name, logs = job.config.run.name, job.config.paths.logs.absolute()
    return [
        f"--job-name={name}",
        # Two jobs of a run would use the same files: the second waits for the end of the first.
        "--dependency=singleton",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        size,
        *([f"--gres=gpu:{job.gpus_per_node}"] if job.gpus_per_node else []),
        "--requeue",
        "--no-kill",
        f"--signal=B:USR1@{job.notice_s}",
        "--open-mode=append",
        f"--output={str(logs).replace('%', '%%')}/slurm.console",
        *job.options,
    ]


def _variables(job: SlurmJob) -> list[str]:
    """Variables of the script, evaluated on the job's first node."""
    paths, base = job.config.paths, job.config.run.port_base
    first = f"$(({FIRST_PORT} + SLURM_JOB_ID % {(LAST_PORT - FIRST_PORT) // PORTS} * {PORTS}))"
    alone = job.nodes == 1
    ports = {key: f"$((port + {number}))" for number, key in enumerate(key for role in job.roles for key in role.ports)}
    rendezvous = ports.pop(RENDEZVOUS, None)
    settings = cluster_settings(
        job.config,
        redis_host="$first",
        buffer_host="$first",
        learner_host="$first",
        bind="127.0.0.1" if alone else "0.0.0.0",
        ports=ports,
    )
    keys = shlex.quote(f"security.keys={keys_folder(job.config)}")
    return [
        f"job_nodes={job.nodes}",
        'readarray -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "address() { scontrol show node \"$1\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'; }",
        "first=127.0.0.1" if alone else 'first=$(address "${nodes[0]}")',
        *(f"cores_{role.name}={_cores(job, role)}" for role in job.roles if role.name in _SIZED),
        f"port={first if base is None else base}",
        *([f"export MASTER_ADDR=$first MASTER_PORT={rendezvous}"] if rendezvous else []),
        f"python={shlex.quote(job.python)}",
        f"logs={shlex.quote(str(paths.logs.absolute()))}",
        f"checkpoints={shlex.quote(str(paths.checkpoints.absolute()))}",
        f"config={shlex.quote(str(paths.config.absolute()))}",
        f"settings=({' '.join([*settings, keys])})",
        f'export {REDIS_PASSWORD_VARIABLE}="${{{REDIS_PASSWORD_VARIABLE}:-'
        '$("$python" -c \'import secrets; print(secrets.token_urlsafe())\')}"',
    ]


_SIZED: Final = ("rollout", "learner")
"""Roles with cores of their own; Redis and buffer share those of others."""


def _cores(job: SlurmJob, role: Role) -> str:
    """Cores of one process: by the table, or of whole nodes its share of what the job has got."""
    if job.cpus_per_node is not None:
        return str(role.cpus)
    if job.gpus_per_node:
        share = f"SLURM_CPUS_ON_NODE * {role.gpus} / {job.gpus_per_node}"
    else:
        on_node = [other.per_node for other in job.roles if other.name in _SIZED]
        share = f"SLURM_CPUS_ON_NODE / {sum(on_node) if job.nodes == 1 else role.per_node}"
    return f"$(({share} > 0 ? {share} : 1))"


def _starts(job: SlurmJob) -> Iterator[str]:
    """The lines that start the processes, and the function `learn` that runs the learner."""
    for role in job.roles:
        if role.name == "rollout":
            for index, node in enumerate(server_nodes(job.roles, nodes=job.nodes, gpus_per_node=job.gpus_per_node)):
                name = f"rollout-{index}" if index else "rollout"
                step = _step(job, role, range(node, node + 1), {PROCESS_VARIABLE: name})
                yield f"keep {name} {step} & rollouts+=($!)"
        elif role.name == "learner":
            yield f"learn() {{ step learner {_step(job, role, range(role.nodes))}; }}"
        else:
            yield f'keep {role.name} {_step(job, role, range(1))} & services=($! "${{services[@]}}")'


def _step(job: SlurmJob, role: Role, nodes: range, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Arguments of srun for one step of a role, its command included."""
    tasks = role.processes if role.name == "learner" else 1
    options = [
        f"--nodes={len(nodes)}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks // len(nodes)}",
        '--nodelist="' + ",".join(f"${{nodes[{node}]}}" for node in nodes) + '"',
        f"--cpus-per-task={'$cores_' + role.name if role.name in _SIZED else role.cpus}",
        "--mem=0",  # all of the job's, which its steps share
        "--exact" if role.name in _SIZED else "--overlap",
        f"--gres=gpu:{role.gpus * tasks // len(nodes)}" if role.gpus else "--gres=none",
    ]
    withheld = sorted({name for other in job.roles for name in other.secrets} - set(role.secrets))
    threads = {"OMP_NUM_THREADS": f"$cores_{role.name}"} if role.name in _SIZED else {}
    environment = [f"{name}={value}" for name, value in {**role.environment, **threads, **variables}.items()]
    command = ["env", *(f"-u {name}" for name in withheld), *environment]
    if role.processes > 1 and role.name == "learner":
        command += ["bash", "-c", shlex.quote(_RANK), "rank"]
    return " ".join([*options, *command, '"$python"', "-P", "-m", role.module, '"$config" "${settings[@]}"'])


_RANK: Final = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
    'LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES)); exec "$@"'
)
"""Sets the variables of `rank_environment` in each task; MASTER_ADDR and MASTER_PORT are the script's."""

_FUNCTIONS: Final = rf"""
services=() rollouts=() stopping= requeue= alone= learner=

# step NAME [option of srun ...] COMMAND: the shell becomes srun; the output is appended to a file.
step() {{
    local name=$1; shift
    exec srun --job-name="$name" --kill-on-bad-exit=1 --open-mode=append --output="$logs/$name.console" "$@"
}}

# end NAME: sends TERM to the processes of a step; false without one. To srun itself it would mean to kill them.
end() {{
    local step found=1
    for step in $(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | sed -n "s/ $1\$//p"); do
        scancel --ctld --signal=TERM "$step" && found=0
    done
    return $found
}}

# keep NAME ...: starts a step again when it fails, after 1, 2, 4 ... {MOST_DELAY_S:.0f} s.
keep() {{
    local name=$1 failures=0 child pause= code began delay
    trap 'stopping=1; end "$name" || kill $child $pause 2>/dev/null' TERM
    while [[ ! $stopping ]]; do
        began=$SECONDS
        step "$@" & child=$!
        await $child; code=$?
        [[ $stopping || $code == 0 ]] && return
        (( SECONDS - began > {SOUND_S} )) && failures=0
        if (( ++failures == {MOST_ALIKE} || code == {CERTAIN} )); then
            echo "$name stays down: it ended with exit code $code ($logs/$name.console)"
            return
        fi
        delay=$(( failures < 7 ? 1 << (failures - 1) : {MOST_DELAY_S:.0f} ))
        echo "$name ended with exit code $code; it is started again in $delay s ($logs/$name.console)"
        sleep $delay & pause=$!
        await $pause
    done
}}

# await PID: its exit code; a signal with a trap interrupts a mere wait.
await() {{
    local code
    while :; do
        wait "$1"; code=$?
        kill -0 "$1" 2>/dev/null || return $code
    done
}}

# The step of the latest checkpoint; empty without.
checkpoint() {{ ls "$checkpoints" 2>/dev/null | sed -n 's/^step-0*\([0-9]*\)$/\1/p' | sort -n | tail -1; }}

# Slurm gives notice by USR1, and sends TERM to all steps itself; `scancel --batch --signal=INT` stops the run in order.
trap 'stopping=1 requeue=1; end learner || kill $learner 2>/dev/null' USR1
trap 'stopping=1; end learner || kill $learner 2>/dev/null' INT
trap 'stopping=1' TERM
"""

_END: Final = rf"""
saved=-1
while [[ ! $stopping ]]; do
    learn & learner=$!
    while kill -0 $learner 2>/dev/null; do
        sleep 2 & wait $!
        if [[ ! $stopping ]] && ! kill -0 "${{rollouts[@]}}" 2>/dev/null; then
            echo "no rollout server is left"
            stopping=1 alone=1
            end learner || kill $learner 2>/dev/null
        fi
    done
    wait $learner; code=$?
    [[ $alone ]] && code=1
    latest=$(checkpoint)
    echo "the learner ended with exit code $code; latest checkpoint: step ${{latest:-0}}"
    case $code in 0 | {CERTAIN} | 130 | 143) break ;; esac
    if (( $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D) < job_nodes )); then
        requeue=1  # a node was lost
        break
    fi
    (( ${{latest:-0}} > saved )) || break
    saved=${{latest:-0}}
done
for pid in "${{rollouts[@]}}"; do kill -TERM "$pid" 2>/dev/null; done
for pid in "${{rollouts[@]}}"; do await "$pid"; done
for pid in "${{services[@]}}"; do kill -TERM "$pid" 2>/dev/null; await "$pid"; done
if [[ $requeue && $code != 0 ]]; then
    echo "the job is queued again; it continues the run"
    scontrol requeue "$SLURM_JOB_ID" && sleep infinity
fi
exit "$code"
"""
