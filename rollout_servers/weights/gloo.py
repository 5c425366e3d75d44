"""A gloo transport for vLLM's weight-transfer calls, for engines on a CPU: received in the background, applied at once.

Named by `worker_extension_cls`, this module is imported inside every engine worker, where it registers the transport.
"""

import logging
import math
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from vllm.config.parallel import ParallelConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slipstream.buffer.wire.weights import TensorInfo, layout

# At every update it warns of layers that no tensor was loaded into: rotary embeddings, which have none, and a tied
# head, which gets the embedding's. We look for parameters without a tensor ourselves, and refuse them.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the transfer group of one epoch meets."""

    host: str
    port: int
    epoch: int
    rank_offset: int
    world_size: int
    deadline_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of one version, in the order in which they travel."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int


class BackgroundTask:
    """A function in a thread of its own, whose error is raised by whoever waits for it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, *arguments), daemon=True)
        self._thread.start()

    def _run(self, function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001  (raised again in wait)
            self._error = error

    @property
    def under_way(self) -> bool:
        """Whether the function has not returned yet."""
        return self._thread.is_alive()

    def wait(self, deadline_s: float, what: str) -> None:
        """Raises: TimeoutError naming `what`, or what the function raised."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{what} did not finish within {deadline_s:.0f} s")
        if self._error is not None:
            raise self._error


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The worker's side of the transfer: rank 0 of the group is the learner and broadcasts every tensor's bytes."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    # Reused for every version: memory that was touched before is an order of magnitude faster to write.
    _buffer = torch.empty(0, dtype=torch.uint8)
    _receiving: BackgroundTask | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Enters the group in the background: waiting for slower members must not stop this engine's generation."""
        self._deadline_s = init_info.deadline_s
        self._joining = BackgroundTask(self._join, init_info, self.parallel_config)

    def _join(self, init_info: GlooInitInfo, parallel: ParallelConfig) -> None:
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.deadline_s)
        store = TCPStore(init_info.host, init_info.port, None, False, timeout, wait_for_workers=False)
        prefixed = PrefixStore(f"epoch{init_info.epoch}", store)
        self._group: Any = ProcessGroupGloo(prefixed, rank, init_info.world_size, timeout)

    def stage(self, update_info: GlooUpdateInfo) -> None:
        """Starts to receive a version into host memory."""
        if self._receiving is not None and self._receiving.under_way:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # a transfer that broke off may still hold the old one
        self._receiving = BackgroundTask(self._receive, update_info)

    def _receive(self, update_info: GlooUpdateInfo) -> None:
        self._joining.wait(self._deadline_s, "entering the transfer group")
        tensors = [
            TensorInfo(name=name, dtype=dtype, shape=shape)
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        ]
        offsets, total = layout(tensors)
        if self._buffer.numel() != total:
            self._buffer = torch.empty(total, dtype=torch.uint8)
        buffer, group = self._buffer, self._group
        for start in range(0, total, update_info.bucket_bytes):
            group.broadcast(buffer[start : start + update_info.bucket_bytes], 0).wait()
        self._staged = [
            (tensor.name, _view(buffer, offset, tensor)) for tensor, offset in zip(tensors, offsets, strict=True)
        ]

    def start_weight_update(self) -> None:
        """Waits for the last bucket, then takes the model apart: from there on, the update must not fail any more.

        Checkpoint-format weights are loaded layer by layer, as vLLM's own transports do it.
        """
        if self._receiving is None:
            raise RuntimeError("no version was announced")
        self._receiving.wait(self._deadline_s, "receiving weights")
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the staged version; without the base class's device synchronisation, which a CPU doesn't have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Loads the staged tensors into the model. Raises: RuntimeError naming the parameters that none was for."""
        loaded: set[str] = self.model.load_weights(iter(self._staged))  # type: ignore[operator]
        tied = {"lm_head.weight"} if self.model_config.hf_text_config.tie_word_embeddings else set()
        missing = {name for name, _ in self.model.named_parameters()} - loaded - tied
        if missing:
            raise RuntimeError(f"no weights came for {', '.join(sorted(missing))}")

    def finish_weight_update(self) -> None:
        """Finishes the reload, and ties the head again: a prepacked head keeps the old weights otherwise."""
        finalize_layerwise_reload(self.model, self.model_config)
        head, embedding = getattr(self.model, "lm_head", None), _input_embedding(self.model)
        if self.model_config.hf_text_config.tie_word_embeddings and head is not None and embedding is not None:
            head.weight = embedding.weight
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Nothing to release: the group ends with the process, its sockets with the group."""


def _view(buffer: torch.Tensor, offset: int, tensor: TensorInfo) -> torch.Tensor:
    """The tensor that lies at `offset` of the byte buffer, without a copy."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    size = dtype.itemsize * math.prod(tensor.shape)
    return buffer[offset : offset + size].view(dtype).view(tensor.shape)


def _input_embedding(model: torch.nn.Module) -> torch.nn.Module | None:
    inner: Any = getattr(model, "model", None)
    return getattr(inner, "embed_tokens", None)


class GlooWorker:
    """Mixed into vLLM's worker: what the rollout server can call there beyond vLLM's own methods."""

    weight_transfer_engine: GlooWeightTransferEngine

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        """Starts to receive a version in the background."""
        self.weight_transfer_engine.stage(self.weight_transfer_engine.parse_update_info(update_info))


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
