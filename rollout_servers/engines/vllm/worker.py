"""Extension of every vLLM worker (`worker_extension_cls`): loads staged and broadcast weights, layer by layer."""

import gc
import inspect
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms.cpu import CpuPlatform

from slipstream.buffer.wire.weights.layout import layout, tensor_slices
from slipstream.buffer.wire.weights.protocol import TensorInfo
from slipstream.configs.runtime.processes import die_with
from slipstream.models.device_memory import pin
from slipstream.models.tensors import typed_view
from slipstream.rollout_servers.engines.vllm.arguments import ADAPTER_ID, BACKEND, SERVER_VARIABLE
from slipstream.rollout_servers.engines.vllm.experts import expert_layers, record_experts

# At every update it warns of layers without a tensor: rotary embeddings, which have none, and a tied head, which gets
# the embedding's. `check_complete` looks for parameters without a tensor.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# vLLM's attention on a CPU computes with AMX, for which Linux requires a permission: without it the process is killed
# (SIGILL), unless oneDNN has happened to ask before.
torch.cpu._init_amx()


_COPIED = {"sinks", "w13_weight", "w2_weight", "w13_bias", "w2_bias"}


class StagedWorker:
    """Methods that a rollout server calls by `collective_rpc`: `map_staged` or `stage`, then `load_staged`.

    Every tensor-parallel worker gets whole tensors; the model's own loaders take their shards. With `model.lora` a
    version is an adapter; `add_adapter` comes first.
    """

    vllm_config: Any
    model_runner: Any
    _staged: list[tuple[str, Tensor]] | LoRAModel
    _mapped: tuple[str, Tensor] = ("", torch.empty(0, dtype=torch.uint8))

    def add_adapter(self) -> None:
        """Adds an adapter without effect: requests of version 0 go on with that of version 1."""
        manager = self.model_runner.lora_manager
        layers = manager._adapter_manager
        unwrap_head(layers)
        self._replace_adapter(layers.create_dummy_lora(ADAPTER_ID, 1, manager.embedding_modules))

    def map_staged(self, path: str, tensors: list[dict[str, Any]], adapter: dict[str, Any] | None) -> str | None:
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
            if torch.cuda.is_available():
                pin(self._mapped[1])
        try:
            slices = tensor_slices(self._mapped[1], infos)
            self.stage([(info.name, typed_view(part, info.dtype, info.shape)) for info, part in slices], adapter)
        except Exception as error:  # noqa: BLE001  (vLLM raises anything; the reason is passed on)
            return repr(error)
        return None

    def stage(self, tensors: list[tuple[str, Tensor]], adapter: dict[str, Any] | None) -> None:
        """Keeps tensors in this process's own memory for `load_staged`. The model is unchanged.

        Args:
            adapter: for those of an adapter, the content of its adapter_config.json.

        Raises: ValueError when the adapter does not fit the model.
        """
        self._staged = tensors if adapter is None else self._adapter(dict(tensors), adapter)

    def _adapter(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> LoRAModel:
        """Raises: ValueError."""
        manager = self.model_runner.lora_manager
        layers, helper = manager._adapter_manager, PEFTHelper.from_dict(config)
        helper.validate_legal(manager.lora_config)
        mapper = getattr(layers.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor.clone() for name, tensor in tensors.items()},  # the staging memory is written again
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        # Of others vLLM would silently make no use; several of one layer, such as q, k and v, it joins.
        joined = {part: whole for whole, parts in layers.packed_modules.items() for part in parts}
        strange = sorted(name for name in adapter.loras if joined.get(name, name) not in layers.modules)
        if strange and self.vllm_config.parallel_config.pipeline_parallel_size == 1:
            raise ValueError(f"vLLM has no adapters for {', '.join(strange[:3])}: leave it out of model.lora.targets")
        return adapter

    def _replace_adapter(self, adapter: LoRAModel) -> None:
        layers = self.model_runner.lora_manager._adapter_manager
        layers.remove_adapter(adapter.id)
        layers.add_adapter(adapter)
        layers.activate_adapter(adapter.id)

    def return_experts(self) -> list[int]:
        """Begins to return the experts of each step, as vLLM does on a GPU. Returns the layers that have experts."""
        layers = expert_layers(self.model_runner.get_model())
        if layers and not torch.accelerator.is_available():
            record_experts(self.model_runner, self.vllm_config)
        return layers

    def load_staged(self) -> None:
        """Loads the staged tensors into the model, layer by layer: a failure leaves it with half a version.

        Raises: RuntimeError naming the parameters without a tensor.
        """
        staged, self._staged = self._staged, []
        if isinstance(staged, LoRAModel):
            self._replace_adapter(staged)
        else:
            self._reload(staged)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # before the server reuses its staging memory

    def _reload(self, tensors: list[tuple[str, Tensor]]) -> None:
        model: Any = self.model_runner.get_model()
        tied = is_tied(self.vllm_config)
        with set_current_vllm_config(self.vllm_config):
            if not torch.accelerator.is_available():
                forget_expert_kernels(model)
            initialize_layerwise_reload(model)
            with copies_reloaded(model):
                check_complete(model, model.load_weights(iter(tensors)), tied=tied)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if tied:
                tie_head(model)


def unwrap_head(layers: Any) -> None:
    """Removes the adapter of the head, which none has, from vLLM's manager of the layers with adapters.

    It would fail where a prompt is scored: it expects one row for each request, and not one for each token.
    """
    for parent in list(layers.model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, LogitsProcessorWithLoRA):
                setattr(parent, name, module.base_layer)
    for name, module in list(layers.modules.items()):
        if isinstance(module, LogitsProcessorWithLoRA):
            del layers.modules[name]


@contextmanager
def copies_reloaded(model: nn.Module) -> Iterator[None]:
    """Context for `load_weights` in which gpt-oss's sinks and experts are reloaded.

    vLLM copies them into the parameters, not by the parameters' loaders. During a reload the parameters of a layer are
    on the meta device until all of its loaders were called: the old weights would stay, without an error.
    """
    decoder: Any = getattr(model, "model", None)
    if type(decoder).__name__ != "GptOssModel":
        yield
        return
    named_parameters = decoder.named_parameters

    def with_copied(*arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        for name, parameter in named_parameters(*arguments, **options):
            layer, _, attribute = name.rpartition(".")
            copied = parameter.is_meta and attribute in _COPIED
            yield name, _Copied(decoder.get_submodule(layer), attribute) if copied else parameter

    decoder.named_parameters = with_copied
    try:
        yield
    finally:
        del decoder.named_parameters  # the method of its class applies again


class _Copied:
    """A parameter on the meta device, for code that copies into it."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        self._layer, self._name = layer, name

    @property
    def data(self) -> "_Copied":
        return self

    def copy_(self, tensor: Tensor) -> None:
        """Keeps a tensor for the layer, which is loaded with its last one."""
        parameter: Any = getattr(self._layer, self._name)
        parameter.weight_loader = default_weight_loader
        info: Any = get_layerwise_info(self._layer)
        loader = inspect.signature(default_weight_loader)
        info.loaded_weights.append((self._name, loader.bind(parameter, tensor)))
        info.load_numel += parameter.numel()
        if info.load_numel >= info.load_numel_total:
            _layerwise_process(self._layer, info)


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
    """vLLM's receiver of NCCL broadcasts, with a check that every parameter was loaded.

    vLLM receives each bucket on one of two streams and keeps views of it until the layers that it begins are complete,
    which may be while the other stream loads the next one. Neither stream waits for the other, nor does the allocator
    learn of the second one (`record_stream`): so each bucket is loaded to its end before another is received.
    """

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receives a version. Raises: RuntimeError naming the parameters without a tensor."""
        model: Any = self.model
        load, loaded = model.load_weights, set[str]()

        def noted(tensors: Any) -> None:
            with copies_reloaded(model):
                loaded.update(load(tensors))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

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


class OneAdapter(PunicaWrapperCPU):
    """Adds the adapter in slot 0 by two matrix products for each slice: all requests have the same adapter.

    vLLM's own operations gather a copy of A and B for every token, which for a prompt of some hundred tokens takes
    longer than the model itself.
    """

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Adds scale * x A^T B^T to the slices of y.

        Args:
            y: shape [N, sum of O], changed in place.
            x: shape [N, I]: N tokens, I inputs; O outputs of a slice and R ranks below.
            lora_a_stacked: for each slice, shape [slots, 1, R, I].
            lora_b_stacked: for each slice, shape [slots, 1, O, R].
        """
        start = 0
        for a_RI, b_OR, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            states_NR = functional.linear(x, a_RI[0, 0]).to(y.dtype)
            y[:, start : start + width].addmm_(states_NR, b_OR[0, 0].T.to(y.dtype), alpha=scale)
            start += width


def use_one_adapter() -> None:
    """Makes models that vLLM loads on a CPU from now on use `OneAdapter`."""
    name = f"{OneAdapter.__module__}.{OneAdapter.__qualname__}"
    CpuPlatform.get_punica_wrapper = classmethod(lambda _: name)  # type: ignore[method-assign, assignment]


WeightTransferEngineFactory.register_engine(BACKEND, CompleteNccl)
use_one_adapter()
end_with_server()
end_without_collecting()
