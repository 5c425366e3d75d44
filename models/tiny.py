"""Tiny Qwen3 and Qwen2.5-VL models with random weights and a token per character, built without torch."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from slipstream.configs.runtime.errors import ConfigError

PAD: Final = "<pad>"

_HIDDEN, _INTERMEDIATE, _LAYERS = 64, 128, 2
_HEADS, _KEY_VALUE_HEADS = 4, 1
_HEAD_DIM = 32  # vLLM's CPU attention refuses smaller heads
_INIT_STD = 0.02
_RECORD = "built_by_slipstream.json"
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOOLS: Final = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\n' }}{% set messages = messages[1:] %}{% endif %}"
    "{{ '<tools>\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    '{{ \'</tools>\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n\' }}{% endif %}'
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>\n' }}"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with tools, in Hermes' format of calls."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The own parts of a tiny model.

    Attributes:
        tokens: the vocabulary; ids are indices.
        special: tokens that are no text, the first of them PAD; the last one ends an answer.
        rope_theta: a small model must distinguish positions a few tokens apart.
        tied: the output head is the embedding, which makes copying easy to learn.
        vision: a Qwen2.5-VL, whose vision encoder has as many layers.
    """

    name: str
    tokens: Sequence[str]
    special: Sequence[str]
    context: int
    rope_theta: float
    tied: bool
    chat_template: str | None = None
    vision: bool = False

    @property
    def eos(self) -> str:
        """The token that ends an answer."""
        return self.special[-1]


TEXT = TinyModel(
    name="text",
    tokens=(PAD, "<|im_start|>", "<|im_end|>", "\n", *map(chr, range(ord(" "), ord("~") + 1))),
    special=(PAD, "<|im_start|>", "<|im_end|>"),
    context=2048,
    rope_theta=1000.0,
    tied=True,
    chat_template=CHATML_TOOLS,
)
"""Printable ASCII, and a chat template of ChatML with tools."""

_LETTERS: Final = "0123456789=AFSTcdehinorstw.?"
"""Digits, and the letters of the dialogue by which a rollout server checks a chat template."""
_NOT_SHOWN: Final = "".join(sorted(set(map(chr, range(ord(" "), ord("~") + 1))) - set(_LETTERS)))
_CALL: Final = '<tool_call>{"name": '
_CALLED: Final = (
    '"lookup", "arguments": {"key": "',
    '"final_answer", "arguments": {"answer": "',
    '"bash", "arguments": {"command": "lookup ',
    '"bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo ',
)
CALLS: Final = TinyModel(
    name="calls",
    tokens=(PAD, *_LETTERS, *(_CALL + called for called in _CALLED), '"}}</tool_call>', "<eos>"),
    special=(PAD, "<eos>"),
    context=256,
    rope_theta=100.0,
    tied=False,
    chat_template=(
        "{% macro shown(text) %}{% for letter in text.strip().split('\n')[-1] "
        f"if letter not in {json.dumps(_NOT_SHOWN)} %}}{{{{ letter }}}}{{% endfor %}}{{% endmacro %}}"
        "{% for tool in tools or [] %}{{ shown(tool['function']['name']) }}{% endfor %}"
        "{% for message in messages if message['role'] != 'system' %}"
        "{% if 'Calling tools:' not in message['content'] %}{{ shown(message['content']) }}{% endif %}"
        "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + "
        "{'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson + '</tool_call>' }}"
        "{% endfor %}{{ '=' if message['role'] == 'tool' else '<eos>' if message['role'] == 'assistant' else '' }}"
        "{% endfor %}"
    ),
)
"""Digits and, in two tokens around a key or value, calls of the tools of some agents: it learns to call in minutes.

Its chat template shows what the vocabulary has of each message's last line: agents write long prompts. Calls that
smolagents repeats as text are left out.
"""

