"""Transports that broadcast: gloo between CPUs, NCCL into the GPU memory of vLLM's or SGLang's workers."""

import base64
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo

from slipstream.buffer.wire.weights.fabric import LEARNER, TEARDOWN_S, GlooFabric, TransferError
from slipstream.buffer.wire.weights.layout import tensor_buckets
from slipstream.configs.runtime.signals import heavy_imports
from slipstream.configs.runtime.threads import Teardown
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports import Broadcast, Rendezvous, SenderSettings
from slipstream.models.device_memory import beside

SENDER = "vllm.distributed.weight_transfer.nccl_common"
BUCKETS_AT_ONCE = 2
NEVER = timedelta(days=1)
"""Timeout of torch's process group: the transport's own deadline comes first."""
ON_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Reaction of torch's process group to a dead peer: by default it ends this process."""


class _OneStore(Broadcast, Protocol):
    """A transport that needs `weights` alone."""

    def __init__(self, config: WeightsConfig) -> None: ...

    @classmethod
    def build(cls, settings: SenderSettings) -> Self:
        """Listens at `weights.store_port`. Raises: ConfigError."""
        return cls(settings.weights)


class GlooTransport(_OneStore):
    """Broadcasts a snapshot in host memory, bucket by bucket."""

    name = "gloo"
    on_device = False

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._rendezvous = Rendezvous(config)
        self._fabric = GlooFabric()

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._rendezvous.begin()

        def connect(_: threading.Event) -> ProcessGroupGloo:
            store = self._rendezvous.gather(epoch, world)
            return ProcessGroupGloo(store, 0, world, timedelta(seconds=self._deadline_s))

        try:
            self._fabric.enter(connect)
        except RuntimeError as error:
            raise TransferError(f"the {world} of the transfer group could not connect to each other: {error}") from None

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's bytes, bucket by bucket."""
        try:
            for _ in self._fabric.broadcast(snapshot.data, snapshot.manifest.bucket_bytes, self._deadline_s):
                pass
        except RuntimeError as error:
            raise TransferError(f"version {snapshot.manifest.version} was not sent: {error}") from None

    def abort(self) -> None:
        """Ends a wait in `form` or `send`; the group is left."""
        self._rendezvous.abort()
        self._fabric.leave()

    def close(self) -> None:
        """Leaves the group and stops listening."""
        self.abort()
        self._rendezvous.close()
        self._fabric.close()


class NcclTransport(_OneStore):
    """The trainer's side of vLLM's packed NCCL broadcast; needs vllm on the learner's host.

    NCCL has no deadlines. So all ranks are gathered before any connects, or workers would wait for an absent one; a
    thread that is still connecting at the deadline is abandoned; and only `abort` ends a broadcast that hangs.
    """

    name = "nccl"
    on_device = True

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._bucket_bytes = config.bucket_bytes
        # Read here: the current device is per thread, and the threads that send have not set one.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        self._rendezvous = Rendezvous(config)
        self._connecting: Future[Any] = Future()
        self._group: Any = None

    @staticmethod
    def obstacle(run: str) -> str | None:
        """The reason why this process can't send so. Imports vLLM here: later, a process group would wait."""
        if (lack := _lack_of_gpu()) is not None:
            return lack
        try:
            with heavy_imports():
                import_module(SENDER)
        except ImportError as error:
            return f"it needs vLLM, whose packed format it uses, in the learner's environment too ({error}); use auto"
        return None

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._rendezvous.begin()
        self._leave()
        connecting: Future[Any] = Future()
        self._connecting = connecting
        store = self._rendezvous.gather(epoch, world, payload=_new_payload)
        unique_id = base64.b64decode(store.get(LEARNER))
        _start(connecting, lambda: communicator(unique_id, world, self._device), name="nccl connects")
        try:
            self._group = _result(connecting, self._deadline_s)
        except (OSError, RuntimeError) as error:
            raise TransferError(f"the {world} of the transfer group could not connect to each other: {error}") from None

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's tensors in vLLM's packed format."""
        group = self._group
        try:
            self._check(group)
            with torch.cuda.device(self._device):
                self._send(group, snapshot)
            self._check(group)  # a call that hung in NCCL when the group was aborted returns without an error
        except (OSError, RuntimeError) as error:
            raise TransferError(f"version {snapshot.manifest.version} was not sent: {error}") from None

    def _send(self, group: Any, snapshot: Snapshot) -> None:
        """Raises: RuntimeError, as NCCL's and CUDA's errors are."""
        snapshot.wait()
        from vllm.distributed.weight_transfer.packed_tensor import (
            DEFAULT_PACKED_NUM_BUFFERS,
            packed_nccl_broadcast_producer,
        )

        def checked(item: tuple[str, torch.Tensor]) -> torch.Tensor:
            self._check(group)  # no bucket may be sent through a communicator that is being freed
            return item[1]

        packed_nccl_broadcast_producer(
            iterator=iter(snapshot.named_tensors()),
            group=group,
            src=0,
            post_iter_func=checked,
            buffer_size_bytes=self._bucket_bytes,
            num_buffers=DEFAULT_PACKED_NUM_BUFFERS,
        )

    def _check(self, group: Any) -> None:
        """Raises: RuntimeError when `group` was aborted, or there is none."""
        if group is None or group is not self._group:
            raise RuntimeError("the transfer group was aborted")

    def abort(self) -> None:
        """Ends a wait in `form`, and destroys the communicator, which ends calls in it."""
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


def _lack_of_gpu() -> str | None:
    return None if torch.cuda.is_available() else "it needs a CUDA GPU, and this learner sees none; use auto, or gloo"


def _new_payload() -> str:
    """The unique id, for all ranks. Made after they are gathered: NCCL then listens until all have connected.

    Raises: TransferError.
    """
    try:
        return base64.b64encode(new_id()).decode()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise TransferError(f"NCCL can't be used here: {error}") from None


def new_id() -> bytes:
    """NCCL's unique id of a new communicator.

    Raises: ImportError, OSError, RuntimeError, ValueError where vLLM finds no NCCL for its platform.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def communicator(unique_id: bytes, world: int, device: int) -> Any:
    """Communicator of rank 0; returns once all ranks have connected. Raises: OSError, RuntimeError."""
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    return uid_init_process_group(unique_id, 0, world, device)


