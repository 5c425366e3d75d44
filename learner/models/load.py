"""The policy: a transformers model, sharded layer by layer (FSDP2)."""

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from slipstream.configs.models import without_remote_code
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema import RunConfig
from slipstream.learner.algorithms.scoring import score_actions
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models import attention
from slipstream.learner.models.identity import require_same_tokens
from slipstream.learner.models.packing_check import check_isolation, said_of
from slipstream.learner.parallel.mesh import World

log = get_log("learner.model")


def replicate(module: nn.Module, world: World) -> None:
    """Gives all ranks rank 0's parameters and buffers, on their devices, except what is sharded; a collective.

    On the other ranks the tensors may be without data (of the device "meta"). Tied ones stay tied.
    """
    if world.size == 1:
        return
    given: dict[Tensor, Tensor] = {}
    for holder in module.modules():
        own = chain(holder.named_parameters(recurse=False), holder.named_buffers(recurse=False))
        for name, tensor in list(own):
            if isinstance(tensor, DTensor):
                continue
            if tensor not in given:
                given[tensor] = _of_rank_0(tensor, world)
            setattr(holder, name, given[tensor])


def _of_rank_0(tensor: Tensor, world: World) -> Tensor:
    if world.is_root:
        data = tensor.detach().to(world.device).contiguous()
    else:
        data = torch.empty_like(tensor, device=world.device, memory_format=torch.contiguous_format)
    dist.broadcast(data, src=0)
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def load_model(config: RunConfig, path: Path, world: World) -> nn.Module:
    """The model of `path`, fp32 master weights sharded over all ranks, computing in `model.dtype`.

    Raises: ConfigError when the learner can't train it.
    """
    model = load_whole(config, path, world)
    shard(model, decoder_of(model), lambda batch: score_actions(model, batch, temperature=1.0), config, world)
    sharded: nn.Module = model
    return sharded


def load_reference(config: RunConfig, policy: Path, world: World) -> nn.Module | None:
    """The frozen model that the KL penalty looks at, sharded like the policy; None if there is no penalty.

    Raises: ConfigError when it can't be run, or has other tokens than the policy.
    """
    if config.learner.kl is None:
        return None
    path = config.learner.kl.reference
    model = load_model(config, path or policy, world)
    if path is not None:
        require_same_tokens("learner.kl.reference", path, policy, vocabulary=vocabulary_of(model), world=world)
    return model.requires_grad_(False)


def load_whole(config: RunConfig, path: Path, world: World) -> Any:
    """The transformers model of `path`, not sharded, in fp32; its weights are on rank 0 only; a collective.

    It is in evaluation mode, in which it has a gradient too, but neither dropout nor noise in the choice of experts:
    the engine samples without them.

    Raises: ConfigError, on all ranks, when rank 0 can't load it.
    """
    attention.register()
    model = _loaded_by_root(path, config.learner.attention, world).eval()
    if config.learner.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in decoder_of(model).layers:
            layer.training = True  # transformers checkpoints in no other mode; what the layer is made of stays as it is
    dropouts = {name: p for name, p in model.config.to_dict().items() if "drop" in name and isinstance(p, float) and p}
    if dropouts:
        log.info("dropout is off, as in the engine", model=str(path), **dropouts)
    return model


def _loaded_by_root(path: Path, attention: str, world: World) -> Any:
    """The model of `path`; on all ranks but 0 its tensors have no data."""
    model: Any = None
    outcome: PreTrainedConfig | ConfigError | None = None
    if world.is_root:
        try:
            with said_of(str(path)), without_remote_code(path):
                model = AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
                )
            outcome = model.config
            own = (getattr(model.config, "auto_map", None) or {}).get("AutoModelForCausalLM")
            if own is not None:
                log.warning(
                    "code in the model's folder is not run: it is trained as the class that transformers has",
                    model=str(path),
                    code=own,
                    trained_as=type(model).__name__,
                )
        except ConfigError as error:
            outcome = error
    outcome = world.from_root(outcome)
    if isinstance(outcome, ConfigError):
        raise outcome
    if model is None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(outcome, dtype=torch.float32, attn_implementation=attention)
    return model


def vocabulary_of(model: Any) -> int:
    """How many token ids a transformers model knows; its tokenizer may have fewer."""
    known: int = model.config.get_text_config(decoder=True).vocab_size
    return known


def backbone_of(model: Any) -> Any:
    """A transformers model without its language head."""
    return getattr(model, "model", model.base_model)


def decoder_of(model: Any) -> Any:
    """What has the `layers` of a transformers model. Raises: ConfigError if nothing has."""
    decoder = backbone_of(model).get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ConfigError(f"{type(model).__name__} can't be trained by this learner: its decoder has no list `layers`")
    return decoder


def shard(model: nn.Module, decoder: Any, run: Callable[[MicroBatch], object], config: RunConfig, world: World) -> None:
    """Shards rank 0's model over all ranks, layer by layer; it computes and answers in `model.dtype`; a collective.

    Args:
        decoder: the part of it that has the layers.
        run: passes a micro-batch through it, to see what packing does to a sequence.

    Raises: ConfigError when packed sequences are not what they are alone.
    """
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.model.dtype), reduce_dtype=torch.float32)
    for layer in decoder.layers:
        replicate(layer, world)
        fully_shard(layer, mesh=world.mesh, mp_policy=precision)
    replicate(model, world)
    sharded = fully_shard(model, mesh=world.mesh, mp_policy=precision)
    check_isolation(decoder, run, dtype=config.model.dtype, device=world.device)
    # Its parameters are still those that the check computed with, and an optimizer must not get these.
    sharded.reshard()


def full_weights(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Name and full fp32 tensor of every parameter; a collective: all ranks must consume it in step.

    Tied parameters come once, under the name of the first.
    """
    if isinstance(model, FSDPModule):
        # After a pass without a backward one the root's parameters are those it computed with: of `model.dtype`.
        model.reshard()
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        yield name, data.full_tensor() if isinstance(data, DTensor) else data
