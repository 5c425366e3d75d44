"""Placement of a run's processes on this machine: their number, cores and GPUs. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.run import gpu_numbers
from slipstream.tools.launch.machine import Machine
from slipstream.tools.launch.sharing import Sharing, share_memory

if TYPE_CHECKING:
    from slipstream.tools.fit import FitReport

Role = Literal["redis", "buffer", "rollout", "learner"]
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Share:
    """The part of the machine that a process gets."""

    role: Role
    index: int = 0
    """Among the processes of its role; of a learner, the rank."""
    threads: int = 1
    cores: tuple[int, ...] = ()
    """Cores that it is bound to; empty: any."""
    gpus: tuple[int, ...] = ()
    """GPUs that it uses, by their places in `Machine.gpus`."""

    @property
    def name(self) -> str:
        """Name of the process and its log; the first of a role has the role's."""
        return f"{self.role}-{self.index}" if self.index else self.role


@dataclass(frozen=True)
class Placement:
    """The processes of a run, in the order of their start."""

    machine: Machine
    shares: tuple[Share, ...]
    sharing: Sharing | None = None
    """The division of the memory of GPUs that learner and engines share."""

    def of(self, role: Role) -> list[Share]:
        """The processes of one kind: rollout servers, or learner ranks in their order."""
        return [share for share in self.shares if share.role == role]

    def gpus(self, role: Role) -> tuple[int, ...]:
        """All GPUs of the processes of one kind."""
        return tuple(gpu for share in self.of(role) for gpu in share.gpus)

    @property
    def shared_gpus(self) -> tuple[int, ...]:
        """GPUs of both the learner and the rollout servers."""
        return tuple(sorted(set(self.gpus("rollout")) & set(self.gpus("learner"))))

    @property
    def text(self) -> str:
        """A table of the processes."""
        rows = [("process", "cores", "threads", "GPUs")]
        rows += [
            (share.name, _ranges(share.cores) or "any", str(share.threads), _ranges(share.gpus) or "-")
            for share in self.shares
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.append(f"of {_describe(self.machine)}")
        if self.sharing is not None:
            lines.append(f"GPU {_ranges(self.shared_gpus)}, shared, {self.sharing.text}")
        return "\n".join(f"  {line}" for line in lines)

    def as_record(self) -> dict[str, Any]:
        """The placement as `summary.json` keeps it."""
        return {
            "cores": len(self.machine.cores),
            "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in self.machine.gpus],
            "processes": {
                share.name: {"threads": share.threads, "cores": list(share.cores), "gpus": list(share.gpus)}
                for share in self.shares
            },
            **({} if self.sharing is None else {"shared_memory": self.sharing.as_record()}),
        }

    def environment(self, share: Share, *, rendezvous_port: int | None = None) -> dict[str, str]:
        """Environment variables of a process.

        Args:
            rendezvous_port: of the store of several learner ranks; None for other processes.
        """
        variables = {"OMP_NUM_THREADS": str(share.threads)}
        # Learner ranks see the GPUs of all: NCCL looks for paths between them, and LOCAL_RANK chooses.
        visible = self.gpus("learner") if share.role == "learner" else share.gpus
        if visible:
            ids = ",".join(self.machine.gpus[gpu].id for gpu in visible)
            variables |= {"CUDA_VISIBLE_DEVICES": ids, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if share.role == "learner" and self.shared_gpus and not self.machine.sets_allocator:
            # Little is left between its tensors. The memory that processes share comes from the driver instead.
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if rendezvous_port is not None:
            rank, size = str(share.index), str(len(self.of("learner")))
            variables |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous_port)}
        return variables


