"""Estimates of the GPU memory that a learner rank and an inference engine need, from configurations alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.rollout import EngineConfig
from slipstream.configs.schema.trainers import FileTrainer
from slipstream.learner.models import fused_head
from slipstream.learner.models.footprint import ActivationBytes, ModelSize, activation_bytes
from slipstream.learner.models.layers import Checkpointing
from slipstream.learner.parallel.fsdp import keeps_gathered
from slipstream.learner.parallel.mesh import MeshSizes

FP32 = 4
MASTER_BYTES = FP32
"""Bytes of a weight and of its gradient, which optimizers work on."""
CONTEXT_BYTES = 1.5e9
"""Memory of CUDA, its libraries and NCCL, in a process."""
FRAGMENTATION = 0.04
"""Share of an allocator's memory that lies between tensors."""
ENGINE_SHARE = 0.9
"""Of the GPU, that vLLM takes by default (`gpu_memory_utilization`)."""
ENGINE_WORK_BYTES = 2e9
"""Memory of an engine beside weights and KV cache, with CUDA's."""
WITHOUT_CACHE = ("linear", "conv", "mamba", "mlp", "moe")
"""In the names of kinds of layers that keep nothing for each token."""
STATE_BYTES = {"adamw": 2 * FP32, "adamw_8bit": 2 * (1 + FP32 / 256)}
"""Of an optimizer, for each weight; in 8 bits with a scale for each 256."""


@dataclass(frozen=True, kw_only=True)
class LearnerSetting:
    """Everything that a learner's memory depends on, beside the model."""

    mesh: MeshSizes
    dtype: torch.dtype
    """Precision of forward and backward passes."""
    tokens: int
    """Of the largest micro-batch: the budget, or the longest sequence."""
    logits_bytes: int
    checkpointing: Checkpointing
    optimizer: str
    offload: bool
    lora_rank: int | None = None
    """Only adapters are trained; None: the whole model."""
    reference: bool = False
    """A reference model, or a teacher of the policy's size, is held, unless it is the base of an adapter."""
    critic: bool = False
    process_reward: bool = False
    """With its own reference, unless it has adapters."""
    on_gpu: bool = True
    """With the memory of CUDA, and the head's larger tiles."""

    @classmethod
    def of(cls, config: RunConfig, mesh: MeshSizes) -> "LearnerSetting":
        """The setting of a run's learner."""
        learner = config.learner
        is_rl = config.uses_buffer
        distill = learner.distill if is_rl or learner.trainer.name == "distill" else None
        return cls(
            mesh=mesh,
            # `auto` is that of a GPU, which this machine may not have.
            dtype=torch.bfloat16 if config.model.dtype == "auto" else getattr(torch, config.model.dtype),
            tokens=max(learner.token_budget, _longest(config)),
            logits_bytes=learner.logits_bytes,
            checkpointing=learner.activation_checkpointing,
            optimizer=learner.optimizer.name,
            offload=learner.offload,
            lora_rank=None if config.model.lora is None else config.model.lora.rank,
            reference=(is_rl and learner.kl is not None) or (distill is not None and distill.holds_models),
            critic=is_rl and learner.critic is not None,
            process_reward=is_rl and learner.process_reward is not None,
        )

    @property
    def rank_tokens(self) -> int:
        """Tokens of the largest micro-batch on each rank."""
        return ceil(self.tokens / self.mesh.cp)

    @property
    def shards(self) -> int:
        """Parts of a copy of the model."""
        return self.mesh.dp_shard * self.mesh.cp * self.mesh.tp


