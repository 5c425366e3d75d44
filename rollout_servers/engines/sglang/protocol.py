"""Requests and answers of SGLang's native API."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from slipstream.buffer.wire.messages import RoutedExperts, VersionSpan
from slipstream.buffer.wire.weights.protocol import Form, TensorInfo
from slipstream.rollout_servers.engines.base import Completion, EngineError, ExpertReader, Generation, Request
from slipstream.rollout_servers.engines.sglang.server import failure

PIECE_TOKENS = 8
"""Tokens per event of a stream; an answer loses fewer when the server crashes."""

GENERATE = "/generate"
ABORT = "/abort_request"
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
UPDATE = "/update_weights_from_disk"
JOIN_GROUP = "/init_weights_update_group"
LEAVE_GROUP = "/destroy_weights_update_group"
BEGIN_UPDATE = "/begin_weight_update"
RECEIVE = "/update_weights_from_distributed"
END_UPDATE = "/end_weight_update"
LOAD_ADAPTER = "/load_lora_adapter"
UNLOAD_ADAPTER = "/unload_lora_adapter"
LOADS = "/v1/loads"
BACKEND = "nccl"
"""torch's, for transfer groups."""


def whole(version: int, tokens: int) -> list[VersionSpan]:
    """Spans of tokens that all come from one version."""
    return [VersionSpan(version=version, start=0, end=tokens)] if tokens else []


def request_id(number: int) -> str:
    """Id of a request. All have one length: SGLang aborts every request whose id starts with the one in an abort."""
    return f"slipstream-{number:016}"


def adapter_name(version: int) -> str | None:
    """SGLang's name of a version's adapter; None for the base model, which is version 0."""
    return f"version-{version}" if version else None


def load_adapter_request(folder: str, version: int) -> dict[str, Any]:
    """Loads the adapter in a folder beside those that are there."""
    return {"lora_name": adapter_name(version), "lora_path": folder}


def unload_adapter_request(version: int) -> dict[str, Any]:
    """Unloads an adapter once its requests have ended."""
    return {"lora_name": adapter_name(version)}


