"""The tokenizer, the only place where text becomes token ids and back."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError, format_error
from slipstream.configs.runtime.logging import get_log
from slipstream.models.architecture import vocabulary_size
from slipstream.models.folder import without_remote_code

log = get_log("tokenizer")


class PromptError(SlipstreamError):
    """A prompt can't be turned into token ids."""


class Tokenizer:
    """The tokenizer of a model folder.

    Attributes:
        model: the folder.
    """

    def __init__(self, model: Path) -> None:
        """Raises: ConfigError when the folder has no tokenizer that can be used."""
        self.model = model
        self._tokenizer = _loaded(model)
        if len(self._tokenizer) <= len(self._tokenizer.all_special_ids):
            # transformers returns an empty one where there is none.
            raise ConfigError(f"the model in {model} has no tokenizer: put tokenizer.json and its configuration there")
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            raise ConfigError(
                f"the tokenizer of the model in {model} is a {type(self._tokenizer).__name__}, which has no "
                "tokenizer.json; use a model whose tokenizer has one"
            )
        self._bos: str | None = self._tokenizer.bos_token
        # Either may be set in tokenizer.json for another use, and would change prompts silently.
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()

    def encode(
        self, prompt: str | Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a text as it is, or of chat messages under the model's chat template.

        A BOS token that the tokenizer adds to texts is added once: a rendered chat may begin with it already.

        Args:
            tools: schemas for the template.

        Raises: PromptError.
        """
        if not isinstance(prompt, str):
            return self.encode_observation(self.render(prompt, tools=tools))
        has_bos = self._bos is not None and prompt.startswith(self._bos)
        return self._encode_text(prompt, add_special_tokens=not has_bos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool = True,
    ) -> str:
        """The text of chat messages under the chat template.

        Args:
            generation_prompt: end with the beginning of an answer.

        Raises: PromptError.
        """
        if self._tokenizer.chat_template is None:
            raise PromptError(
                f"the prompt is chat messages, and the model in {self.model} has no chat template: choose a chat "
                "model, put its chat_template.jinja into the folder, or let the env give texts"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template may raise anything
            raise PromptError(f"{type(error).__name__}: {error}") from error
        return text

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None if there is none."""
        template = self._tokenizer.chat_template
        return None if template is None else str(template)

    def encode_observation(self, text: str) -> list[int]:
        """Token ids of a text in the middle of a sequence: no special tokens are added. Raises: PromptError."""
        return self._encode_text(text, add_special_tokens=False)

    def prefix(self, text: str, tokens: int) -> str:
        """The longest prefix of at most `tokens` tokens. Raises: PromptError."""
        encoding = self._encoding(text, add_special_tokens=False)
        return text if len(encoding.ids) <= tokens else text[: encoding.offsets[tokens][0]]

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoding(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        try:
            # The Rust tokenizer itself: its wrapper takes ten times as long for a short text.
            return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # tokenizers raises nothing narrower
            raise PromptError(f"{type(error).__name__}: {error}") from error

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The answers as text, without special tokens."""
        texts: list[str] = self._tokenizer.backend_tokenizer.decode_batch(answers, skip_special_tokens=True)
        return texts

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def decode_as_served(self, token_ids: Sequence[int]) -> str:
        """The text of tokens as inference servers give it: by transformers, special tokens included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    @property
    def tokens(self) -> int:
        """Number of tokens of the tokenizer, which may be fewer than the model has."""
        return len(self._tokenizer)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's, and those of the model's generation config.

        Without a generation config the model's configuration counts, as in transformers and vLLM. Tokens outside of the
        model's vocabulary are left out: vLLM would refuse every request that names one.
        """
        with without_remote_code(self.model):
            model = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
        if (self.model / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(self.model)
        else:
            generation = GenerationConfig.from_model_config(model)
        listed = generation.eos_token_id
        ids = {self._tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
        vocabulary: int = model.get_text_config(decoder=True).vocab_size
        known = tuple(sorted(token for token in ids if token < vocabulary))
        if len(known) < len(ids):
            unknown = sorted(ids.difference(known))
            log.warning("stop tokens outside of the vocabulary left out", left_out=unknown, kept=known)
        return known

    @property
    def end_token_id(self) -> int | None:
        """The tokenizer's own stop token, which ends a text; None if it has none."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    @property
    def padding_token_id(self) -> int | None:
        """The token that fills up texts of a batch, the stop token where there is no other; None without either."""
        pad: int | None = self._tokenizer.pad_token_id
        return self.end_token_id if pad is None else pad

    @property
    def vocab_size(self) -> int:
        """The model's number of token ids. Raises: ConfigError when its configuration does not give it."""
        return vocabulary_size(self.model)

    def fingerprint(self) -> str:
        """Differs when two tokenizers encode or decode a text or a chat differently."""
        described = f"{self._tokenizer.backend_tokenizer.to_str()}{self._tokenizer.chat_template}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]


def _loaded(model: Path) -> Any:
    """The tokenizer of transformers. Raises: ConfigError."""
    try:
        with without_remote_code(model):
            return AutoTokenizer.from_pretrained(model, mistral_format=False, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises anything, and tokenizers nothing narrower, for damaged files
        reason = " ".join(format_error(error).split())[:300]
        raise ConfigError(f"the tokenizer of the model in {model} can't be loaded: {reason}") from error
