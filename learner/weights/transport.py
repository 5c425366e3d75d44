"""How the bytes of a version reach the engines: gloo between CPUs, NCCL between GPUs."""

import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.configs.errors import ConfigError
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot


class WeightTransport(Protocol):
    """The data plane. Both calls block, and raise RuntimeError when a member is missing or dies."""

    name: str

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`; returns when all members are in."""
        ...

    def send(self, snapshot: Snapshot) -> None:
        """Sends a version to all members of the group."""
        ...


class GlooTransport:
    """Broadcasts buckets of host memory."""

    name = "gloo"

    def __init__(self, config: WeightsConfig) -> None:
        self._timeout = timedelta(seconds=config.deadline_s)
        # A socket of our own: the store would listen on every interface otherwise.
        try:
            listener = socket.create_server((config.bind, config.store_port), backlog=1024)
        except OSError as error:
            raise ConfigError(
                f"can't listen on {config.bind}:{config.store_port} (weights.bind, weights.store_port): "
                f"{error.strerror}"
            ) from None
        self._store = TCPStore(
            config.bind,
            config.store_port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group: Any = None

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._group = ProcessGroupGloo(PrefixStore(f"epoch{epoch}", self._store), 0, world, self._timeout)

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's bytes, bucket by bucket."""
        assert self._group is not None, "send() before form()"
        size = snapshot.manifest.bucket_bytes
        for start in range(0, snapshot.data.numel(), size):
            self._group.broadcast(snapshot.data[start : start + size], 0).wait()


class NcclTransport:
    """The trainer's side of vLLM's packed NCCL broadcast; needs vllm on the learner's host."""

    name = "nccl"

    def __init__(self, config: WeightsConfig) -> None:
        self._host, self._port = config.host, config.store_port
        self._bucket_bytes = config.bucket_bytes
        self._group: Any = None

    def form(self, epoch: int, world: int) -> None:
        """Enters the group as rank 0 of `world`; each epoch meets anew at the same port."""
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        if self._group is not None:
            self._group.destroy()
        self._group = stateless_init_process_group(self._host, self._port, 0, world, torch.cuda.current_device())

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's tensors in vLLM's packed format."""
        from vllm.distributed.weight_transfer.packed_tensor import (
            DEFAULT_PACKED_NUM_BUFFERS,
            packed_nccl_broadcast_producer,
        )

        packed_nccl_broadcast_producer(
            iterator=iter(snapshot.named_tensors()),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self._bucket_bytes,
            num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
        )


def build_transport(config: WeightsConfig) -> WeightTransport:
    """The configured transport; `auto` is NCCL where this host has a GPU."""
    name = config.transport
    if name == "auto":
        name = "nccl" if torch.cuda.is_available() else "gloo"
    return NcclTransport(config) if name == "nccl" else GlooTransport(config)
