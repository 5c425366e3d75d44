"""Extension of every vLLM worker (`worker_extension_cls`): loads staged and broadcast weights, layer by layer."""

import gc
import logging
import os
import signal
import threading
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.utils import PPMissingLayer

from slipstream.buffer.wire.weights.layout import layout, named_tensors
from slipstream.buffer.wire.weights.protocol import TensorInfo
from slipstream.configs.runtime.processes import die_with
from slipstream.rollout_servers.engines.vllm.arguments import BACKEND, SERVER_VARIABLE

# At every update it warns of layers without a tensor: rotary embeddings, which have none, and a tied head, which gets
# the embedding's. `check_complete` looks for parameters without a tensor.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# vLLM's attention on a CPU computes with AMX, for which Linux requires a permission: without it the process is killed
# (SIGILL), unless oneDNN has happened to ask before.
torch.cpu._init_amx()


class StagedWorker:
    """Methods that a rollout server calls by `collective_rpc`: `map_staged` or `stage`, then `load_staged`.

    Every tensor-parallel worker gets whole tensors; the model's own loaders take their shards.
    """

    vllm_config: Any
    model_runner: Any
    _staged: list[tuple[str, Tensor]]
    _mapped: tuple[str, Tensor] = ("", torch.empty(0, dtype=torch.uint8))

    def map_staged(self, path: str, tensors: list[dict[str, Any]]) -> str | None:
        """Maps a file in shared memory with a version's tensors; `tensors` are `TensorInfo`s as plain dicts.

        The model is unchanged. Returns: the problem with the file, or None. No exception: vLLM reads the workers'
        results up to the first error, and takes the others for results of the next call.
        """
        self._staged = []
        infos = msgspec.convert(tensors, list[TensorInfo])
        _, size = layout(infos)
        # Checked first: torch creates a missing file and lengthens a short one.
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
        """Keeps tensors in this process's own memory for `load_staged`. The model is unchanged."""
        self._staged = tensors

    def load_staged(self) -> None:
        """Loads the staged tensors into the model, layer by layer: a failure leaves it with half a version.

        Raises: RuntimeError naming the parameters without a tensor.
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
            torch.accelerator.synchronize()  # before the server reuses its staging memory


def forget_expert_kernels(model: nn.Module) -> None:
    """Makes vLLM prepack experts again: on a CPU it does so only when it sets up their kernel, which it keeps."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def tie_head(model: nn.Module) -> None:
    """Ties the head to the embedding again: otherwise a head prepacked for a CPU keeps the old weights."""
    language: Any = getattr(model, "language_model", model)
    head: Any = getattr(language, "lm_head", None)
    embedding: Any = getattr(getattr(language, "model", None), "embed_tokens", None)
    if isinstance(head, PPMissingLayer) or isinstance(embedding, PPMissingLayer):
        return  # a pipeline rank without both
    if head is not None and embedding is not None and head is not embedding:
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


class CompleteNccl(NCCLWeightTransferEngine):
    """vLLM's receiver of NCCL broadcasts, with a check that every parameter was loaded."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receives a version. Raises: RuntimeError naming the parameters without a tensor."""
        model: Any = self.model
        load, loaded = model.load_weights, set[str]()

        def noted(tensors: Any) -> None:
            loaded.update(load(tensors))

        model.load_weights = noted
        try:
            super().receive_weights(update_info)
        finally:
            del model.load_weights  # the method of its class applies again
        check_complete(model, loaded, tied=is_tied(self.vllm_config))


def is_tied(vllm_config: Any) -> bool:
    """True if the model's head is its embedding."""
    config = vllm_config.model_config
    # A vision-language model has it outside of the part for text.
    return bool(config.hf_config.tie_word_embeddings or config.hf_text_config.tie_word_embeddings)


def check_complete(model: nn.Module, loaded: set[str], *, tied: bool) -> None:
    """Raises: RuntimeError naming the parameters that were neither loaded nor are tied to one that was."""
    head = {"lm_head.weight", "language_model.lm_head.weight"} if tied else set()
    missing = {name for name, _ in model.named_parameters()} - loaded - head
    if missing:
        raise RuntimeError(f"no weights came for {', '.join(sorted(missing))}")


def end_without_collecting() -> None:
    """Disables garbage collection from SIGTERM on, in a process of vLLM.

    vLLM collects twice at its exit, and so does Python, through all that was loaded: that took 2 to 4 s, and after 5 s
    vLLM kills its core.
    """
    of_vllm = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(of_vllm):
        return  # a rollout server with vLLM in a thread

    def end(number: int, frame: FrameType | None) -> None:
        gc.callbacks.append(lambda phase, info: gc.freeze())
        of_vllm(number, frame)

    signal.signal(signal.SIGTERM, end)


def end_with_server() -> None:
    """Kills this worker, and the engine core that started it, once the server that claimed them has ended."""
    server = int(os.environ.get(SERVER_VARIABLE, os.getpid()))
    starter = parent_process()
    if server != os.getpid() and starter is not None:
        # With tensor parallelism the starter is the core; without, this process is the core.
        die_with(server, starter=starter.pid if starter.pid != server else None)


WeightTransferEngineFactory.register_engine(BACKEND, CompleteNccl)
end_with_server()
end_without_collecting()
