"""Chat models: a small trained tokenizer with a chat template, and a tiny random policy that often ends its answers."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Rust
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, logging

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nAnswer.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Without tools; that of SmolLM2 but for the words."""
STOPS = {
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
}
"""Stop tokens of templates whose answers do not end with `<|im_end|>`."""
_SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>", "<bos>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_TEXTS = (
    "user assistant system tool function name arguments parameters description type object properties required",
    "What is the result of adding two numbers? The answer is 42. Look it up and answer, one step at a time.",
    '{"name": "add", "arguments": {"a": 1, "b": 2}} You are a helpful assistant. Cutting Knowledge Date: December 2023',
)


def template_text(name: str) -> str:
    """A chat template by the name of its file in TRL, which has those of many models; `chatml` is ours."""
    if name == "chatml":
        return CHATML
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("trl, which has the chat templates, is not installed: make setup")
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()


def build_chat_model(folder: Path, template: str, *, lossy: bool = False, stop_share: float = 0.15) -> Path:
    """Writes the model and returns its folder.

    Args:
        lossy: the tokenizer changes what it encodes.
        stop_share: probability of the stop token at each place of an answer, about.
    """
    rust = Rust(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    if lossy:
        rust.normalizer = normalizers.Lowercase()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    rust.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    rust.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKS])
    stop = STOPS.get(template, "<|im_end|>")
    bos = "<bos>" if template.startswith("gemma") else "<|begin_of_text|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=stop, bos_token=bos)
    tokenizer.chat_template = template_text(template)
    tokenizer.save_pretrained(folder)
    _policy(rust.get_vocab_size(), rust.get_vocab()[stop], stop_share).save_pretrained(folder)
    return folder


def _policy(vocabulary: int, stop: int, stop_share: float) -> Any:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=stop,
        pad_token_id=0,
    )
    logging.disable_progress_bar()
    model: Any = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3, generator=generator)
        # The first component of the hidden state is the same at all places, and the stop token's logit.
        model.model.embed_tokens.weight[:, 0] = 60.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[stop] = 0
        model.lm_head.weight[stop, 0] = torch.tensor(stop_share * vocabulary).log() / 32**0.5
    return model.eval()
