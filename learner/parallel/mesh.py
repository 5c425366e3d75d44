"""The learner's own process group: alone, or one rank of a torchrun job."""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

COLLECTIVE_S = 1800.0
"""How long a collective waits for a rank that runs, but is not there: gloo's default. NCCL's is a third of it, which
rank 0 may need for a slow disk."""
HEAR_S = 1.0
LONGEST_PAUSE_S = 0.05
"""Between two looks into the store: hundreds of ranks may look."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the learner's ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store
    """Key-value store that all ranks share."""

    @property
    def is_root(self) -> bool:
        """Whether this rank talks to the buffer, the rollout servers and the trackers."""
        return self.rank == 0

    def hear(self, key: str) -> str | None:
        """What rank 0 has put into the store under `key`; None if nothing comes for `HEAR_S`."""
        until, pause_s = time.monotonic() + HEAR_S, 0.001
        while not self.store.check([key]):  # its wait() prints two warnings each time that it runs out
            if time.monotonic() > until:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return self.store.get(key).decode()

    def barrier(self) -> None:
        """Returns once all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def from_root(self, value: T) -> T:
        """Rank 0's value, on all ranks; what the others give does not matter."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on all ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


def join_world(*, root_waits_s: float = 0.0) -> World:
    """Enters the process group that torchrun describes in the environment, or one of a single process.

    Args:
        root_waits_s: how long rank 0 may wait for others, such as a buffer that is away, while the ranks wait for it.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://"))
    else:
        store, rank, size = dist.HashStore(), 0, 1
    timeout = timedelta(seconds=COLLECTIVE_S + root_waits_s)
    own_store = dist.PrefixStore("learner", store)
    dist.init_process_group(backend, store=own_store, rank=rank, world_size=size, timeout=timeout)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
    return World(rank, size, device, mesh, dist.PrefixStore("feed", store))


def leave_world() -> None:
    """Leaves the process group."""
    dist.destroy_process_group()
