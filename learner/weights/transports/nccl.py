"""NCCL between GPUs: the version goes straight into the memory of vLLM's workers."""

from typing import Any

import torch

from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError


class NcclTransport:
    """The trainer's side of vLLM's packed NCCL broadcast; needs vllm on the learner's host.

    NCCL knows no deadline here: what blocks is woken by `abort` alone.
    """

    name = "nccl"
    on_device = True

    def __init__(self, config: WeightsConfig) -> None:
        self._host, self._port = config.host, config.store_port
        self._bucket_bytes = config.bucket_bytes
        self._group: Any = None

    def form(self, epoch: int, world: int) -> None:
        """Enters the group as rank 0 of `world`; each epoch meets anew at the same port."""
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        del epoch
        self.close()
        try:
            self._group = stateless_init_process_group(self._host, self._port, 0, world, torch.cuda.current_device())
        except RuntimeError as error:
            raise TransferError(f"the transfer group of {world} at {self._host}:{self._port}: {error}") from None

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's tensors in vLLM's packed format."""
        from vllm.distributed.weight_transfer.packed_tensor import (
            DEFAULT_PACKED_NUM_BUFFERS,
            packed_nccl_broadcast_producer,
        )

        try:
            packed_nccl_broadcast_producer(
                iterator=iter(snapshot.named_tensors()),
                group=self._group,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=self._bucket_bytes,
                num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
            )
        except RuntimeError as error:
            raise TransferError(f"version {snapshot.manifest.version} was not sent: {error}") from None

    def abort(self) -> None:
        """Destroys the communicator under what waits in it."""
        self.close()

    def close(self) -> None:
        """Leaves the group."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()
