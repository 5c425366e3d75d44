"""The interface of an inference engine: token ids in; token ids, log-probs and version spans out."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from slipstream.buffer.wire.messages import ExpertLayout, RoutedExperts, VersionSpan
from slipstream.buffer.wire.weights.fabric import LEARNER, TransferError
from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.configs.schema import RunConfig
from slipstream.models.architecture import placeholder_tokens
from slipstream.rollout_servers.engines.staging import HOST, Staging, join_rendezvous
from slipstream.rollout_servers.tally import Tally


@dataclass(frozen=True)
class Generation:
    """Sampling of every answer; with `ignore_eos` there are no stop tokens."""

    max_tokens: int
    temperature: float
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    banned: tuple[int, ...] = ()
    """Tokens of probability 0."""
    top_k: int | None = None
    """Number of most probable tokens that sampled answers are drawn from; None: all."""
    top_p: float = 1.0
    """Probability of the fewest of these that they are drawn from."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        config: of the run; its seed is that of the engine's sampling.
        model: the folder of the model, whose weights are version 0.
        eos_token_ids: tokens that end an answer.
    """

    config: RunConfig
    model: Path
    eos_token_ids: tuple[int, ...]

    @cached_property
    def generation(self) -> Generation:
        """Sampling of every answer."""
        sampling = self.config.rollout.sampling
        return Generation(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=() if sampling.ignore_eos else self.eos_token_ids,
            banned=placeholder_tokens(self.model),
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt.

    Attributes:
        encoded: the bytes that the env gave.
        pixels: the picture in RGB, of Pillow.
        start: index of the first of its placeholders in the prompt.
        tokens: number of its placeholders.
    """

    encoded: bytes
    pixels: Any
    start: int
    tokens: int


@dataclass(frozen=True)
class Request:
    """A request for `samples` answers to one prompt.

    Attributes:
        prompt_ids: with as many placeholders for each image as it has tokens.
        deadline_s: answers that are unfinished after so many seconds are cut short.
        greedy: the most probable tokens; of one sample only: others would be copies of it, which vLLM refuses to make.
        max_tokens: of an answer; None for the configured number.
        tally: counts the sampled tokens.
    """

    prompt_ids: Sequence[int]
    deadline_s: float
    samples: int = 1
    greedy: bool = False
    max_tokens: int | None = None
    images: Sequence[PromptImage] = ()
    tally: Tally = field(default_factory=Tally, compare=False)

    @property
    def compact_ids(self) -> list[int]:
        """The prompt with one placeholder for each image."""
        ids, end = list[int](), 0
        for image in self.images:
            ids += self.prompt_ids[end : image.start + 1]
            end = image.start + image.tokens
        return [*ids, *self.prompt_ids[end:]]


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        token_ids: the generated tokens, shape [T].
        logprobs: log-prob of each under the distribution that it was sampled from, shape [T].
        spans: policy version of the tokens; together the spans cover [0, T).
        finish_reason: `stop`, `length`, or `abort` if it was cut short; then T may be 0.
        routed_experts: of the prompt and of the answer but its last token, if the engine returns them.
        kept: ids of the tokens that top-k and top-p left to choose from, for each token; None: all were left.
        cached_tokens: of the prompt, those whose keys and values were not computed for this answer.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[VersionSpan]
    finish_reason: str
    routed_experts: RoutedExperts | None = None
    kept: Sequence[NDArray[np.int32]] | None = None
    cached_tokens: int = field(default=0, compare=False)


NOTHING = Completion(token_ids=(), logprobs=(), spans=(), finish_reason="abort")
"""An answer without a token."""