def generate_request(
    name: str,
    request: Request,
    generation: Generation,
    *,
    context: int,
    begun: int = 0,
    adapter: str | None = None,
    return_experts: bool = False,
) -> dict[str, Any]:
    """Requests a stream of one answer, at most to the end of the context: SGLang refuses more.

    Args:
        begun: tokens of the answer that the prompt ends with.
    """
    most = (generation.max_tokens if request.max_tokens is None else request.max_tokens) - begun
    sampling = {
        "temperature": 0.0 if request.greedy else generation.temperature,
        "max_new_tokens": min(most, context - len(request.prompt_ids)),
        "ignore_eos": generation.ignore_eos,
        "stop_token_ids": list(generation.stop_token_ids),
        "stream_interval": PIECE_TOKENS,
    }
    return {
        "rid": name,
        "input_ids": list(request.prompt_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
        **_with_adapter(adapter),
        **({"return_routed_experts": True} if return_experts else {}),
    }


def score_request(token_ids: Sequence[int], *, adapter: str | None = None) -> dict[str, Any]:
    """Requests the log-probs of the tokens of a prompt."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        **_with_adapter(adapter),
    }


def _with_adapter(name: str | None) -> dict[str, str]:
    return {} if name is None else {"lora_path": name}  # the key of its name too


def abort_request(request: str) -> dict[str, Any]:
    """Ends a request; its answers so far are its answers."""
    return {"rid": request}


def pause_request() -> dict[str, Any]:
    """Pauses generation; running requests leave the KV cache and are recomputed, under the weights of then."""
    return {"mode": "retract"}


def update_request(folder: str, version: int) -> dict[str, Any]:
    """Loads the weights in a folder and drops the prefixes computed under the old ones."""
    return {"model_path": folder, "weight_version": str(version), "flush_cache": True}


def group_name(group: Form) -> str:
    """Name of a transfer group; the learner finds its members in the store under this name."""
    return f"epoch{group.epoch}"


def join_group_request(group: Form) -> dict[str, Any]:
    """Enters a transfer group with all workers, which connect now or with the first bucket."""
    return {
        "master_address": group.host,
        "master_port": group.port,
        "rank_offset": group.rank,
        "world_size": group.world,
        "group_name": group_name(group),
        "backend": BACKEND,
    }


def leave_group_request(name: str) -> dict[str, Any]:
    """Leaves a transfer group."""
    return {"group_name": name}


def bucket_request(bucket: Sequence[TensorInfo], group: str, *, version: int | None = None) -> dict[str, Any]:
    """Receives the tensors of a bucket in one broadcast and loads them; the last bucket sets `version`."""
    return {
        "names": [tensor.name for tensor in bucket],
        "dtypes": [tensor.dtype for tensor in bucket],
        "shapes": [tensor.shape for tensor in bucket],
        "group_name": group,
        "load_format": "flattened_bucket",
        "weight_version": None if version is None else str(version),
        "flush_cache": version is not None,
    }


class _Span(msgspec.Struct):
    """Tokens of an answer from one version."""

    version: str
    start: int
    end: int


class _StreamError(msgspec.Struct):
    """Error that ends a stream."""

    message: str
    code: int


class _Reason(msgspec.Struct):
    """Reason for the end of an answer; with `status_code` if it was an error."""

    type: str
    message: str = ""
    status_code: int | None = None


_LogProb = tuple[float | None, int, str | None]
"""(log-prob, token, its text)."""


class _Meta(msgspec.Struct):
    finish_reason: _Reason | None
    output_token_logprobs: list[_LogProb] = []
    output_token_logprobs_length: int = 0
    """Number of tokens so far, with those of earlier events."""
    input_token_logprobs: list[_LogProb] | None = None
    weight_versions: list[_Span] | None = None
    """Of the whole answer; in its last event."""
    num_retractions: int = 0
    cached_tokens: int = 0
    """Of the prompt, those from the prefix cache."""
    routed_experts: str | None = None
    """Of prompt and answer, in base64; in the last event."""


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _StreamError | None = None


class ServerLoad(msgspec.Struct):
    """Load of one of the server's ranks."""

    token_usage: float
    """Used share of the KV cache."""
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0


class _Loads(msgspec.Struct):
    loads: list[ServerLoad]


class ServerInfo(msgspec.Struct):
    """Settings of the server."""

    max_req_input_len: int
    """A prompt of this many tokens is refused."""
    tp_size: int
    """Tensor-parallel workers."""


_events = msgspec.json.Decoder(_Event)


class Draft:
    """An answer while its stream arrives."""

    def __init__(
        self,
        stop_token_ids: Sequence[int] = (),
        *,
        version: int | None = None,
        experts: ExpertReader | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """Args:
        stop_token_ids: those that end it.
        version: of all its tokens; None: SGLang's version spans.
        experts: reads those of prompt and answer; None: they are not returned.
        """
        self._stop_token_ids = stop_token_ids
        self._version = version
        self._experts = experts
        self._prompt_tokens = prompt_tokens
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._cached_tokens = 0
        self._end: _Meta | None = None

    @property
    def tokens(self) -> int:
        """Number of its tokens so far."""
        return len(self._token_ids)

    def take(self, event: str | bytes) -> None:
        """Adds the tokens of an event. Raises: RequestRefused, FailedAnswer, EngineError."""
        meta = _meta(event)
        # An answer aborted while it waits arrives whole once more, with or without the earlier event.
        total = meta.output_token_logprobs_length
        news = meta.output_token_logprobs[max(0, len(meta.output_token_logprobs) - total) :]
        start = total - len(news)
        if start > len(self._token_ids):
            raise EngineError(f"SGLang's server left out tokens {len(self._token_ids)} to {start} of an answer")
        self._token_ids[start:] = [token for _, token, _ in news]
        self._logprobs[start:] = [_known(logprob) for logprob, _, _ in news]
        self._cached_tokens = max(self._cached_tokens, meta.cached_tokens)  # an abort's last event has none
        if meta.finish_reason is not None:
            self._end = meta

    def completion(self) -> Completion:
        """The whole answer. Raises: EngineError when its end or its version spans are missing."""
        if self._end is None or self._end.finish_reason is None or self._end.weight_versions is None:
            raise EngineError("SGLang's server returned an answer without its end or without weight versions")
        spans = [
            VersionSpan(version=int(span.version), start=span.start, end=span.end)
            for span in self._end.weight_versions
            if span.end > span.start
        ]
        if self._version is not None:
            spans = whole(self._version, len(self._token_ids))
        # SGLang reports an answer that is aborted in its last step as aborted.
        stopped = bool(self._token_ids) and self._token_ids[-1] in self._stop_token_ids
        reason = "stop" if stopped else self._end.finish_reason.type
        return Completion(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            spans=spans,
            finish_reason=reason,
            routed_experts=self._routed_experts(self._end.routed_experts),
            cached_tokens=self._cached_tokens,
        )

    def _routed_experts(self, encoded: str | None) -> RoutedExperts | None:
        """Raises: EngineError when what the server returned has the wrong size."""
        if self._experts is None or encoded is None:
            return None
        tokens = self._prompt_tokens + len(self._token_ids)
        try:
            ids = np.frombuffer(base64.b64decode(encoded), dtype="<i4")
            rows = ids.reshape(tokens - 1, -1, self._experts.layout.per_token)
            return self._experts.read(rows, tokens=tokens)
        except (ValueError, IndexError) as error:
            raise EngineError(f"SGLang's server returned unknown experts of {tokens} tokens: {error}") from error

    def unfinished(self, version: int) -> Completion:
        """The answer so far, whose tokens count as those of one version."""
        if self._end is not None:
            return self.completion()
        spans = whole(version, len(self._token_ids))
        return Completion(token_ids=self._token_ids, logprobs=self._logprobs, spans=spans, finish_reason="abort")

    @property
    def preemptions(self) -> int:
        """Removals from the KV cache for want of room; without those by updates, each of which begins a span."""
        if self._end is None:
            return 0
        return max(0, self._end.num_retractions - len((self._end.weight_versions or [])[1:]))


def prompt_logprobs(answer: bytes, token_ids: Sequence[int]) -> list[float]:
    """log-probs of a prompt's tokens but the first. Raises: EngineError when they are missing."""
    places, asked = (_meta(answer).input_token_logprobs or [])[1:], token_ids[1:]
    # SGLang scores the vocabulary's last token correctly, but returns its id as 0.
    scored = len(places) == len(asked) and all(
        told in (token, 0) for (_, told, _), token in zip(places, asked, strict=True)
    )
    if not scored:
        raise EngineError("SGLang's server did not score a prompt")
    return [_known(logprob) for logprob, _, _ in places]


def server_load(answer: bytes) -> ServerLoad:
    """The load of the rank with the fullest KV cache. Raises: EngineError."""
    try:
        return max(msgspec.json.decode(answer, type=_Loads).loads, key=lambda load: load.token_usage)
    except (msgspec.DecodeError, ValueError) as error:
        raise EngineError(f"SGLang's server returned an unknown load: {error}") from error


def server_info(answer: bytes) -> ServerInfo:
    """The server's settings. Raises: EngineError."""
    try:
        return msgspec.json.decode(answer, type=ServerInfo)
    except msgspec.DecodeError as error:
        raise EngineError(f"SGLang's server returned unknown settings: {error}") from error


def _meta(event: str | bytes) -> _Meta:
    try:
        news = _events.decode(event)
    except msgspec.DecodeError as error:
        raise EngineError(f"SGLang's server sent an unknown event: {error}: {event[:200]!r}") from error
    if news.error is not None:
        raise _failure(news.error.code, news.error.message)
    if news.meta_info is None:
        raise EngineError(f"SGLang's server sent an unknown event: {event[:200]!r}")
    reason = news.meta_info.finish_reason
    if reason is not None and reason.status_code is not None:
        raise _failure(reason.status_code, reason.message)
    return news.meta_info


def _failure(code: int, message: str) -> EngineError:
    return failure(code, f"SGLang's server broke an answer off with {code}: {message}")


def _known(logprob: float | None) -> float:
    if logprob is None:
        raise EngineError("SGLang's server returned a token without its log-prob")
    return logprob
