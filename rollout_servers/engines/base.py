"""The seam to an inference engine: token ids in; token ids, log-probs and engine-stamped version spans out."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedConfig

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.staging import Staging


@dataclass(frozen=True)
class Generation:
    """How every answer is drawn; with `ignore_eos` there are no stop tokens."""

    max_tokens: int
    temperature: float
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: the generated tokens, shape [T].
        logprobs: log-prob of each under the distribution that it was sampled from, shape [T].
        spans: which of the tokens came from which policy version; together they cover [0, T).
        finish_reason: `stop`, `length`, or `abort` if it was cut short; then T may be 0.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[VersionSpan]
    finish_reason: str


NOTHING = Completion(token_ids=(), logprobs=(), spans=(), finish_reason="abort")
"""An answer that was never begun."""


class EngineError(SlipstreamError):
    """The engine is dead, unless this is a `RequestRefused` or an `UpdateFailed`.

    Attributes:
        unfinished: what the request that hears of it had come to, one answer per sample (those that were finished
            too), or None where that is not known.
    """

    def __init__(self, message: str, unfinished: Sequence[Completion] | None = None) -> None:
        super().__init__(message)
        self.unfinished = unfinished


class RequestRefused(EngineError):
    """The engine can't answer this request; the others go on."""


class UpdateFailed(EngineError):
    """Weights could not be received; the engine goes on with those it has."""


@dataclass(frozen=True)
class Pressure:
    """How close an engine is to its limits.

    Attributes:
        kv_cache_usage: share of the KV cache that is taken, from 0 to 1.
        preemptions: requests that were thrown out of it since the engine's start.
    """

    kv_cache_usage: float
    preemptions: int


class Engine(Protocol):
    """An inference engine; safe to use from one event loop."""

    @property
    def version(self) -> int:
        """The policy version that new tokens come from; 0 after every start."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether weights must be staged in shared memory, because the engine's workers are other processes."""
        ...

    @property
    def direct(self) -> "DirectTransport | None":
        """Transport by which the learner broadcasts to the engine's own workers; None where there is none."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        """`samples` answers to one prompt; those that are not finished at the deadline are cut short.

        Cancelling aborts them all. `max_tokens` takes the place of the configured one. A greedy answer is asked for
        alone: others would be copies of it, which vLLM refuses to make.

        Raises: RequestRefused, EngineError.
        """
        ...

    async def join(self, group: Form) -> None:
        """Enters a transfer group of `direct` with all workers. Raises: UpdateFailed, EngineError."""
        ...

    async def install(self, version: int, manifest: Manifest, tensors: "TensorSource") -> float:
        """Makes `version` the one that generates: the only way in which weights reach an engine.

        Requests in flight continue, and their KV cache is recomputed. With `weights.keep_stale_kv` it is not: the pause
        is shorter, but log-probs of their later tokens then belong to neither version. With a `DirectSource` the pause
        includes the transfer, and cancelling costs the engine, because it may hold part of a version.

        Returns: the pause of generation in seconds. Raises: UpdateFailed while the engine still holds the version
        before, EngineError once it holds only part of one.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1. Raises: EngineError."""
        ...

    async def checksums(self) -> dict[str, int] | None:
        """xxh3 (64 bits) of the tensors that the engine holds, by name; None where it hides them."""
        ...

    async def pressure(self) -> Pressure:
        """How close the engine is to its limits. Raises: EngineError."""
        ...

    async def close(self) -> None:
        """Frees everything the engine holds."""
        ...


@dataclass(frozen=True)
class DirectTransport:
    """A transport whose receivers are an engine's own workers.

    Attributes:
        name: the transport's name.
        workers: ranks that the engine takes in a transfer group.
    """

    name: str
    workers: int


@dataclass(frozen=True, eq=False)
class DirectSource:
    """A version that the learner broadcasts in the transfer group that the engine joined last.

    Attributes:
        transport: the transport's name.
        received: set by the engine when it has all bytes.
        approved: set by the caller when the version may take effect.
    """

    transport: str
    received: asyncio.Event = field(default_factory=asyncio.Event)
    approved: asyncio.Event = field(default_factory=asyncio.Event)

    async def approval(self) -> None:
        """Reports that all bytes are there, and waits until the version may take effect."""
        self.received.set()
        await self.approved.wait()


TensorSource = Staging | DirectSource
"""Where a version's tensors are: staged in host memory, or broadcast by the learner."""


def check_update(engine: str, version: int, manifest: Manifest) -> None:
    """Raises: UpdateFailed unless the manifest describes all weights of `version`; `engine` names the engine."""
    if manifest.kind != "full":
        raise UpdateFailed(f"engine {engine} accepts no weights of kind {manifest.kind}: publish full versions")
    if manifest.version != version:
        raise UpdateFailed(f"engine {engine} can't install version {version}: the manifest is of {manifest.version}")


def host_tensors(engine: str, tensors: TensorSource) -> Staging:
    """The tensors in host memory. Raises: UpdateFailed for another source; `engine` names the engine."""
    if isinstance(tensors, DirectSource):
        raise UpdateFailed(f"engine {engine} can't receive weights over {tensors.transport}: send them by host memory")
    return tensors


def refuse_group(engine: str, group: Form) -> UpdateFailed:
    """The error for an engine without a direct transport; `engine` names it."""
    return UpdateFailed(f"engine {engine} can't join a group of transport {group.transport}: send by host memory")


@dataclass(frozen=True)
class PromptLimits:
    """What the model can read: token ids below `vocabulary`, `context` of them together with the answer's."""

    vocabulary: int
    context: int

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises: RequestRefused."""
        if not token_ids:
            raise RequestRefused("the prompt is empty: there is nothing to go on from")
        if len(token_ids) >= self.context:
            raise RequestRefused(
                f"a prompt of {len(token_ids)} tokens leaves no room for an answer: the maximum context length is "
                f"{self.context} (rollout.engine.max_model_len)"
            )
        check_vocabulary(token_ids, self.vocabulary)


def check_vocabulary(token_ids: Sequence[int], vocabulary: int) -> None:
    """Raises: RequestRefused. Asked here: an engine without a tokenizer may die of a token that it does not know."""
    strange = [token for token in token_ids if not 0 <= token < vocabulary]
    if strange:
        raise RequestRefused(f"token {strange[0]} is not in the model's vocabulary of {vocabulary}: wrong tokenizer?")


def check_positions(config: RunConfig, text: PreTrainedConfig, folder: Path) -> None:
    """Raises: ConfigError when the model in `folder`, whose text part is `text`, has too few learned positions."""
    positions = getattr(text, "max_position_embeddings", None)
    rotary = getattr(text, "rope_parameters", None) is not None  # these end nowhere
    if positions is not None and not rotary and positions < config.rollout.engine.max_model_len:
        raise ConfigError(
            f"rollout.engine.max_model_len={config.rollout.engine.max_model_len} is more than the {positions} "
            f"positions of {folder}; lower it"
        )