@dataclass(frozen=True)
class ExpertReader:
    """Reads the experts that an engine returns with its answers.

    Attributes:
        layers: numbers of the layers that have experts; engines return an entry for every layer.
    """

    layout: ExpertLayout
    layers: Sequence[int]

    @classmethod
    def of(cls, layers: Sequence[int], per_token: int, experts: int) -> Self:
        """The reader of a model. Raises: ConfigError when no layer has experts."""
        if not layers:
            raise ConfigError("learner.router_replay: the model has no experts; leave it out")
        return cls(ExpertLayout(layers=len(layers), per_token=per_token, experts=experts), layers)

    def read(self, rows: Any, *, tokens: int) -> RoutedExperts | None:
        """The experts of an answer, None if the engine has not returned those of all input tokens.

        Args:
            rows: array of shape [tokens - 1, all layers, per_token], or None.
            tokens: of prompt and answer.
        """
        if rows is None or len(rows) != tokens - 1:
            return None
        ids = np.ascontiguousarray(rows[:, self.layers], dtype=self.layout.dtype)
        return RoutedExperts(layout=self.layout, ids=ids.tobytes())


class EngineError(SlipstreamError):
    """The engine has crashed, unless this is a `RequestRefused` or an `UpdateFailed`.

    Attributes:
        unfinished: the answers of the failed request so far, one per sample, finished ones too; None if unknown.
    """

    def __init__(self, message: str, unfinished: Sequence[Completion] | None = None) -> None:
        super().__init__(message)
        self.unfinished = unfinished


class RequestRefused(EngineError):
    """The engine can't answer this request; it continues with the others."""


class UpdateFailed(EngineError):
    """The engine did not take the weights; it continues with those that it has."""


@dataclass(frozen=True)
class Pressure:
    """Load of an engine.

    Attributes:
        kv_cache_usage: used share of the KV cache, from 0 to 1.
        preemptions: requests that lost their KV cache for want of room, since the engine's start.
        running: answers that are being generated; 0 too from an engine that does not report them.
        waiting: answers that are not, for want of room.
    """

    kv_cache_usage: float
    preemptions: int
    running: int = 0
    waiting: int = 0


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
"""Source of a version's tensors: staged in memory, or broadcast by the learner."""


class Engine(Protocol):
    """An inference engine; safe to use from one event loop."""

    @property
    def version(self) -> int:
        """The policy version that new tokens come from; 0 after every start."""
        ...

    @property
    def shares_memory(self) -> bool:
        """True if weights must be staged in shared memory, because the engine's workers are other processes."""
        ...

    @property
    def direct(self) -> DirectTransport | None:
        """Transport by which the learner broadcasts to the engine's own workers; None where there is none."""
        ...

    @property
    def device(self) -> torch.device:
        """Device from whose memory `install` reads a staged version: a GPU if the engine uses it in this process."""
        ...

    async def generate(self, request: Request) -> list[Completion]:
        """The answers; cancelling aborts them all. Raises: RequestRefused, EngineError."""
        ...

    async def join(self, group: Form) -> None:
        """Enters a transfer group of `direct` with all workers; generation pauses while they connect.

        Raises: UpdateFailed, EngineError.
        """
        ...

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        """Makes `version` the one that generates: the only way in which weights reach an engine.

        A version is all weights or, with `model.lora`, an adapter of the initial model, which replaces the one before.
        Requests in flight continue, and their KV cache is recomputed. With `weights.keep_stale_kv` it is not: the pause
        is shorter, but log-probs of their later tokens then belong to neither version. With a `DirectSource` the pause
        includes the transfer, and cancelling costs the engine, because it may hold part of a version.

        Returns: the pause of generation in seconds. Raises: UpdateFailed while the engine still holds the version
        before, EngineError once it holds only part of one.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1.

        Raises: RequestRefused, EngineError.
        """
        ...

    async def checksums(self) -> dict[str, int] | None:
        """xxh3 (64 bits) of the engine's tensors, by name; tied ones come once. None where the engine changes them.

        Raises: EngineError.
        """
        ...

    async def pressure(self) -> Pressure:
        """The engine's load; preemptions by updates are not counted. Raises: EngineError, also when it hangs."""
        ...

    async def close(self) -> None:
        """Frees everything the engine holds; pending requests fail with EngineError."""
        ...


class DirectTransfer(Protocol):
    """Transfers of broadcast versions into an engine's own workers."""

    async def join(self, group: Form) -> None:
        """Enters a transfer group with all workers (`Engine.join`). Raises: UpdateFailed, EngineError."""
        ...

    async def install(self, manifest: Manifest, source: DirectSource) -> float:
        """Returns and raises: as `Engine.install`."""
        ...


