"""NCCL between GPUs, to SGLang: the version goes straight into the memory of its workers."""

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

from slipstream.buffer.wire.weights.protocol import tensor_buckets
from slipstream.configs.runtime.threads import Teardown
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.gloo import Meeting

BUCKETS_AT_ONCE = 2
ENDS_S = 5.0
"""For a group's end when the process ends: a moment, unless somebody hangs in it."""
NEVER = timedelta(days=1)
"""Our deadline comes first."""
ON_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""What a process group does that finds that a peer has died: by default it ends this process."""


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
        self._meeting = Meeting(config)
        self._group: Any = None
        self._sending: Future[None] = Future()
        self._teardown = Teardown()

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._meeting.begin()
        self._leave()
        store = self._meeting.gather(epoch, world)
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
            reason = "the transfer group was broken off"
        else:
            threading.Thread(target=_send, args=(sending, group, snapshot), name="nccl sends", daemon=True).start()
            try:
                sending.result(self._deadline_s)
                return
            except (CancelledError, TimeoutError):
                reason = f"broken off, or not done within {self._deadline_s:.0f} s (weights.deadline_s)"
            except (OSError, RuntimeError) as error:
                reason = str(error)
            self._leave()
        raise TransferError(f"version {snapshot.manifest.version} was not sent: {reason}")

    def abort(self) -> None:
        """Wakes whoever waits in `form` or `send`; the group is of no use any more."""
        self._meeting.abort()
        self._sending.cancel()
        self._leave()

    def close(self) -> None:
        """Leaves the group and stops listening."""
        self.abort()
        self._meeting.close()
        self._teardown.wait(ENDS_S)

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
