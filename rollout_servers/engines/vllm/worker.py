"""Mixed into every vLLM worker (`worker_extension_cls`): takes staged weights over, layer by layer."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.utils import PPMissingLayer

from slipstream.buffer.wire.weights.layout import layout, named_tensors
from slipstream.buffer.wire.weights.protocol import TensorInfo
from slipstream.rollout_servers.engines.vllm.core import end_with_server, end_without_collecting
from slipstream.rollout_servers.engines.vllm.transfer import BACKEND, CompleteNccl, check_complete, is_tied

# At every update it warns of layers that no tensor was loaded into: rotary embeddings, which have none, and a tied
# head, which gets the embedding's. We look for parameters without a tensor ourselves, and refuse them.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# vLLM's attention on a CPU computes with AMX, which Linux allows a process only when it has asked: without that it is
# killed (SIGILL), unless oneDNN has happened to ask before.
torch.cpu._init_amx()

WeightTransferEngineFactory.register_engine(BACKEND, CompleteNccl)

end_with_server()
end_without_collecting()


class StagedWorker:
    """What a rollout server calls in the workers, by `collective_rpc`: `map_staged` or `stage`, then `load_staged`.

    Every worker of a tensor-parallel engine is given whole tensors; the model's own loaders take their shards.
    """

    vllm_config: Any
    model_runner: Any
    _staged: list[tuple[str, Tensor]]
    _mapped: tuple[str, Tensor] = ("", torch.empty(0, dtype=torch.uint8))

    def map_staged(self, path: str, tensors: list[dict[str, Any]]) -> str | None:
        """Looks at tensors in a file in shared memory, without a copy; they are `TensorInfo`s as plain dicts.

        The model is not touched. Returns: what is wrong with the file, None if nothing is. That is no exception: vLLM
        reads the workers' answers up to the first error, and takes those that are left for answers to the next call.
        """
        self._staged = []
        infos = msgspec.convert(tensors, list[TensorInfo])
        _, size = layout(infos)
        # Asked first: torch creates a file that is missing and lengthens one that is too short.
        try:
            found = Path(path).stat().st_size
        except OSError as error:
            return str(error)
        if found < size:
            return f"{path} has {found} bytes, not {size}"
        if (self._mapped[0], self._mapped[1].numel()) != (path, size):
            self._mapped = (path, torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
        self.stage(list(named_tensors(self._mapped[1], infos, torch)))
        return None

    def stage(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Takes note of tensors in this process's own memory. The model is not touched."""
        self._staged = tensors

    def load_staged(self) -> None:
        """Loads what was staged into the model, which is in pieces meanwhile: from here on, nothing may fail.

        Raises: RuntimeError naming the parameters that no tensor came for.
        """
        model: Any = self.model_runner.get_model()
        tied = is_tied(self.vllm_config)
        with set_current_vllm_config(self.vllm_config):
            if not torch.accelerator.is_available():
                forget_expert_kernels(model)
            initialize_layerwise_reload(model)
            check_complete(model, model.load_weights(iter(self._staged)), tied=tied)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if tied:
                tie_head(model)
        self._staged = []
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the copies must be done before the server reuses its staging memory


def forget_expert_kernels(model: nn.Module) -> None:
    """Has vLLM prepack experts again: on a CPU it does that only as it sets up their kernel, which it keeps."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def tie_head(model: nn.Module) -> None:
    """Ties the head to the embedding again: one that was prepacked for a CPU keeps the old weights otherwise."""
    head: Any = getattr(model, "lm_head", None)
    embedding: Any = getattr(getattr(model, "model", None), "embed_tokens", None)
    if isinstance(head, PPMissingLayer) or isinstance(embedding, PPMissingLayer):
        return  # one of several pipeline ranks, which has not got both
    if head is not None and embedding is not None and head is not embedding:
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)
