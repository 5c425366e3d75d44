"""NCCL between GPUs: the version goes straight into the memory of vLLM's workers."""

import base64
import threading
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any

import torch

from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.gloo import HERE, Meeting


class NcclTransport:
    """The trainer's side of vLLM's packed NCCL broadcast; needs vllm on the learner's host.

    All meet first, so that nobody's workers wait for who never comes. NCCL itself knows no deadline: a thread that is
    still connecting then is left behind, and a broadcast is woken by `abort` alone.
    """

    name = "nccl"
    on_device = True

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._bucket_bytes = config.bucket_bytes
        # Asked here: the current device is the thread's, and those that send have not chosen one.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        self._meeting = Meeting(config)
        self._connecting: Future[Any] = Future()
        self._group: Any = None

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._meeting.begin()
        self._leave()
        connecting: Future[Any] = Future()
        self._connecting = connecting
        store = self._meeting.gather(epoch, world, word=_new_word)
        unique_id = base64.b64decode(store.get(HERE))
        arguments = (connecting, unique_id, world, self._device)
        threading.Thread(target=_connect, args=arguments, name="nccl connects", daemon=True).start()
        self._group = self._connected(connecting, world)

    def _connected(self, connecting: "Future[Any]", world: int) -> Any:
        """Raises: TransferError."""
        try:
            with suppress(TimeoutError):
                return connecting.result(self._deadline_s)
            connecting.cancel()  # in vain where it is done by now
            return connecting.result()
        except CancelledError:
            reason = f"broken off, or not done within {self._deadline_s:.0f} s (weights.deadline_s)"
        except (OSError, RuntimeError) as error:
            reason = str(error)
        raise TransferError(f"the {world} of the transfer group could not connect to each other: {reason}")

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's tensors in vLLM's packed format."""
        group = self._group
        try:
            self._check(group)
            with torch.cuda.device(self._device):
                self._send(group, snapshot)
            self._check(group)  # what hung in NCCL when it was broken off came back without a word
        except (OSError, RuntimeError) as error:
            raise TransferError(f"version {snapshot.manifest.version} was not sent: {error}") from None

    def _send(self, group: Any, snapshot: Snapshot) -> None:
        """Raises: RuntimeError, as NCCL's and CUDA's errors are."""
        from vllm.distributed.weight_transfer.packed_tensor import (
            DEFAULT_PACKED_NUM_BUFFERS,
            packed_nccl_broadcast_producer,
        )

        def unbroken(item: tuple[str, torch.Tensor]) -> torch.Tensor:
            self._check(group)  # a communicator that is being freed must not be asked for the next bucket
            return item[1]

        packed_nccl_broadcast_producer(
            iterator=iter(snapshot.named_tensors()),
            group=group,
            src=0,
            post_iter_func=unbroken,
            buffer_size_bytes=self._bucket_bytes,
            num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
        )

    def _check(self, group: Any) -> None:
        """Raises: RuntimeError when `group` was broken off, or there is none."""
        if group is None or group is not self._group:
            raise RuntimeError("the transfer group was broken off")

    def abort(self) -> None:
        """Wakes whoever waits in `form`, and destroys the communicator under what waits in it."""
        self._meeting.abort()
        self._connecting.cancel()
        self._leave()

    def close(self) -> None:
        """Leaves the group and stops listening."""
        self.abort()
        self._meeting.close()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.destroy()


def _new_word() -> str:
    """Made once all are there: NCCL listens for them from then on, until the last has come. Raises: TransferError."""
    try:
        return base64.b64encode(new_id()).decode()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise TransferError(f"NCCL can't be used here: {error}") from None


def new_id() -> bytes:
    """What the members of one group know each other by.

    Raises: ImportError, OSError, RuntimeError, ValueError where vLLM finds no NCCL for its platform.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def communicator(unique_id: bytes, world: int, device: int) -> Any:
    """Rank 0 of a group, when all others of it are there too. Raises: OSError, RuntimeError."""
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    return uid_init_process_group(unique_id, 0, world, device)


def _connect(connecting: "Future[Any]", unique_id: bytes, world: int, device: int) -> None:
    try:
        group = communicator(unique_id, world, device)
    except (OSError, RuntimeError) as error:
        with suppress(InvalidStateError):
            connecting.set_exception(error)
        return
    try:
        connecting.set_result(group)
    except InvalidStateError:  # it was given up meanwhile
        group.destroy()
