"""A model whose random answers have log-normal lengths, by its weights: it counts down.

The first token of an answer draws a number, each later one is a token of the number below, and after 1 the answer ends.
A number has many tokens, equally likely at first, of which the reward `loops.favoured_share` favours half. All layers
are computed; their contribution to the hidden states is small.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.step import write_model

MEDIAN_TOKENS, SIGMA = 39.5, 1.0
"""Lengths of answers, the stop token included: log-normal. At most 512 tokens, their mean is 64."""
VARIANTS = 64
"""Tokens of a number. The largest number is so that the vocabulary has tokens for it."""
PAD, EOS, ASK = "<pad>", "<eos>", "?"
PROMPT_TOKENS = 32
ASK_DIMENSIONS, SIGN_DIMENSIONS = 16, 16
"""Of the hidden state: these tell the prompt's end from numbers; these, 0 at first, choose among a number's tokens."""
CERTAINTY = 20.0
"""Logit of the tokens of the right number; others are near 0."""
SIGN_SCALE = 3.0
"""Of the logits by the latter dimensions: large, so that few small updates raise the reward and leave the lengths."""
LAYER_SCALE = 0.1
"""Of the layers' contribution to the hidden state."""


def most_tokens(config: Mapping[str, Any]) -> int:
    """The length of the longest answers: the largest number of a model's vocabulary, and the stop token."""
    return int(config["vocab_size"]) // VARIANTS


def length_probabilities(longest: int) -> npt.NDArray[np.float64]:
    """Probabilities of answers of 2 to `longest` tokens; longer ones are cut to that."""
    edges = np.arange(2, longest) + 0.5
    below = np.array([0.5 * (1 + math.erf(math.log(edge / MEDIAN_TOKENS) / SIGMA / math.sqrt(2))) for edge in edges])
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


def build_countdown_model(config: Mapping[str, Any], folder: Path) -> Path:
    """Writes the model, of a Qwen3's shape with untied embeddings, and its tokenizer.

    Its vocabulary has VARIANTS tokens for each number, and VARIANTS others before them.
    """
    tokens = [PAD, EOS, ASK, *(f"w{number}" for number in range(VARIANTS - 3))]
    variants = [f"{'+-'[variant % 2]}{variant}" for variant in range(VARIANTS)]
    tokens += [f"{number}{variant}" for number in range(1, most_tokens(config)) for variant in variants]
    assert config["vocab_size"] == len(tokens), "the vocabulary is a multiple of VARIANTS"
    special = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    write_model({**config, **special}, folder, dtype="float32")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _count_down(model, tokens)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(special), encoding="utf-8")
    words = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=PAD))
    words.pre_tokenizer = WhitespaceSplit()
    words.add_special_tokens([AddedToken(token, special=True) for token in (PAD, EOS)])
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=EOS, model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(folder)
    return folder


@torch.no_grad()
def _count_down(model: Any, tokens: Sequence[str]) -> None:
    # K numbers, D hidden size, V vocabulary, I a layer's inner size
    longest, hidden = model.config.vocab_size // VARIANTS, model.config.hidden_size
    numbers, coded = longest - 1, ASK_DIMENSIONS + SIGN_DIMENSIONS
    embedding_VD, head_VD = model.model.embed_tokens.weight, model.lm_head.weight
    for layer in model.model.layers:
        for projection_DI in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            projection_DI.mul_(LAYER_SCALE)
            projection_DI[ASK_DIMENSIONS:coded] = 0
    codes_KD = torch.zeros(numbers, hidden)
    signs_KD = torch.randint(0, 2, (numbers, hidden - coded)).mul(2).sub(1)
    codes_KD[:, coded:] = signs_KD * math.sqrt(hidden / (hidden - coded))
    ask_D = torch.zeros(hidden)
    ask_D[:ASK_DIMENSIONS] = math.sqrt(hidden / ASK_DIMENSIONS)
    embedding_VD.normal_()
    embedding_VD[tokens.index(ASK)] = ask_D
    embedding_VD[VARIANTS:] = codes_KD.repeat_interleave(VARIANTS, 0)
    # Rows over the hidden size: the product with an own code is the logit.
    first_K = torch.from_numpy(length_probabilities(longest)).log().float() + CERTAINTY
    rows_KD = first_K[:, None] * ask_D / hidden
    rows_KD[:-1] += CERTAINTY * codes_KD[1:] / hidden
    head_VD.zero_()
    head_VD[tokens.index(EOS)] = (CERTAINTY + math.log(VARIANTS)) * codes_KD[0] / hidden
    head_VD[VARIANTS:] = rows_KD.repeat_interleave(VARIANTS, 0)
    favoured_V = torch.tensor([1.0 if "+" in token else -1.0 for token in tokens[VARIANTS:]])
    head_VD[VARIANTS:, ASK_DIMENSIONS:coded] = SIGN_SCALE * favoured_V[:, None]


def write_prompts(file: Path, count: int) -> list[str]:
    """Writes prompts of random words as rows; returns them."""
    rng = np.random.default_rng(0)
    prompts = [
        " ".join([*(f"w{number}" for number in rng.integers(0, VARIANTS - 3, PROMPT_TOKENS - 1)), ASK])
        for _ in range(count)
    ]
    rows = [{"prompt": prompt, "answer": ""} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return prompts