def _start(outcome: "Future[Any]", call: Callable[[], Any], *, name: str) -> None:
    """Runs a call that nothing can end in a thread. A communicator that comes after `_result` gave up is freed."""

    def run() -> None:
        try:
            result = call()
        except (OSError, RuntimeError) as error:
            with suppress(InvalidStateError):
                outcome.set_exception(error)
            return
        try:
            outcome.set_result(result)
        except InvalidStateError:
            if result is not None:
                result.destroy()

    threading.Thread(target=run, name=name, daemon=True).start()


def _result(outcome: "Future[Any]", deadline_s: float) -> Any:
    """The result of a call that `_start` runs. Raises: RuntimeError when it was aborted or is late, OSError."""
    try:
        with suppress(TimeoutError):
            return outcome.result(deadline_s)
        outcome.cancel()  # without effect if it has just finished
        return outcome.result()
    except CancelledError:
        raise RuntimeError(f"aborted, or not done within {deadline_s:.0f} s (weights.deadline_s)") from None


class SglangTransport(_OneStore):
    """Rank 0 of torch's process group as SGLang makes it (`init_custom_process_group`), and the sender of its
    "flattened buckets": whole tensors, one after the other without gaps.

    NCCL has no deadlines and connects with the first bucket. So a thread sends, which is abandoned at the deadline.
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

    @staticmethod
    def obstacle(run: str) -> str | None:
        """The reason why this process can't send so, with a remedy; None if it can."""
        return _lack_of_gpu()

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._rendezvous.begin()
        self._leave()
        store = self._rendezvous.gather(epoch, world)
        try:
            # SGLang puts the group's name before its keys twice.
            self._group = process_group(PrefixStore(f"epoch{epoch}/", store), world)
        except RuntimeError as error:
            raise TransferError(f"the {world} of the transfer group could not connect to each other: {error}") from None

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's tensors in SGLang's packed format."""
        self._sending = sending = Future[None]()
        group = self._group
        try:
            if group is None:
                raise RuntimeError("the transfer group was aborted")
            _start(sending, lambda: _send(group, snapshot), name="nccl sends")
            _result(sending, self._deadline_s)
        except (OSError, RuntimeError) as error:
            self._leave()
            raise TransferError(f"version {snapshot.manifest.version} was not sent: {error}") from None

    def abort(self) -> None:
        """Ends a wait in `form` or `send`; the group can't be used any more."""
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
            self._teardown.start(group.abort)  # in a thread: it may wait for broadcasts in flight


def process_group(store: PrefixStore, world: int) -> Any:
    """Rank 0 of a group with the same keys and backend prefix as torch's own helper uses. Raises: RuntimeError."""
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = NEVER
    before = os.environ.get(ON_ERRORS)
    os.environ[ON_ERRORS] = "0"  # read when the group is made
    try:
        return ProcessGroupNCCL(PrefixStore("cuda/", store), 0, world, options)
    finally:
        del os.environ[ON_ERRORS]
        if before is not None:
            os.environ[ON_ERRORS] = before


def _send(group: Any, snapshot: Snapshot) -> None:
    """Raises: RuntimeError, as NCCL's and CUDA's errors are."""
    snapshot.wait()
    tensors = iter(snapshot.named_tensors())
    inflight: deque[tuple[Any, Tensor]] = deque()
    with beside(snapshot.data.device):  # in training's stream, steps would wait for the broadcast
        for bucket in tensor_buckets(snapshot.manifest.tensors, snapshot.manifest.bucket_bytes):
            packed = torch.cat([next(tensors)[1].flatten().view(torch.uint8) for _ in bucket])
            if len(inflight) == BUCKETS_AT_ONCE:
                _finish(*inflight.popleft())
            inflight.append((group.broadcast(packed, 0), packed))
        for work, packed in inflight:
            _finish(work, packed)


def _finish(work: Any, packed: Tensor) -> None:
    """Waits until a bucket is sent; on a GPU, `wait` alone only makes the stream wait."""
    work.wait()
    if packed.is_cuda:
        torch.cuda.current_stream(packed.device).synchronize()