def _longest(config: RunConfig) -> int:
    """Input tokens of what can't be divided among micro-batches: a sequence, or both of a pair."""
    options = config.learner.trainer
    if isinstance(options, FileTrainer):
        longest = config.learner.token_budget if options.max_tokens is None else options.max_tokens
        return (2 if options.pairs else 1) * (longest - 1)
    return config.rollout.engine.max_model_len - 1 if config.uses_buffer else 0


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose."""

    gpu: Mapping[str, float]
    host: Mapping[str, float] = field(default_factory=dict)
    """Memory of the host that one rank takes, by purpose."""

    @property
    def gpu_bytes(self) -> float:
        """Sum on the GPU."""
        return sum(self.gpu.values())


@dataclass(frozen=True)
class EngineEstimate:
    """Memory of an inference engine, on each of its GPUs."""

    weights: float
    cache: float
    """Bytes for the KV cache; negative if not even the weights fit."""
    per_token: float
    """Bytes of the KV cache for each token; what linear attention keeps for each sequence is left out."""

    def sequences(self, tokens: int) -> int:
        """Sequences of so many tokens that the cache holds at once."""
        return max(0, int(self.cache // (self.per_token * tokens)))


@dataclass
class Estimator:
    """Estimates for one model."""

    size: ModelSize
    config: Any
    """The model's configuration, of transformers."""
    _activations: dict[tuple[Any, ...], ActivationBytes] = field(default_factory=dict, init=False)
    """Bytes, by what they depend on: a simulation takes seconds."""

    def learner(self, setting: LearnerSetting) -> Estimate:
        """The peak of a learner rank: the backward pass of its largest micro-batch, with all optimizer states."""
        held = _held(setting, self.size)
        activations = self._activation_bytes(setting)
        head = _head(setting, self.size, self._text.hidden_size)
        gpu = {
            **({} if setting.offload else held),
            "gathered layers": _gathered(setting, self.size),
            "activations": activations.peak,
            # Computed while the forward pass's activations are kept, and freed before the layers' backward pass.
            "head": max(0.0, activations.kept + head - activations.peak),
        }
        if setting.on_gpu:
            gpu["CUDA, fragmentation"] = CONTEXT_BYTES + FRAGMENTATION * sum(gpu.values())
        return Estimate(gpu, held if setting.offload else {})

    def version_bytes(self, setting: LearnerSetting) -> float:
        """Bytes of a version of the weights as it goes to the engines."""
        return setting.dtype.itemsize * (
            self.size.total if setting.lora_rank is None else setting.lora_rank * self.size.rows
        )

    def engine(self, engine: EngineConfig, *, dtype: torch.dtype, gpu_bytes: float) -> EngineEstimate:
        """The memory of an engine on its GPUs."""
        ranks = int(engine.options.get("tensor_parallel_size", engine.options.get("tp_size", 1)))
        options = engine.options
        share = float(options.get("gpu_memory_utilization", options.get("mem_fraction_static", ENGINE_SHARE)))
        weights = dtype.itemsize * self.size.total / ranks
        cache = gpu_bytes * share - weights - ENGINE_WORK_BYTES
        if engine.kv_cache_bytes is not None:
            cache = min(cache, engine.kv_cache_bytes)
        text = self._text
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        if latent := getattr(text, "kv_lora_rank", None):
            numbers = latent + text.qk_rope_head_dim
        else:
            head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            numbers = 2 * head_size * max(1, ceil(text.num_key_value_heads / ranks))
        layers = max(1, sum(not any(part in kind for part in WITHOUT_CACHE) for kind in kinds))
        return EngineEstimate(weights, cache, dtype.itemsize * layers * numbers)

    @property
    def _text(self) -> Any:
        return self.config.get_text_config(decoder=True)

    def _activation_bytes(self, setting: LearnerSetting) -> ActivationBytes:
        key = (setting.rank_tokens, setting.dtype, setting.checkpointing, setting.mesh.tp)
        if key not in self._activations:
            tokens, dtype, checkpointing, tensor_parallel = key
            self._activations[key] = activation_bytes(
                self._text, tokens=tokens, dtype=dtype, checkpointing=checkpointing, tensor_parallel=tensor_parallel
            )
        return self._activations[key]


def _held(setting: LearnerSetting, size: ModelSize) -> dict[str, float]:
    """Bytes that a rank holds between steps: shards, in fp32 of what is trained, of a frozen base as it computes."""
    # The ranks of `tp` each hold embedding and head.
    base = (size.dense + size.experts) / setting.shards + size.root * setting.mesh.tp / setting.shards
    trained = base if setting.lora_rank is None else setting.lora_rank * size.rows / setting.shards
    matrices = size.matrices / size.total if setting.lora_rank is None else 1.0
    muon = FP32 * matrices + STATE_BYTES["adamw"] * (1 - matrices)
    state = STATE_BYTES.get(setting.optimizer, muon)
    held = {
        "weights": MASTER_BYTES * trained + (0 if setting.lora_rank is None else setting.dtype.itemsize * base),
        "gradients": MASTER_BYTES * trained,
        "optimizer": state * trained,
    }
    if setting.reference and setting.lora_rank is None:  # the base without its adapter otherwise
        held["reference"] = MASTER_BYTES * base
    if setting.critic:
        held["critic"] = (2 * MASTER_BYTES + state) * base
    if setting.process_reward:
        frozen = (MASTER_BYTES if setting.lora_rank is None else setting.dtype.itemsize) * base
        held["process_reward"] = (2 * MASTER_BYTES + state) * trained + frozen
    return held


def _gathered(setting: LearnerSetting, size: ModelSize) -> float:
    """Bytes of parameters that FSDP has gathered, and of the gradients on their way to the shards."""
    ranks = setting.mesh.dp_replicate * setting.shards
    if ranks == 1 and setting.dtype == torch.float32 and not setting.offload:
        return MASTER_BYTES * size.root  # gradients of embedding and head, before they are added
    width, mesh = setting.dtype.itemsize, setting.mesh
    layer = size.largest_dense / mesh.tp + size.largest_experts / (mesh.ep if mesh.ep > 1 else mesh.tp)
    # Two layers and the copy that a collective fills; then the gradient, and in fp32 what is reduced.
    of_layers = 3 * width * layer
    if keeps_gathered(ranks, offload=setting.offload, frozen=setting.lora_rank is not None):
        of_layers = width * (size.dense + size.experts)
    of_root = width * size.root
    if setting.lora_rank is not None:
        return of_layers + of_root
    return of_layers + (width + FP32) * layer + of_root + width * size.head


def _head(setting: LearnerSetting, size: ModelSize, hidden: int) -> float:
    """Bytes of log-probs from hidden states: tiles of logits, and gradients of the hidden states."""
    tokens = setting.rank_tokens
    states = tokens * hidden * (2 * setting.dtype.itemsize + FP32)
    kept = tokens * size.head / hidden * setting.dtype.itemsize
    tile = fused_head.TILE["cuda" if setting.on_gpu else "cpu"]
    tiles = 3 * FP32 * max(tile, fused_head.FEWEST_COLUMNS * tokens)
    return states + tiles + (kept if kept <= setting.logits_bytes else 0)
