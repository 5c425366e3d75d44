"""vLLM's transfer of weights over NCCL with gloo in NCCL's place: all the rest of it runs without a GPU."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

ID_BYTES = 128
CONNECTS_S = timedelta(seconds=120)


class Communicator:
    """Does what NCCL's does, and as little for who waits in it: only its own end wakes it.

    Attributes:
        buckets: how many it was asked to send or receive.
        hangs_at: the one that never leaves, which the others wait for.
    """

    def __init__(self, unique_id: bytes, rank: int, world: int) -> None:
        store = TCPStore("127.0.0.1", int(unique_id.rstrip(b"\0")), None, False, CONNECTS_S, wait_for_workers=False)
        self._group: Any = ProcessGroupGloo(PrefixStore("nccl", store), rank, world, CONNECTS_S)
        self._destroyed = threading.Event()
        self.buckets = 0
        self.hangs_at: int | None = None

    def broadcast(self, bucket: Tensor, src: int) -> None:
        """Waits for it: there are no streams here."""
        if self.buckets == self.hangs_at:
            self._destroyed.wait()
            return
        self._group.broadcast(bucket, src).wait()
        self.buckets += 1

    def destroy(self) -> None:
        """Wakes this rank's thread, and nobody else's."""
        self._destroyed.set()


class Communicators:
    """Makes those of the learner, and the ids by which the members of a group find each other."""

    def __init__(self) -> None:
        self._stores: list[TCPStore] = []
        self.made: list[Communicator] = []

    def new_id(self) -> bytes:
        """Another one."""
        self._stores.append(TCPStore("127.0.0.1", 0, None, True, CONNECTS_S, wait_for_workers=False))
        return str(self._stores[-1].port).encode().ljust(ID_BYTES, b"\0")

    def of_rank_0(self, unique_id: bytes, world: int, device: int) -> Communicator:
        """The learner's of one group."""
        self.made.append(Communicator(unique_id, 0, world))
        return self.made[-1]


def put_in_nccls_place(patch: Callable[[Any, str, Any], None]) -> None:
    """`patch` sets an attribute, as `setattr` does."""
    # Imported here: vLLM reads its environment at import.
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer import packed_tensor

    def of_worker(unique_id: bytes, *, rank: int, world_size: int, device: int) -> Communicator:
        return Communicator(unique_id, rank, world_size)

    patch(PyNcclCommunicator, "from_unique_id_bytes", of_worker)
    patch(packed_tensor, "_get_streams", lambda *_: (SimpleNamespace(synchronize=lambda: None),) * 2)
    patch(torch.cuda, "stream", lambda _: nullcontext())
    patch(torch.accelerator, "current_device_index", lambda: 0)
    patch(torch.accelerator, "synchronize", lambda: None)
