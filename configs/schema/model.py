"""The policy: its weights, precision and adapters."""

from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from slipstream.configs.runtime.hardware import Dtype, fastest_dtype
from slipstream.configs.schema.base import Section, UserPath

FLASH_IN_FLOAT32: Final = (
    "learner.attention={} computes in bfloat16 only, and model.dtype is float32: set model.dtype=bfloat16, or "
    "learner.attention=auto"
)
_NO_ADAPTERS: Final = {
    "modules_to_save": "engines keep whole modules of the base model",
    "bias": "vLLM adds no bias of an adapter",
    "use_dora": "vLLM computes no DoRA",
    "dora": "vLLM computes no DoRA",
    "dropout": "the engine samples without it",
    "lora_dropout": "the engine samples without it",
}
"""Settings of peft that `model.lora` does not have, with the reason."""
_HEADS: Final = ("lm_head", "embed_tokens", "embed_out", "wte")


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685, extra `lora`).

    alpha / rank · B·A is added to each targeted matrix; only A and B are trained, saved in checkpoints and published.
    """

    rank: int = Field(default=16, ge=1, le=512)
    """Rows of A and columns of B."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapters, times 1 / rank."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Last parts of the names of linear layers, such as [q_proj, v_proj]; `all-linear`: those of all layers."""
    export: Literal["merged", "adapter"] = "merged"
    """The trained model in the run folder: the base with the adapters added to it, or the adapters alone, as peft saves
    them."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        refused = [f"{key} is not possible: {why}" for key, why in _NO_ADAPTERS.items() if key in (given or ())]
        if refused:
            raise ValueError("; ".join(refused))
        return given

    @field_validator("targets")
    @classmethod
    def _no_heads(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        heads = [name for name in targets if name in _HEADS] if not isinstance(targets, str) else []
        if heads:
            raise ValueError(
                f"{', '.join(heads)}: adapters of head and embedding would be two of one matrix where these are tied, "
                "and vLLM takes neither; name linear layers, or all-linear"
            )
        if not targets:
            raise ValueError("name at least one linear layer, or all-linear")
        return targets


class ModelConfig(Section):
    """The policy: a Hugging Face folder or model, or a tiny model that is built for the run."""

    path: UserPath | None = None
    """Folder with config, weights and tokenizer, as `save_pretrained` writes it; or the name of a model on the Hugging
    Face hub (`Qwen/Qwen3-0.6B`) or on ModelScope (`modelscope:Qwen/Qwen3-0.6B`), which each process takes from the
    cache of the hub's library, or downloads into it."""
    revision: str | None = None
    """Branch, tag or commit of a hub's model; unset: its main branch."""
    build: Literal["digits", "calls", "text", "vision"] | None = None
    """Build a tiny model with random weights and a token per character in the run folder instead of reading `path`:
    `digits` has the characters of the env `digits`, `calls` digits, calls of a tool `lookup` and a chat template,
    `text` printable ASCII and a chat template with tools; `vision` is a Qwen2.5-VL with small letters, digits and a
    chat template."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the engine and of the learner's forward and backward pass (master weights are float32). `auto`:
    bfloat16 on a GPU or a CPU with AMX, float32 on other CPUs; learner and rollout servers must come to the same."""
    train_vision_encoder: bool = False
    """Train the vision encoder of a vision-language model, too. Engines then compute each image's features again after
    every update."""
    lora: LoraConfig | None = None
    """Train adapters of the model and leave its own weights as they are; unset: train all weights."""

    @property
    def dtype_here(self) -> Dtype:
        """The precision on this host."""
        return fastest_dtype() if self.dtype == "auto" else self.dtype

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is None and self.build is None:
            raise ValueError(
                "give model.path, the folder or hub name of a model, or model.build: digits, calls, text, vision"
            )
        if self.path is None and self.revision is not None:
            raise ValueError(f"model.revision={self.revision} is for a model.path of a hub; remove it")
        if self.path is not None and self.build is not None:
            raise ValueError(
                f"model.path={self.path} and model.build={self.build} exclude each other: add model.build=null to take "
                "the model in the folder"
            )
        return self
