"""The tokenizer: the only place where text becomes token ids and back."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from slipstream.configs.models import without_remote_code
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.logging import get_log

log = get_log("rollout.text")


class PromptError(SlipstreamError):
    """A prompt can't be turned into token ids."""


class Text:
    """The tokenizer of one model folder."""

    def __init__(self, model: Path) -> None:
        self._model = model
        with without_remote_code(model):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model, mistral_format=False, trust_remote_code=False)
        if len(self._tokenizer) <= len(self._tokenizer.all_special_ids):
            # transformers makes an empty one up where there is none.
            raise ConfigError(f"the model in {model} has no tokenizer: put tokenizer.json and its configuration there")
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            raise ConfigError(
                f"the tokenizer of the model in {model} is a {type(self._tokenizer).__name__}, which has no "
                "tokenizer.json; use a model whose tokenizer has one"
            )
        self._bos: str | None = self._tokenizer.bos_token
        # What tokenizer.json says of either was for another use, and would change prompts without a word.
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()

    def encode(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a text as it is, or of chat messages under the model's chat template.

        A tokenizer that puts its BOS in front of texts does so, unless the text begins with it, as a rendered chat may.

        Raises: PromptError.
        """
        ids: list[int]
        try:
            if isinstance(prompt, str):
                # Straight to the Rust tokenizer: the wrapper around it takes ten times as long for a short text.
                begun = self._bos is not None and prompt.startswith(self._bos)
                ids = self._tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=not begun).ids
            else:
                ids = self._tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False)
        except Exception as error:  # tokenizers raises nothing narrower, and a template whatever it likes
            raise PromptError(f"{type(error).__name__}: {error}") from error
        return ids

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The answers as text, without special tokens."""
        texts: list[str] = self._tokenizer.backend_tokenizer.decode_batch(answers, skip_special_tokens=True)
        return texts

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's, and those of the model's generation config.

        A model without one has that of its configuration, as transformers and vLLM see it. Tokens that the model does
        not have are left out: it never draws them, and vLLM would refuse every request that names one.
        """
        with without_remote_code(self._model):
            model = AutoConfig.from_pretrained(self._model, trust_remote_code=False)
        if (self._model / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(self._model)
        else:
            generation = GenerationConfig.from_model_config(model)
        listed = generation.eos_token_id
        ids = {self._tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
        vocabulary: int = model.get_text_config(decoder=True).vocab_size
        known = tuple(sorted(token for token in ids if token < vocabulary))
        if len(known) < len(ids):
            unknown = sorted(ids.difference(known))
            log.warning("no answer ends with a token that the model does not have", left_out=unknown, ends_with=known)
        return known

    def fingerprint(self) -> str:
        """Differs when two tokenizers would read or write a text or a chat differently."""
        described = f"{self._tokenizer.backend_tokenizer.to_str()}{self._tokenizer.chat_template}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]