_VISION_TOKENS: Final = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Tokens around and for images, by their keys in the configuration."""
VISION = TinyModel(
    name="vision",
    tokens=(
        *(PAD, "<|im_start|>", *_VISION_TOKENS.values(), "<|im_end|>", "\n", " ", "?"),
        *"abcdefghijklmnopqrstuvwxyz",
        *"0123456789",
    ),
    special=(PAD, "<|im_start|>", *_VISION_TOKENS.values(), "<|im_end|>"),
    context=2048,
    rope_theta=1000.0,
    tied=True,
    chat_template=_CHATML.replace(
        "message['content']",
        "content(message['content'])",
    ).replace(
        "{% for message in messages %}",
        "{%- macro content(parts) -%}{%- if parts is string -%}{{ parts }}{%- else -%}{%- for part in parts -%}"
        "{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else -%}"
        "{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}{% for message in messages %}",
    ),
    vision=True,
)
"""Small letters and digits, and a chat template with images."""

_VISION_HEADS: Final = 2
_PATCH, _MERGE = 14, 2
_CHANNELS_OF_PATCH = (3, 2, _PATCH, _PATCH)


def build_model(folder: Path, kind: TinyModel, *, seed: int) -> None:
    """Writes a Hugging Face model folder atomically, unless it exists; one of another model or seed is replaced.

    Raises: ConfigError if `folder` holds anything else.
    """
    record = {"model": kind.name, "recipe": 2, "seed": seed}
    if _built(folder) == record:
        return
    if folder.exists() and _built(folder) is None:
        raise ConfigError(f"{folder} holds something that slipstream did not build: remove it, or set model.path to it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        _write(new, kind, record)
        # Not if another process has built the same meanwhile: a third may be reading it.
        if _built(folder) not in (None, record):
            folder.rename(Path(scratch) / "old")
        try:
            new.rename(folder)
        except OSError:
            if _built(folder) != record:
                raise


def _built(folder: Path) -> dict[str, Any] | None:
    """The record of the model that was built in `folder`, if any."""
    try:
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: cut off by a power failure
        return None
    return record


def _write(folder: Path, kind: TinyModel, record: dict[str, Any]) -> None:
    special = {"pad_token": PAD, "eos_token": kind.eos}
    texts: dict[str, dict[str, Any]] = {
        "config.json": _vision_config(kind) if kind.vision else _model_config(kind),
        "generation_config.json": {"eos_token_id": kind.tokens.index(kind.eos), "pad_token_id": kind.tokens.index(PAD)},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": kind.context,
            "clean_up_tokenization_spaces": False,
            **({"chat_template": kind.chat_template} if kind.chat_template else {}),
        },
        "special_tokens_map.json": special,
        _RECORD: record,
    }
    if kind.vision:
        texts["preprocessor_config.json"] = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": (_PATCH * _MERGE) ** 2,
            "max_pixels": 64 * (_PATCH * _MERGE) ** 2,
            "patch_size": _PATCH,
            "temporal_patch_size": _CHANNELS_OF_PATCH[1],
            "merge_size": _MERGE,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.25, 0.25, 0.25],
        }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _tokenizer(kind).save(str(folder / "tokenizer.json"))
    weights = save(_weights(kind, np.random.default_rng(record["seed"])), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)  # save_file would make it unreadable for other users


def _model_config(kind: TinyModel) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(kind.tokens),
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KEY_VALUE_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": kind.rope_theta},
        "max_position_embeddings": kind.context,
        "tie_word_embeddings": kind.tied,
        "initializer_range": _INIT_STD,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": kind.tokens.index(kind.eos),
        "pad_token_id": kind.tokens.index(PAD),
        "dtype": "float32",
    }


def _vision_config(kind: TinyModel) -> dict[str, Any]:
    text = _model_config(kind)
    for name in ("architectures", "head_dim", "attention_bias", "dtype"):
        text.pop(name)
    sections = [_HEAD_DIM // 2 - 2 * (_HEAD_DIM // 5), _HEAD_DIM // 5, _HEAD_DIM // 5]
    text |= {
        "model_type": "qwen2_5_vl_text",
        "num_attention_heads": _HIDDEN // _HEAD_DIM,
        "rope_parameters": {**text["rope_parameters"], "mrope_section": sections},
    }
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": _LAYERS,
            "hidden_size": _HIDDEN,
            "intermediate_size": _INTERMEDIATE,
            "num_heads": _VISION_HEADS,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": _CHANNELS_OF_PATCH[1],
            "out_hidden_size": _HIDDEN,
            "window_size": 4 * _PATCH * _MERGE,
            "fullatt_block_indexes": [_LAYERS - 1],
            "initializer_range": _INIT_STD,
        },
        **{key: kind.tokens.index(token) for key, token in _VISION_TOKENS.items()},
        "tie_word_embeddings": kind.tied,
        "dtype": "float32",
    }


def _tokenizer(kind: TinyModel) -> Tokenizer:
    """One token per character, but for longer tokens; an unknown character raises, because there is no `<unk>`."""
    tokenizer = Tokenizer(WordLevel({token: number for number, token in enumerate(kind.tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in kind.special])
    longer = [token for token in kind.tokens if len(token) > 1 and token not in kind.special]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in longer])
    return tokenizer


def _weights(kind: TinyModel, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Matrices normal with standard deviation 0.02, norm weights 1, biases 0."""
    if kind.vision:
        return _vision_weights(kind, rng)
    inner, key_value = _HEADS * _HEAD_DIM, _KEY_VALUE_HEADS * _HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(kind.tokens), _HIDDEN)}
    for layer in (f"model.layers.{number}" for number in range(_LAYERS)):
        shapes |= {
            f"{layer}.input_layernorm.weight": (_HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (inner, _HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (key_value, _HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (key_value, _HIDDEN),
            f"{layer}.self_attn.q_norm.weight": (_HEAD_DIM,),
            f"{layer}.self_attn.k_norm.weight": (_HEAD_DIM,),
            f"{layer}.self_attn.o_proj.weight": (_HIDDEN, inner),
            f"{layer}.post_attention_layernorm.weight": (_HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        }
    shapes["model.norm.weight"] = (_HIDDEN,)
    if not kind.tied:
        shapes["lm_head.weight"] = (len(kind.tokens), _HIDDEN)
    return _drawn(shapes, rng)


def _vision_weights(kind: TinyModel, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Weights under the names of Qwen2.5-VL's files."""
    merged = _HIDDEN * _MERGE**2
    shapes: dict[str, tuple[int, ...]] = {"visual.patch_embed.proj.weight": (_HIDDEN, *_CHANNELS_OF_PATCH)}
    for number in range(_LAYERS):
        block, layer = f"visual.blocks.{number}", f"model.layers.{number}"
        shapes |= {f"{block}.{name}.weight": (_HIDDEN,) for name in ("norm1", "norm2")}
        shapes |= _linear(f"{block}.attn.qkv", 3 * _HIDDEN, _HIDDEN) | _linear(f"{block}.attn.proj", _HIDDEN, _HIDDEN)
        shapes |= {f"{layer}.{name}.weight": (_HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= _linear(f"{layer}.self_attn.q_proj", _HIDDEN, _HIDDEN)
        for name in ("k_proj", "v_proj"):
            shapes |= _linear(f"{layer}.self_attn.{name}", _KEY_VALUE_HEADS * _HEAD_DIM, _HIDDEN)
        shapes |= {f"{layer}.self_attn.o_proj.weight": (_HIDDEN, _HIDDEN)}
        for mlp, bias in ((f"{block}.mlp", True), (f"{layer}.mlp", False)):
            shapes |= _linear(f"{mlp}.gate_proj", _INTERMEDIATE, _HIDDEN, bias=bias)
            shapes |= _linear(f"{mlp}.up_proj", _INTERMEDIATE, _HIDDEN, bias=bias)
            shapes |= _linear(f"{mlp}.down_proj", _HIDDEN, _INTERMEDIATE, bias=bias)
    shapes |= {"visual.merger.ln_q.weight": (_HIDDEN,), "model.norm.weight": (_HIDDEN,)}
    shapes |= _linear("visual.merger.mlp.0", merged, merged) | _linear("visual.merger.mlp.2", _HIDDEN, merged)
    shapes["model.embed_tokens.weight"] = (len(kind.tokens), _HIDDEN)
    return _drawn(shapes, rng)


def _linear(name: str, rows: int, columns: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _drawn(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    return {
        name: np.full(shape, not name.endswith(".bias"), np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * np.float32(_INIT_STD)
        for name, shape in shapes.items()
    }
