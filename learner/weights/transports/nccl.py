"""NCCL between GPUs: the version goes straight into the memory of the workers of vLLM or SGLang."""

import base64
import os
import threading
from collections import deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from slipstream.buffer.wire.weights.fabric import LEARNER, TEARDOWN_S
from slipstream.buffer.wire.weights.layout import tensor_buckets
from slipstream.configs.runtime.threads import Teardown
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.rendezvous import Rendezvous

BUCKETS_AT_ONCE = 2
NEVER = timedelta(days=1)
"""Our deadline comes first."""
ON_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What a process group does that finds that a peer has died: by default it ends this process."""


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
        self._rendezvous = Rendezvous(config)
        self._connecting: Future[Any] = Future()
        self._group: Any = None

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._rendezvous.begin()
        self._leave()
        connecting: Future[Any] = Future()
        self._connecting = connecting
        store = self._rendezvous.gather(epoch, world, payload=_new_payload)
        unique_id = base64.b64decode(store.get(LEARNER))
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
            reason = f"aborted, or not done within {self._deadline_s:.0f} s (weights.deadline_s)"
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
        """Raises: RuntimeError when `group` was aborted, or there is none."""
        if group is None or group is not self._group:
            raise RuntimeError("the transfer group was aborted")

    def abort(self) -> None:
        """Wakes whoever waits in `form`, and destroys the communicator under what waits in it."""
        self._rendezvous.abort()
        self._connecting.cancel()
        self._leave()

    def close(self) -> None:
        """Leaves the group and stops listening."""
        self.abort()
        self._rendezvous.close()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.destroy()


def _new_payload() -> str:
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


class SglangTransport:
    """Rank 0 of a process group of torch's, as SGLang makes it (`init_custom_process_group`), and the sender of its
    "flattened buckets": whole tensors, one after the other without gaps.

    NCCL knows no deadline, and connects only when the first bucket is sent: that happens in a thread, which is left
    behind when it takes too long.
    """

    name = "nccl_sglang"
    on_device = True

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._rendezvous = Rendezvous(config)
        self._group: Any = None
        self._sending: Future[None] = Future()
        self._teardown = Teardown()

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._rendezvous.begin()
        self._leave()
        store = self._rendezvous.gather(epoch, world)
        try:
            # The name of the group stands in the keys of its members twice.
            self._group = process_group(PrefixStore(f"epoch{epoch}/", store), world)
        except RuntimeError as error:
            raise TransferError(f"the {world} of the transfer group could not connect to each other: {error}") from None

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's tensors in SGLang's packed format."""
        self._sending = sending = Future[None]()
        group = self._group
        if group is None:
            reason = "the transfer group was aborted"
        else:
            threading.Thread(target=_send, args=(sending, group, snapshot), name="nccl sends", daemon=True).start()
            try:
                sending.result(self._deadline_s)
                return
            except (CancelledError, TimeoutError):
                reason = f"aborted, or not done within {self._deadline_s:.0f} s (weights.deadline_s)"
            except (OSError, RuntimeError) as error:
                reason = str(error)
            self._leave()
        raise TransferError(f"version {snapshot.manifest.version} was not sent: {reason}")

    def abort(self) -> None:
        """Wakes whoever waits in `form` or `send`; the group is of no use any more."""
        self._rendezvous.abort()
        self._sending.cancel()
        self._leave()

    def close(self) -> None:
        """Leaves the group and stops listening."""
        self.abort()
        self._rendezvous.close()
        self._teardown.wait(TEARDOWN_S)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._teardown.start(group.abort)  # not here: it may wait for what is under way


def process_group(store: PrefixStore, world: int) -> Any:
    """Rank 0 of a group whose members find each other as torch's own helper lets them. Raises: RuntimeError."""
    from torch.distributed import ProcessGroupNCCL  # not in builds for a CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = NEVER
    before = os.environ.get(ON_ERRORS)
    os.environ[ON_ERRORS] = "0"  # read as the group is made
    try:
        return ProcessGroupNCCL(PrefixStore("cuda/", store), 0, world, options)
    finally:
        del os.environ[ON_ERRORS]
        if before is not None:
            os.environ[ON_ERRORS] = before


def _send(sending: "Future[None]", group: Any, snapshot: Snapshot) -> None:
    device = snapshot.data.device
    try:
        with _stream(device):
            _broadcast(group, snapshot)
    except (OSError, RuntimeError) as error:
        with suppress(InvalidStateError):
            sending.set_exception(error)
        return
    with suppress(InvalidStateError):  # it was given up meanwhile
        sending.set_result(None)


def _stream(device: torch.device) -> AbstractContextManager[Any]:
    """Another one than training's: steps would wait for it."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _broadcast(group: Any, snapshot: Snapshot) -> None:
    """Raises: RuntimeError, as NCCL's and CUDA's errors are."""
    tensors = iter(snapshot.named_tensors())
    under_way: deque[tuple[Any, Tensor]] = deque()
    for bucket in tensor_buckets(snapshot.manifest.tensors, snapshot.manifest.bucket_bytes):
        packed = torch.cat([next(tensors)[1].flatten().view(torch.uint8) for _ in bucket])
        if len(under_way) == BUCKETS_AT_ONCE:
            _finish(*under_way.popleft())
        under_way.append((group.broadcast(packed, 0), packed))
    for work, packed in under_way:
        _finish(work, packed)


def _finish(work: Any, packed: Tensor) -> None:
    """Returns once a bucket has left; on a GPU `wait` alone only makes the stream wait."""
    work.wait()
    if packed.is_cuda:
        torch.cuda.current_stream(packed.device).synchronize()