class BaseEngine(ABC):
    """Behaviour that all engines share, and the defaults of one that takes weights from host memory only.

    Attributes:
        name: the engine in errors.
        generation: sampling of answers that start from now on.
    """

    name: ClassVar[str]
    shares_memory = False
    direct: DirectTransport | None = None
    device = HOST

    def __init__(self, generation: Generation, *, adapts: bool = False) -> None:
        """`adapts`: versions are adapters of the initial model."""
        self.generation = generation
        self._adapts = adapts
        self._transfer: DirectTransfer | None = None

    async def join(self, group: Form) -> None:
        if self._transfer is None:
            raise UpdateFailed(
                f"engine {self.name} can't join a group of transport {group.transport}: send by host memory"
            )
        await self._transfer.join(group)

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        if (manifest.adapter is not None) != self._adapts:
            taken, come = ("an adapter", "all weights") if self._adapts else ("all weights", "an adapter")
            raise UpdateFailed(
                f"engine {self.name} takes {taken}, and version {version} is {come}: give learner and servers the same "
                "model.lora"
            )
        if manifest.version != version:
            raise UpdateFailed(
                f"engine {self.name} can't install version {version}: the manifest is of {manifest.version}"
            )
        if not isinstance(tensors, DirectSource):
            return await self._load(manifest, tensors)
        if self._transfer is None:
            raise UpdateFailed(
                f"engine {self.name} can't receive version {version} over {tensors.transport}: send by host memory"
            )
        return await self._transfer.install(manifest, tensors)

    @abstractmethod
    async def _load(self, manifest: Manifest, staging: Staging) -> float:
        """Installs a staged version. Returns and raises: as `Engine.install`."""

    async def checksums(self) -> dict[str, int] | None:
        return None


@dataclass(frozen=True)
class PromptLimits:
    """Prompts that the model accepts: ids below `vocabulary`, `context` tokens together with the answer."""

    vocabulary: int
    context: int

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises: RequestRefused."""
        if not token_ids:
            raise RequestRefused("the prompt is empty: a request needs at least one token")
        if len(token_ids) >= self.context:
            raise RequestRefused(
                f"a prompt of {len(token_ids)} tokens leaves no room for an answer: the maximum context length is "
                f"{self.context} (rollout.engine.max_model_len)"
            )
        check_vocabulary(token_ids, self.vocabulary)


def check_vocabulary(token_ids: Sequence[int], vocabulary: int) -> None:
    """Raises: RequestRefused. An engine without a tokenizer may crash on an id that is out of range."""
    strange = [token for token in token_ids if not 0 <= token < vocabulary]
    if strange:
        raise RequestRefused(f"token {strange[0]} is not in the model's vocabulary of {vocabulary}: wrong tokenizer?")


def check_positions(context: int, text: PreTrainedConfig, folder: Path) -> None:
    """Raises: ConfigError when the model in `folder`, with text part `text`, learned fewer than `context` positions."""
    positions = getattr(text, "max_position_embeddings", None)
    rotary = getattr(text, "rope_parameters", None) is not None  # no limit
    if positions is not None and not rotary and positions < context:
        raise ConfigError(
            f"rollout.engine.max_model_len={context} is more than the {positions} positions of {folder}; lower it"
        )


async def await_rendezvous(form: Form, *, ranks: int) -> str:
    """Joins for an engine's workers, whose own wait nothing could end. Returns the id with which they connect.

    Raises: UpdateFailed.
    """
    left = threading.Event()

    def join() -> str:
        return join_rendezvous(form, ranks=ranks, left=left).get(LEARNER).decode()

    try:
        async with asyncio.timeout(form.deadline_s):
            return str(await run_in_thread(join))
    except (TransferError, RuntimeError) as error:  # the learner, which has the store, may crash
        raise UpdateFailed(str(error)) from None
    except TimeoutError:
        raise UpdateFailed(f"other members of transfer group {form.epoch} are missing") from None
    finally:
        left.set()
