"""Teachers of a distillation that are inference servers: log-probs of an answer's tokens, and the likeliest ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, Final

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.schema.distill import TeacherConfig
from slipstream.rewards.endpoint import Endpoint

RETRIES: Final = 3


@dataclass(frozen=True)
class TokenScores:
    """A teacher's log-probs at some tokens of a sequence, at temperature 1.

    Attributes:
        logprobs: of these tokens.
        top_ids: the likeliest tokens at each, in falling order.
        top_logprobs: of those.
    """

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class TeacherServer:
    """A server of vLLM (`/v1/completions`) or SGLang (`/generate`) that scores sequences of token ids."""

    def __init__(self, config: TeacherConfig, *, top_k: int | None, vocabulary: int) -> None:
        """Args:
        top_k: likeliest tokens to ask for; None: none.
        vocabulary: number of the policy's token ids.
        """
        assert config.url is not None, "a teacher without a url is no server"
        url = config.url.rstrip("/").removesuffix("/v1")
        self.endpoint = Endpoint(url, timeout_s=config.timeout_s, retries=RETRIES, concurrency=config.concurrency)
        self.worst_case_s = self.endpoint.worst_case_s
        self._server, self._top_k, self._vocabulary = config.server, top_k, vocabulary
        self._model: str | None = None

    async def score(self, token_ids: Sequence[int], tokens: Sequence[int]) -> TokenScores:
        """Log-probs of the tokens at the indices `tokens`, ascending, each after all tokens before it.

        Raises: RewardUnavailable when the server refuses the request, or gives none even after further tries.
        """
        if self._server == "sglang":
            first = tokens[0]
            body = {
                "input_ids": list(token_ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": first - 1,
                "top_logprobs_num": self._top_k or 0,
            }
            return await self.endpoint.ask("/generate", body, partial(_read, self._of_sglang, token_ids, tokens))
        body = {
            "model": await self._name(),
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self._top_k or 0,
        }
        return await self.endpoint.ask("/v1/completions", body, partial(_read, self._of_vllm, token_ids, tokens))

    async def detokenized(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included. Raises: RewardUnavailable."""
        body: dict[str, Any] = {"tokens": list(token_ids)}
        if self._server == "vllm":
            body["model"] = await self._name()
            return str(await self.endpoint.ask("/detokenize", body, lambda reply: _field(reply, "prompt")))
        body["skip_special_tokens"] = False
        return str(await self.endpoint.ask("/detokenize", body, lambda reply: _field(reply, "text")))

    async def close(self) -> None:
        """Closes the connections."""
        await self.endpoint.close()

    async def _name(self) -> str:
        """The name under which vLLM serves its model."""
        if self._model is None:
            self._model = await self.endpoint.ask("/v1/models", None, lambda reply: str(_first(reply, "data")["id"]))
        return self._model

    def _of_vllm(self, reply: Any, token_ids: Sequence[int], tokens: Sequence[int]) -> TokenScores:
        """Raises: ValueError for a reply of another shape."""
        found = _field(_first(reply, "choices"), "prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(token_ids):
            raise ValueError(f"prompt_logprobs of {len(token_ids)} tokens are missing")
        logprobs, top = list[float](), list[list[tuple[int, float]]]()
        for index in tokens:
            by_token: Mapping[str, Mapping[str, float]] = found[index]
            logprobs.append(float(by_token[str(token_ids[index])]["logprob"]))
            # Beside the likeliest tokens there is the sequence's own.
            ranked = sorted((int(each["rank"]), int(token), float(each["logprob"])) for token, each in by_token.items())
            top.append([(token, logprob) for _, token, logprob in ranked[: self._top_k or 0]])
        return self._checked(logprobs, top)

    def _of_sglang(self, reply: Any, token_ids: Sequence[int], tokens: Sequence[int]) -> TokenScores:
        """Raises: ValueError for a reply of another shape."""
        meta, first = _field(reply, "meta_info"), tokens[0] - 1
        found = _field(meta, "input_token_logprobs")
        if len(found) != len(token_ids) - first:
            raise ValueError(f"input_token_logprobs of {len(token_ids) - first} tokens are missing")
        likeliest = _field(meta, "input_top_logprobs") if self._top_k else None
        logprobs, top = list[float](), list[list[tuple[int, float]]]()
        for index in tokens:
            logprob, token, *_ = found[index - first]
            if token != token_ids[index]:
                raise ValueError(f"the log-prob of token {token} in place of {token_ids[index]}")
            logprobs.append(float(logprob))
            given = [] if likeliest is None else likeliest[index - first]
            ranked = sorted(((float(each[0]), int(each[1])) for each in given), reverse=True)
            top.append([(token, logprob) for logprob, token in ranked])
        return self._checked(logprobs, top)

    def _checked(self, logprobs: list[float], top: list[list[tuple[int, float]]]) -> TokenScores:
        """Raises: ValueError for what can't be trained on."""
        wanted = self._top_k or 0
        if any(len(each) != wanted for each in top):
            raise ValueError(f"fewer than {wanted} likeliest tokens")
        likeliest = [logprob for each in top for _, logprob in each]
        if not all(map(isfinite, [*logprobs, *likeliest])) or max(logprobs, default=0.0) > 0:
            raise ValueError("a log-prob is no finite number of at most 0")
        if any(not 0 <= token < self._vocabulary for each in top for token, _ in each):
            raise ValueError(f"a likeliest token is none of the policy's {self._vocabulary}")
        return TokenScores(
            logprobs, [[token for token, _ in each] for each in top], [[logprob for _, logprob in each] for each in top]
        )


def _read(
    scores: Callable[[Any, Sequence[int], Sequence[int]], TokenScores],
    token_ids: Sequence[int],
    tokens: Sequence[int],
    reply: Any,
) -> TokenScores:
    """Raises: ValueError for a reply of another shape."""
    try:
        return scores(reply, token_ids, tokens)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"log-probs of another form: {format_error(error)}") from error


def _first(reply: Any, name: str) -> Any:
    """Raises: ValueError when there is none."""
    listed = _field(reply, name)
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{name} is empty in {str(reply)[:200]}")
    return listed[0]


def _field(value: Any, name: str) -> Any:
    """Raises: ValueError when there is none."""
    if not isinstance(value, Mapping) or name not in value:
        raise ValueError(f"no {name} in {str(value)[:200]}")
    return value[name]
