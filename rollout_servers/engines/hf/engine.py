"""The engine `hf`: transformers' forward pass in a thread of the rollout server."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from slipstream.buffer.wire.weights.protocol import Form, Manifest
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import (
    Completion,
    Generation,
    Pressure,
    PromptLimits,
    TensorSource,
    check_update,
    host_tensors,
    refuse_group,
)
from slipstream.rollout_servers.engines.hf.batch import Batch, Request, Stepper
from slipstream.rollout_servers.engines.hf.model import Policy
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.engines.thread import EngineThread

TOLERANCE = {"float32": 1e-2, "bfloat16": 0.1}
"""Mean |Δ| of log-probs: above what rounding does, and below what a model does that looks at its padding."""

_LONG, _SHORT = 12, 5  # tokens


def check_padding(policy: Policy, *, dtype: str) -> None:
    """Generates a token for two sequences of different lengths.

    Raises: ConfigError if the model finds the next ones likelier, or less likely, than without padding and cache.
    """
    sequences = [[place % policy.vocabulary for place in range(3, 3 + length)] for length in (_LONG, _SHORT)]
    batch, first_BV = Batch.of(policy, sequences)
    next_tokens = first_BV.argmax(-1).tolist()
    found_B2V = torch.stack([first_BV, batch.advance(next_tokens)], dim=1).log_softmax(-1)
    expected_B2V = torch.stack(
        [policy.distributions([*each, token])[-2:] for each, token in zip(sequences, next_tokens, strict=True)]
    )
    off = (found_B2V - expected_B2V).abs().mean().item()
    if not off <= TOLERANCE[dtype]:  # NaN neither
        raise ConfigError(
            f"the model's log-probs are off by {off:.2g} when it runs in a padded batch, so "
            "rollout.engine.name=hf can't serve it; choose another engine"
        )


class HfEngine:
    """transformers in one engine thread.

    Attributes:
        generation: how answers are drawn from now on.
        shares_memory: no; the engine lives in this process.
        direct: there is none.
    """

    shares_memory = False
    direct = None

    def __init__(self, config: RunConfig, model: Path, generation: Generation) -> None:
        self._config = config
        self._folder = model
        self.generation = generation
        self._thread = EngineThread("transformers", self._loaded, deadline_s=2 * config.weights.deadline_s)

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: ConfigError when it is not made for the configuration, EngineError when it can't be loaded or that
        takes longer than `rollout.engine.start_deadline_s`.
        """
        engine = cls(config, model, generation)
        await engine._thread.start(deadline_s=config.rollout.engine.start_deadline_s)
        return engine

    @property
    def version(self) -> int:
        """The policy version that new tokens come from."""
        return self._stepped.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        """As `Engine.generate` says."""
        self._limits.check(prompt_ids)
        room = self._limits.context - len(prompt_ids)
        request = Request(
            prompt_ids,
            self.generation,
            samples=samples,
            greedy=greedy,
            max_tokens=min(room, max_tokens or self.generation.max_tokens),
        )
        return await self._thread.ask(request, lambda: self._stepped.add(request), deadline_s=deadline_s)

    async def join(self, group: Form) -> None:
        """Raises: UpdateFailed."""
        raise refuse_group("hf", group)

    async def install(self, version: int, manifest: Manifest, tensors: TensorSource) -> float:
        """As `Engine.install`, but the pause is without the recomputation, which is generation's next step.

        A cache that can't be joined is recomputed with the next request, even with `weights.keep_stale_kv`.
        """
        check_update("hf", version, manifest)
        staging = host_tensors("hf", tensors)
        return await self._thread.call(lambda: self._install(manifest, staging))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1.

        Raises: RequestRefused, EngineError.
        """
        self._limits.check(token_ids)
        return await self._thread.call(lambda: self._stepped.policy.score(list(token_ids)))

    async def checksums(self) -> dict[str, int]:
        """xxh3 (64 bits) of the model's parameters, by name; tied ones come once. Raises: EngineError."""
        return await self._thread.call(self._stepped.checksums)

    async def pressure(self) -> Pressure:
        """`kv_cache_usage` is the share of `max_sequences` times `max_model_len` tokens that the running answers have.

        Raises: EngineError.
        """
        limits = self._config.rollout.engine
        tokens = await self._thread.call(lambda: self._stepped.tokens)
        return Pressure(kv_cache_usage=tokens / (limits.max_sequences * limits.max_model_len), preemptions=0)

    async def close(self) -> None:
        """Ends the engine thread and frees the model; whoever still waits hears of it."""
        await self._thread.close()

    # --- in the engine thread -------------------------------------------------------------------------------------

    @contextmanager
    def _loaded(self) -> Iterator[Stepper]:
        with torch.inference_mode():
            policy = Policy(self._config, self._folder)
            check_padding(policy, dtype=self._config.model.dtype)
            limits = self._config.rollout.engine
            self._limits = PromptLimits(vocabulary=policy.vocabulary, context=limits.max_model_len)
            self._stepped = Stepper(policy, max_sequences=limits.max_sequences, seed=self._config.run.seed)
            yield self._stepped
            self._stepped.close()

    def _install(self, manifest: Manifest, staging: Staging) -> float:
        paused_at = time.perf_counter()
        self._stepped.policy.install(manifest, staging)
        self._stepped.version = manifest.version
        if not self._config.weights.keep_stale_kv:
            self._stepped.recompute()
        return time.perf_counter() - paused_at