def place(machine: Machine, config: RunConfig, earlier: Summary | None = None) -> Placement:
    """The placement of a run's processes.

    Args:
        earlier: the summary of a run with the same folder, whose idle shares divide the GPUs.

    Raises: ConfigError with all that can't work.
    """
    if not config.uses_buffer:
        return _place_learner(machine, config)
    per_server = config.rollout.engine.gpus if machine.gpus else 0
    rollout_gpus, learner_gpus = _divide_gpus(machine, config, per_server, earlier)
    servers = _count(config.rollout.servers, auto=len(rollout_gpus) // per_server if machine.gpus else 1)
    most_ranks = _most_ranks(config.learner, len(learner_gpus)) if machine.gpus else mesh_unit(config.learner)
    ranks = _count(config.learner.ranks, auto=most_ranks)
    problems = [
        *rank_problems(config.learner, ranks),
        *_server_problems(config, servers, per_server, rollout_gpus),
        *_gpu_problems(config.learner, ranks, learner_gpus),
        *_sharing_problems(config, set(rollout_gpus) & set(learner_gpus)),
    ]
    if problems:
        raise ConfigError(problems)
    threads, cores = _divide_cores(machine, servers + ranks)
    shares = [Share("buffer")]
    if config.redis.url is None:
        shares.insert(0, Share("redis"))
    for index in range(servers):
        gpus = rollout_gpus[index * per_server : (index + 1) * per_server]
        shares.append(Share("rollout", index, threads, next(cores), gpus))
    for rank in range(ranks):
        gpus = learner_gpus[rank : rank + 1]
        shares.append(Share("learner", rank, threads, next(cores), gpus))
    return Placement(machine, tuple(shares))


def _place_learner(machine: Machine, config: RunConfig) -> Placement:
    """The placement of a learner alone, on all GPUs unless some are named. Raises: ConfigError."""
    if problems := _absent_gpus(machine, config):
        raise ConfigError(problems)
    named = config.gpus.learner
    gpus = tuple(range(len(machine.gpus))) if named == "auto" else gpu_numbers(named)
    most = _most_ranks(config.learner, len(gpus)) if machine.gpus else mesh_unit(config.learner)
    ranks = _count(config.learner.ranks, auto=most)
    if problems := [*rank_problems(config.learner, ranks), *_gpu_problems(config.learner, ranks, gpus)]:
        raise ConfigError(problems)
    threads, cores = _divide_cores(machine, ranks)
    shares = (Share("learner", rank, threads, next(cores), gpus[rank : rank + 1]) for rank in range(ranks))
    return Placement(machine, tuple(shares))


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _divide_gpus(
    machine: Machine, config: RunConfig, per_server: int, earlier: Summary | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """GPUs of the rollout servers and of the learner. Raises: ConfigError when they are too few, or absent."""
    if problems := _absent_gpus(machine, config):
        raise ConfigError(problems)
    every, named = range(len(machine.gpus)), _named_gpus(config)
    if not every:
        return (), ()
    rollout, learner = named.get("rollout"), named.get("learner")
    if rollout is None and learner is None:
        count = _rollout_gpus(machine, config, per_server, earlier)
        # One GPU is shared.
        return tuple(every[:count]), tuple(every[count:] or every)
    rollout = rollout if rollout is not None else tuple(gpu for gpu in every if gpu not in (learner or ()))
    learner = learner if learner is not None else tuple(gpu for gpu in every if gpu not in rollout)
    for key, numbers, other in (("rollout", rollout, "learner"), ("learner", learner, "rollout")):
        if not numbers:
            raise ConfigError(
                f"gpus.{other}={getattr(config.gpus, other)}: of {_describe(machine)}, none is left for "
                f"gpus.{key}=auto; name fewer, or those that both may use under gpus.{key} too"
            )
    return rollout, learner


def _named_gpus(config: RunConfig) -> dict[str, tuple[int, ...]]:
    return {key: gpu_numbers(text) for key, text in config.gpus if text != "auto"}


def _absent_gpus(machine: Machine, config: RunConfig) -> list[str]:
    """Named GPUs that the machine does not have."""
    absent = {key: sorted(set(numbers) - set(range(len(machine.gpus)))) for key, numbers in _named_gpus(config).items()}
    return [
        f"gpus.{key}={getattr(config.gpus, key)}: this machine has {_describe(machine)}, without GPU "
        f"{_ranges(missing)}; name others, or set gpus.{key}=auto"
        for key, missing in absent.items()
        if missing
    ]


def _rollout_gpus(machine: Machine, config: RunConfig, per_server: int, earlier: Summary | None) -> int:
    """Number of GPUs for the rollout servers, where the configuration names none. Raises: ConfigError if too few."""
    total, servers, ranks = len(machine.gpus), config.rollout.servers, config.learner.ranks
    for_servers = per_server * _count(servers, auto=1)
    for_ranks = _count(ranks, auto=mesh_unit(config.learner))
    if total == for_servers == for_ranks == 1:
        return 1
    most = total - for_ranks if servers == "auto" else for_servers
    possible = range(for_servers, most + 1, per_server)
    if for_servers + for_ranks > total:
        raise ConfigError(
            f"rollout.servers={servers} with {_gpus(per_server)} each (rollout.engine.options) and "
            f"learner.ranks={ranks} need {for_servers} + {for_ranks} GPUs, but this machine has {_describe(machine)}: "
            "lower them, or name the GPUs that both may use under gpus"
        )

    def cost(count: int) -> tuple[float, int]:
        """GPUs that would be unused, with, where both numbers are free, the distance from the wanted share."""
        unused = total - count - _count(ranks, auto=_most_ranks(config.learner, total - count))
        wanted = total * _rollout_share(earlier) if ranks == "auto" else count
        return unused + abs(count - wanted), unused

    return min(possible, key=cost)


def _rollout_share(earlier: Summary | None) -> float:
    """Share of the GPUs for rollout servers: by the work of both sides in an earlier run, else a half."""
    processes = ((earlier or {}).get("placement") or {}).get("processes") or {}
    idle = [(earlier or {}).get(key) for key in ("generator_idle_fraction", "learner_idle_fraction")]
    counts = [
        sum(len(process["gpus"]) for name, process in processes.items() if name.startswith(role))
        for role in ("rollout", "learner")
    ]
    busy = [count * (1 - share) for count, share in zip(counts, idle, strict=True) if share is not None]
    return busy[0] / sum(busy) if len(busy) == 2 and sum(busy) > 0 and all(counts) else 0.5


def _server_problems(config: RunConfig, servers: int, per_server: int, gpus: Sequence[int]) -> list[str]:
    """Servers whose engines would have too few GPUs, or leave some that are named unused."""
    needed = servers * per_server
    if needed == len(gpus) or (config.gpus.rollout == "auto" and 0 < needed < len(gpus)):
        return []
    return [
        f"rollout.servers={config.rollout.servers}: {_gpus(len(gpus))} for rollout servers "
        f"(gpus.rollout={config.gpus.rollout}) are not {max(1, servers)} times the {per_server} of each "
        "(rollout.engine.options.tensor_parallel_size and others): change one of them"
    ]


def _gpu_problems(learner: LearnerConfig, ranks: int, gpus: Sequence[int]) -> list[str]:
    """Named GPUs that are not one for each rank."""
    if ranks <= len(gpus) or not gpus:
        return []
    return [
        f"learner.ranks={learner.ranks}: {ranks} ranks need a GPU each, but there are {_gpus(len(gpus))} for the "
        f"learner: {_ranges(gpus)}; lower it, or name more under gpus.learner"
    ]


def _sharing_problems(config: RunConfig, shared: set[int]) -> list[str]:
    """GPUs of both engine and learner between which NCCL would send."""
    if not shared or not config.weights.direct:
        return []
    return [
        f"weights.transport={config.weights.transport}: rollout servers and learner share GPU "
        f"{_ranges(sorted(shared))}, and NCCL connects no GPU with itself; set weights.transport=auto"
    ]


# --- learner ranks ----------------------------------------------------------------------------------------------------


def mesh_unit(learner: LearnerConfig) -> int:
    """The product of the mesh's sizes, of which the ranks are a multiple."""
    sizes = learner.parallel
    return sizes.dp_replicate * (sizes.dp_shard or 1) * sizes.cp * sizes.tp


def _most_ranks(learner: LearnerConfig, gpus: int) -> int:
    """The largest number of ranks on so many GPUs; at least one that the mesh is for."""
    unit = mesh_unit(learner)
    return next((ranks for ranks in range(gpus, unit, -1) if not rank_problems(learner, ranks)), unit)


def rank_problems(learner: LearnerConfig, ranks: int) -> list[str]:
    """Ranks that are not the mesh's, or in RL can't have equally many groups each."""
    unit, sizes = mesh_unit(learner), learner.parallel
    if ranks % unit or (sizes.dp_shard is not None and ranks != unit):
        given = ", ".join(f"{axis}={size}" for axis, size in sizes if size not in (None, 1) and axis != "ep")
        number = f"{unit}" if sizes.dp_shard is not None else f"a multiple of {unit}"
        return [f"learner.ranks={ranks}: learner.parallel ({given or 'dp_shard=1'}) needs {number}; correct either"]
    if not learner.uses_buffer:
        return []
    different = ranks // (sizes.cp * sizes.tp)
    per_update = learner.groups_per_step // learner.updates_per_step
    if per_update % different:
        return [
            f"learner.ranks={ranks}: {different} of them receive different groups, and learner.groups_per_step / "
            f"learner.updates_per_step = {per_update} is no multiple of that; change one of them"
        ]
    return []


# --- cores ------------------------------------------------------------------------------------------------------------


def _divide_cores(machine: Machine, processes: int) -> tuple[int, Iterator[tuple[int, ...]]]:
    """Threads of each rollout server and rank, and its cores.

    Where each has only one, none is bound to it: Redis and buffer need cores too, and other processes may use them.
    """
    share = len(machine.cores) // processes
    threads = machine.threads or max(1, share)
    bound = machine.pins and share > 1
    return threads, (machine.cores[at * share : (at + 1) * share] if bound else () for at in range(processes))


# --- memory -----------------------------------------------------------------------------------------------------------


def divide_memory(placement: Placement, config: RunConfig, report: "FitReport") -> Placement:
    """The placement with the division of the memory of shared GPUs, by what `slipstream fit` computes.

    Raises: ConfigError with one message for each side that does not fit into its GPUs' memory.
    """
    memory, engine = f"{report.gpu_memory / 1e9:.0f} GB", config.rollout.engine
    problems, shared = list[str](), placement.shared_gpus
    if not report.learner_fits:
        remedies = [*report.remedies[:1], *([report.proposed] if report.proposed else [])]
        problems.append(
            f"learner: each of {len(placement.of('learner'))} ranks needs {sum(report.learner.values()) / 1e9:.1f} GB "
            f"of a GPU of {memory}: {' or '.join(remedies) or 'more GPUs, or a smaller model'}"
        )
    if not shared and not report.sequences and engine.name != "hf":  # which has no cache of a fixed size
        remedy = report.engine_remedy or "a smaller rollout.engine.max_model_len, or more GPUs for each server"
        problems.append(f"rollout: an engine has no room for one sequence on GPUs of {memory}: {remedy}")
    if problems:
        raise ConfigError(problems)
    if not shared:
        return placement
    same_gpu = {server.gpus for server in placement.of("rollout")} == {placement.of("learner")[0].gpus}
    return replace(placement, sharing=share_memory(config, report, same_gpu=same_gpu))


# --- words ------------------------------------------------------------------------------------------------------------


def _count(given: int | Literal["auto"], *, auto: int) -> int:
    return auto if given == "auto" else given


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _describe(machine: Machine) -> str:
    cores = len(machine.cores)
    text = f"{cores} core{'' if cores == 1 else 's'} and {_gpus(len(machine.gpus))}"
    if not machine.gpus:
        return text
    return f"{text} ({machine.gpus[0].name}, {min(gpu.memory_bytes for gpu in machine.gpus) / 1e9:.0f} GB)"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3 and 6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] + 1 == number:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
