"""Requests and answers of SGLang's native API."""

from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.protocol import Form, TensorInfo
from slipstream.rollout_servers.engines.base import Completion, EngineError, Generation
from slipstream.rollout_servers.engines.sglang.client import failure
from slipstream.rollout_servers.engines.sglang.inflight import whole

PIECE_TOKENS = 8
"""Tokens per event of a stream: at most as many are lost of an answer when the server crashes."""

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
LOADS = "/v1/loads"
INFO = "/server_info"
BACKEND = "nccl"
"""torch's, for transfer groups."""


def request_id(number: int) -> str:
    """An id for a request. All are of one length: SGLang aborts every request whose id begins with the one it hears."""
    return f"slipstream-{number:016}"


def generate_request(
    request: str,
    prompt_ids: Sequence[int],
    generation: Generation,
    *,
    greedy: bool,
    max_tokens: int | None,
    context: int,
) -> dict[str, Any]:
    """Asks for a stream of one answer, which ends where the context does: SGLang refuses what could go further."""
    most = generation.max_tokens if max_tokens is None else max_tokens
    sampling = {
        "temperature": 0.0 if greedy else generation.temperature,
        "max_new_tokens": min(most, context - len(prompt_ids)),
        "ignore_eos": generation.ignore_eos,
        "stop_token_ids": list(generation.stop_token_ids),
        "stream_interval": PIECE_TOKENS,
    }
    return {
        "rid": request,
        "input_ids": list(prompt_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
    }


def score_request(token_ids: Sequence[int]) -> dict[str, Any]:
    """Asks for the log-probs of the tokens of a prompt."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def abort_request(request: str) -> dict[str, Any]:
    """Ends a request with what it has come to."""
    return {"rid": request}


def pause_request() -> dict[str, Any]:
    """Takes running requests out of the KV cache; they are computed anew, under the weights that are there then."""
    return {"mode": "retract"}


def update_request(folder: str, version: int) -> dict[str, Any]:
    """Loads the weights in a folder, and forgets the prefixes that were computed under the old ones."""
    return {"model_path": folder, "weight_version": str(version), "flush_cache": True}


def group_name(group: Form) -> str:
    """Of a transfer group; the learner looks for its members in the store under this name."""
    return f"epoch{group.epoch}"


def join_group_request(group: Form) -> dict[str, Any]:
    """Enters a transfer group with all workers, which connect to each other, or will with the first bucket."""
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
    """Receives the tensors of a bucket in one broadcast, and loads them; those of the last one make up `version`."""
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
    """Tokens of an answer that come from one version."""

    version: str
    start: int
    end: int


class _StreamError(msgspec.Struct):
    """Error that ends a stream."""

    message: str
    code: int


class _Reason(msgspec.Struct):
    """Why an answer ended; `status_code` is there when it was an error."""

    type: str
    message: str = ""
    status_code: int | None = None


_LogProb = tuple[float | None, int, str | None]
"""(log-prob, token, its text)."""


class _Meta(msgspec.Struct):
    finish_reason: _Reason | None
    output_token_logprobs: list[_LogProb] = []
    output_token_logprobs_length: int = 0
    """How many there are altogether, with those of the events before."""
    input_token_logprobs: list[_LogProb] | None = None
    weight_versions: list[_Span] | None = None
    """Covers the whole answer, and comes with its end."""
    num_retractions: int = 0


class _Event(msgspec.Struct):
    meta_info: _Meta | None = None
    error: _StreamError | None = None


class _Load(msgspec.Struct):
    token_usage: float


class _Loads(msgspec.Struct):
    loads: list[_Load]


class ServerInfo(msgspec.Struct):
    """How the server was started."""

    max_req_input_len: int
    """A prompt of so many tokens is refused."""
    tp_size: int
    """Tensor-parallel workers."""


_events = msgspec.json.Decoder(_Event)


class Draft:
    """An answer while it comes; `stop_token_ids` are those that end it."""

    def __init__(self, stop_token_ids: Sequence[int] = ()) -> None:
        self._stop_token_ids = stop_token_ids
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._end: _Meta | None = None

    def take(self, event: str | bytes) -> None:
        """Adds what an event brings. Raises: RequestRefused, FailedAnswer, EngineError."""
        meta = _meta(event)
        # An answer that is aborted while it waits comes whole once more, with or without the event before.
        total = meta.output_token_logprobs_length
        news = meta.output_token_logprobs[max(0, len(meta.output_token_logprobs) - total) :]
        start = total - len(news)
        if start > len(self._token_ids):
            raise EngineError(f"SGLang's server left out tokens {len(self._token_ids)} to {start} of an answer")
        self._token_ids[start:] = [token for _, token, _ in news]
        self._logprobs[start:] = [_known(logprob) for logprob, _, _ in news]
        if meta.finish_reason is not None:
            self._end = meta

    def completion(self) -> Completion:
        """The whole answer. Raises: EngineError when SGLang left out its end, or its version spans."""
        if self._end is None or self._end.finish_reason is None or self._end.weight_versions is None:
            raise EngineError("SGLang's server returned an answer without its end or without weight versions")
        spans = [
            VersionSpan(version=int(span.version), start=span.start, end=span.end)
            for span in self._end.weight_versions
            if span.end > span.start
        ]
        # An answer that is aborted in the very step that ends it is called aborted.
        stopped = bool(self._token_ids) and self._token_ids[-1] in self._stop_token_ids
        reason = "stop" if stopped else self._end.finish_reason.type
        return Completion(token_ids=self._token_ids, logprobs=self._logprobs, spans=spans, finish_reason=reason)

    def unfinished(self, version: int) -> Completion:
        """What has come so far, all of it from one version."""
        if self._end is not None:
            return self.completion()
        spans = whole(version, len(self._token_ids))
        return Completion(token_ids=self._token_ids, logprobs=self._logprobs, spans=spans, finish_reason="abort")

    @property
    def preemptions(self) -> int:
        """How often it was thrown out of the KV cache for want of room; updates, which begin a span, do that too."""
        if self._end is None:
            return 0
        return max(0, self._end.num_retractions - len((self._end.weight_versions or [])[1:]))


def prompt_logprobs(answer: bytes, token_ids: Sequence[int]) -> list[float]:
    """log-probs of a prompt's tokens but the first. Raises: EngineError when the answer does not hold them."""
    places, asked = (_meta(answer).input_token_logprobs or [])[1:], token_ids[1:]
    # The vocabulary's last token is called 0: SGLang scores it, and takes it for one that lies beyond.
    scored = len(places) == len(asked) and all(
        told in (token, 0) for (_, told, _), token in zip(places, asked, strict=True)
    )
    if not scored:
        raise EngineError("SGLang's server did not score a prompt")
    return [_known(logprob) for logprob, _, _ in places]


def cache_usage(answer: bytes) -> float:
    """Share of the KV cache that is taken, where it is fullest. Raises: EngineError."""
    try:
        return max(load.token_usage for load in msgspec.json.decode(answer, type=_Loads).loads)
    except (msgspec.DecodeError, ValueError) as error:
        raise EngineError(f"SGLang's server does not say how much it has to do: {error}") from error


def server_info(answer: bytes) -> ServerInfo:
    """What the server says of itself. Raises: EngineError."""
    try:
        return msgspec.json.decode(answer, type=ServerInfo)
    except msgspec.DecodeError as error:
        raise EngineError(f"SGLang's server does not say how it was started: {error}") from error


def _meta(event: str | bytes) -> _Meta:
    try:
        news = _events.decode(event)
    except msgspec.DecodeError as error:
        raise EngineError(f"SGLang's server sent what it should not: {error}: {event[:200]!r}") from error
    if news.error is not None:
        raise _failure(news.error.code, news.error.message)
    if news.meta_info is None:
        raise EngineError(f"SGLang's server sent what it should not: {event[:200]!r}")
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
