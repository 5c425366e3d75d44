"""What vLLM's server streams back, gathered into answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import Completion, EngineError
from slipstream.rollout_servers.engines.http.requests import Span, StreamError, failure, version_spans, whole


class _Token(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    """The next piece of one sample; `weight_versions` comes with the last and covers all of it."""

    index: int
    token_ids: list[int]
    logprobs: _LogProbs
    finish_reason: str | None
    weight_versions: list[Span] | None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: StreamError | None = None


class _ScoredPrompt(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Token] | None]


class _Returned(msgspec.Struct):
    results: list[str | None]


_events = msgspec.json.Decoder(_Event)
_scored_prompts = msgspec.json.Decoder(_ScoredPrompt)
_returned = msgspec.json.Decoder(_Returned)


@dataclass
class _Draft:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: Sequence[VersionSpan] | None = None
    finish_reason: str = "abort"


class Answers:
    """The answers to one prompt while they come."""

    def __init__(self, samples: int) -> None:
        self._drafts = [_Draft() for _ in range(samples)]

    def take(self, event: str) -> None:
        """Adds what an event brings. Raises: RequestRefused, FailedAnswer, EngineError."""
        try:
            news = _events.decode(event)
        except msgspec.DecodeError as error:
            raise EngineError(f"vLLM's server sent what it should not: {error}: {event[:200]}") from error
        if news.error is not None:
            said = f"vLLM's server broke an answer off with {news.error.code}: {news.error.message}"
            raise failure(news.error.code, said)
        for choice in news.choices:
            draft = self._drafts[choice.index]
            draft.token_ids += choice.token_ids
            draft.logprobs += [token.logprob for token in choice.logprobs.content]
            if choice.finish_reason is not None:
                draft.finish_reason = choice.finish_reason
                draft.spans = None if choice.weight_versions is None else version_spans(choice.weight_versions)

    def completions(self) -> list[Completion]:
        """All answers. Raises: EngineError when vLLM left out log-probs or version spans."""
        return [_completion(draft, draft.spans) for draft in self._drafts]

    def unfinished(self, version: int) -> list[Completion]:
        """What has come so far, all of it from one version."""
        return [
            _completion(draft, whole(version, len(draft.token_ids)) if draft.spans is None else draft.spans)
            for draft in self._drafts
        ]


def prompt_logprobs(answer: bytes, token_ids: Sequence[int]) -> list[float]:
    """log-probs of a prompt's tokens but the first. Raises: EngineError when the answer does not hold them."""
    try:
        places = _scored_prompts.decode(answer).prompt_logprobs[1:]
        return [(place or {})[str(token)].logprob for place, token in zip(places, token_ids[1:], strict=True)]
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise EngineError(f"vLLM's server did not score a prompt: {error!r}") from error


def complaints(answer: bytes) -> list[str]:
    """What workers that were called return, None aside. Raises: EngineError when the answer does not hold that."""
    try:
        return [result for result in _returned.decode(answer).results if result is not None]
    except msgspec.DecodeError as error:
        raise EngineError(f"vLLM's server does not say what its workers return: {error}") from error


def _completion(draft: _Draft, spans: Sequence[VersionSpan] | None) -> Completion:
    if spans is None or len(draft.logprobs) != len(draft.token_ids):
        raise EngineError("vLLM returned an answer without log-probs or without weight versions")
    return Completion(
        token_ids=draft.token_ids, logprobs=draft.logprobs, spans=spans, finish_reason=draft.finish_reason
    )
