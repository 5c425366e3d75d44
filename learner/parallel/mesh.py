"""The learner's ranks: their process group, its device mesh with named axes, and small exchanges between ranks."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.learner import ParallelConfig
from slipstream.models.architecture import expert_count

COLLECTIVE_S = 1800.0
"""Timeout of a collective for a rank that has not entered it: gloo's default. NCCL's is a third of it, and rank 0 may
need longer for a slow disk."""
STORE_WAIT_S = 1.0
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers in which only attention mixes tokens."""
LONGEST_POLL_S = 0.05
"""Longest pause between two reads of the store, which hundreds of ranks may read."""

SHARDED = ParallelConfig()
"""All ranks share one copy of the model."""

EP, EXPERT_SHARD = "ep", "expert_shard"
"""Axes of the mesh of the experts."""

Plain = bool | int | float | str | bytes | list[Any] | dict[str, Any] | None
T = TypeVar("T", bound=Plain)
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Ranks along each axis of the mesh, outermost first; all but `ep` multiply to the number of ranks."""

    dp_replicate: int = 1
    """Copies of the model."""
    dp_shard: int = 1
    """Shards of a copy (FSDP)."""
    cp: int = 1
    """Context parallelism: parts of a sequence."""
    tp: int = 1
    """Tensor parallelism: parts of a matrix."""
    ep: int = 1
    """Expert parallelism: parts of a layer's experts, within the ranks of a copy."""

    @classmethod
    def of(cls, parallel: ParallelConfig, *, ranks: int) -> "MeshSizes":
        """The configured sizes for so many ranks.

        Raises: ConfigError when they do not multiply to the number of ranks.
        """
        others = parallel.dp_replicate * parallel.cp * parallel.tp
        fixed = {name: value for name, value in parallel if name != "dp_shard"}
        sizes = cls(**fixed, dp_shard=max(1, ranks // others) if parallel.dp_shard is None else parallel.dp_shard)
        if sizes.dp_shard * others != ranks:
            raise ConfigError(
                f"learner.parallel: dp_replicate={sizes.dp_replicate} x dp_shard={sizes.dp_shard} x cp={sizes.cp} x "
                f"tp={sizes.tp} must be the number of learner ranks, {ranks}: change the sizes, or the number that "
                "torchrun starts"
            )
        return sizes


def refuse(sizes: MeshSizes, model: Any, *, adapters: bool = False) -> None:
    """Refuses meshes on which a model can't be trained.

    Args:
        model: its configuration, of transformers.
        adapters: `model.lora` is set.

    Raises: ConfigError, with the reasons.
    """
    text = model.get_text_config(decoder=True)
    copy = sizes.dp_shard * sizes.cp * sizes.tp
    heads, key_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    experts = expert_count(text)
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION)
    rules = (
        (sizes.cp > 1 and heads % (sizes.cp * sizes.tp), f"cp x tp must divide the {heads} attention heads"),
        (sizes.cp > 1 and kinds, f"cp must be 1, because layers of the kinds {kinds} need whole sequences"),
        (sizes.cp > 1 and text is not model, "cp must be 1, because images have places in whole sequences"),
        (sizes.tp > 1 and (heads % sizes.tp or key_heads % sizes.tp), f"tp must divide the {key_heads} key heads"),
        (sizes.tp > 1 and experts and sizes.ep == 1, "ep must be a multiple of tp, which does not split experts"),
        (adapters and max(sizes.tp, sizes.ep) > 1, "tp and ep must be 1 with model.lora, whose layers have no plan"),
        (sizes.ep > 1 and not experts, "ep must be 1, because the model has no experts"),
        (sizes.ep > 1 and experts % sizes.ep, f"ep must divide the {experts} experts of a layer"),
        (sizes.ep > 1 and copy % sizes.ep, f"ep must divide dp_shard x cp x tp = {copy}"),
        (sizes.ep > 1 and sizes.ep % sizes.tp, "ep must be a multiple of tp, whose ranks have the same tokens"),
    )
    problems = [reason for refused, reason in rules if refused]
    if problems:
        given = ", ".join(f"{name}={size}" for name, size in asdict(sizes).items() if size > 1)
        raise ConfigError([f"learner.parallel ({given}) for {text.model_type}: {problem}" for problem in problems])


def build_mesh(device_type: str, sizes: MeshSizes) -> DeviceMesh:
    """The device mesh of all ranks, with the axis `dp_shard` and all that are larger than 1, except `ep`.

    Axes of size 1 are left out: torch would create a process group per rank for each, one after the other.
    """
    axes = {name: size for name, size in asdict(sizes).items() if name == "dp_shard" or (size > 1 and name != "ep")}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def build_expert_mesh(device_type: str, sizes: MeshSizes) -> DeviceMesh | None:
    """The mesh of a layer's experts: split over `ep`, and each part sharded over `expert_shard`.

    None: experts are no different from other parameters.
    """
    if sizes.ep == 1:
        return None
    shards = sizes.dp_shard * sizes.cp * sizes.tp // sizes.ep
    axes = {"dp_replicate": sizes.dp_replicate} if sizes.dp_replicate > 1 else {}
    axes |= {EXPERT_SHARD: shards, EP: sizes.ep}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


@dataclass(frozen=True)
class World:
    """This process among the learner's ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store
    """Key-value store that all ranks share."""
    sizes: MeshSizes
    """Sizes of the mesh's axes."""
    expert_mesh: DeviceMesh | None = None
    """The same ranks with the axis `ep`, if it is larger than 1."""

    @property
    def data_size(self) -> int:
        """Number of ranks that receive different rows of a step: the ranks along `cp` and `tp` receive the same.

        A loss is multiplied by it, because FSDP averages gradients over these ranks.
        """
        return self.sizes.dp_replicate * self.sizes.dp_shard

    @property
    def data_rank(self) -> int:
        """Index of this rank's rows among the `data_size` parts of a step."""
        return self.rank * self.data_size // self.size

    @property
    def is_root(self) -> bool:
        """True on the rank that is connected to the buffer, the rollout servers and the trackers."""
        return self.rank == 0

    def read_store(self, key: str) -> str | None:
        """The store's value of `key`; None if it is not set within STORE_WAIT_S."""
        until, pause_s = time.monotonic() + STORE_WAIT_S, 0.001
        while not self.store.check([key]):  # its wait() prints two warnings at each timeout
            if time.monotonic() > until:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        return self.store.get(key).decode()

    def barrier(self) -> None:
        """Returns once all ranks have entered it."""
        if self.size > 1:
            dist.barrier()

    # Exchanged as msgpack: torch's object collectives unpickle, so any rank could run code on the others.

    def from_root(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        if self.size == 1:
            return value
        frame = _packed(value if self.is_root else None)
        size = torch.tensor(len(frame))
        dist.broadcast(size, src=0)
        received = frame if self.is_root else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(received, src=0)
        sent: T = _unpacked(received)
        return sent

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on all ranks."""
        if self.size == 1:
            return [value]
        frame = _packed(value)
        sizes = [torch.empty((), dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor(len(frame)))
        longest = int(max(sizes))
        frames = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(frames, F.pad(frame, (0, longest - len(frame))))
        return [_unpacked(received[: int(size)]) for received, size in zip(frames, sizes, strict=True)]

    def on_all_ranks(self, call: Callable[[], V]) -> V:
        """The result of a call; a collective. Raises: ConfigError, on all ranks, when it is raised on one."""
        results: list[V] = []
        problems: list[str] = []
        try:
            results.append(call())
        except ConfigError as error:
            problems = list(error.problems)
        of_ranks = self.gather(problems)
        failed = [rank for rank, found in enumerate(of_ranks) if found]
        if failed:
            where = "" if len(failed) == self.size else f" (learner rank {failed[0]})"
            raise ConfigError([f"{problem}{where}" for problem in of_ranks[failed[0]]])
        return results[0]

    def largest(self, value: int) -> int:
        """The largest value of all ranks."""
        largest = torch.tensor(value)
        if self.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that receive different rows, in place; a collective of all ranks."""
        if self.data_size == 1:
            return values
        if self.data_size < self.size and self.rank != self.data_rank * self.size // self.data_size:
            values.zero_()  # the first rank with the same rows counts them
        return self.sum_of_all(values)

    def sum_of_all(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; a collective."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


def _packed(value: Plain) -> torch.Tensor:
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)


def _unpacked(frame: torch.Tensor) -> Any:
    return msgspec.msgpack.decode(frame.numpy().data)


def join_world(parallel: ParallelConfig = SHARDED, *, root_waits_s: float = 0.0) -> World:
    """Joins the process group that torchrun describes in the environment, or one of a single process.

    Args:
        parallel: sizes of the mesh.
        root_waits_s: longest wait of rank 0 for other processes, such as the buffer; the ranks wait for rank 0 then.

    Raises: ConfigError when the sizes do not fit the number of ranks, or rank 0 can't listen at its address.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ:
        store, rank, size = _shared_store()
    else:
        store, rank, size = dist.HashStore(), 0, 1
    sizes = MeshSizes.of(parallel, ranks=size)
    timeout = timedelta(seconds=COLLECTIVE_S + root_waits_s)
    own_store = dist.PrefixStore("learner", store)
    dist.init_process_group(backend, store=own_store, rank=rank, world_size=size, timeout=timeout)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    mesh, experts = build_mesh(device_type, sizes), build_expert_mesh(device_type, sizes)
    return World(rank, size, device, mesh, dist.PrefixStore("feed", store), sizes, experts)


def _shared_store() -> tuple[dist.Store, int, int]:
    """The store of the ranks that the environment describes, this rank, and their number.

    Raises: ConfigError when rank 0 can't listen at MASTER_ADDR:MASTER_PORT.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or rank > 0:
        joined: tuple[dist.Store, int, int] = next(dist.rendezvous("env://"))  # of torchrun's store, or of rank 0's
        return joined
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A socket of our own: the store would listen on every interface, and it has no authentication.
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"learner rank 0 can't listen on {host}:{port}: {error.strerror}; set MASTER_ADDR to an address of its "
            "host, and MASTER_PORT to a free port"
        ) from None
    store = dist.TCPStore(host, port, size, is_master=True, master_listen_fd=listener.detach())
    return store, rank, size


def leave_world() -> None:
    """Leaves the process group."""
    dist.destroy_process_group()
