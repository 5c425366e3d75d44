"""vLLM's engine stepped in a thread of the rollout server: no serialisation between server and engine core."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from vllm import SamplingParams
from vllm.outputs import RequestOutput

from slipstream.buffer.wire.weights import Manifest
from slipstream.configs.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers.engines.base import Completion, Generation, Pressure
from slipstream.rollout_servers.engines.thread import EngineThread
from slipstream.rollout_servers.engines.vllm.arguments import SCORED_FIRST, engine_arguments, has_gpu
from slipstream.rollout_servers.engines.vllm.convert import (
    completions,
    prompt_logprobs,
    sampling_params,
    scoring_params,
    token_prompt,
)
from slipstream.rollout_servers.engines.vllm.stepped import SteppedEngine
from slipstream.rollout_servers.weights.staging import Staging


class InlineEngine:
    """vLLM in one engine thread.

    Attributes:
        generation: how answers are drawn from now on.
        shares_memory: no; the engine lives in this process.
        direct: there is none.
    """

    shares_memory = False
    direct = None

    def __init__(self, config: RunConfig, model: Path, generation: Generation) -> None:
        self.generation = generation
        self._arguments = engine_arguments(config, model, gpu=has_gpu())
        self._keep_stale_kv = config.weights.keep_stale_kv
        if self._keep_stale_kv:
            # Between two steps vLLM would be at the next tokens already, and stamp them with the version after theirs.
            self._arguments["async_scheduling"] = False
        self._request_numbers = itertools.count()
        self._thread = EngineThread("vLLM", self._loaded, deadline_s=2 * config.weights.deadline_s)

    @classmethod
    async def start(cls, config: RunConfig, model: Path, generation: Generation) -> Self:
        """Loads the model.

        Raises: ConfigError when the configuration asks for what this engine can't do; EngineError when it does not
        start, or takes longer than `rollout.engine.start_deadline_s`.
        """
        _check(config)
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
        params = sampling_params(self.generation, samples=samples, greedy=greedy, max_tokens=max_tokens)
        return completions(await self._ask(prompt_ids, params, deadline_s=deadline_s))

    async def install(self, manifest: Manifest, staging: Staging) -> float:
        """Makes the staged version the one that generates; running requests go on, their KV cache is recomputed.

        With `weights.keep_stale_kv` it is not: the stall is shorter, but what the old weights made of the tokens so
        far stays in the cache, and the log-probs of all later tokens of these answers are then of neither version.

        Returns: seconds that generation stood still.
        Raises: UpdateFailed while the model is whole, EngineError once it is in pieces.
        """
        tensors = list(staging.named_tensors(manifest))
        keep = self._keep_stale_kv
        return await self._thread.call(lambda: self._stepped.install(manifest.version, tensors, keep_stale_kv=keep))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log-prob of each token but the first, given those before it, at temperature 1.

        Raises: RequestRefused, EngineError.
        """
        return prompt_logprobs(await self._ask(token_ids, scoring_params(), deadline_s=None, priority=SCORED_FIRST))

    async def checksums(self) -> None:
        """vLLM fuses and prepacks the tensors that it is given."""

    async def pressure(self) -> Pressure:
        """As of now; what an update preempts is not counted. Raises: EngineError."""
        # In the thread, though any could look: nobody else would notice an engine that hangs.
        return await self._thread.call(lambda: self._stepped.pressure)

    async def close(self) -> None:
        """Ends the engine thread and frees the model; whoever still waits hears of it."""
        await self._thread.close()

    @contextmanager
    def _loaded(self) -> Iterator[SteppedEngine]:
        self._stepped = SteppedEngine(self._arguments)
        try:
            yield self._stepped
        finally:
            self._stepped.close()

    async def _ask(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, deadline_s: float | None, priority: int = 0
    ) -> RequestOutput:
        prompt = token_prompt(prompt_ids, vocabulary=self._stepped.vocabulary)
        request = str(next(self._request_numbers))
        return await self._thread.ask(
            request, lambda: self._stepped.add(request, prompt, params, priority), deadline_s=deadline_s
        )


def _check(config: RunConfig) -> None:
    """Raises: ConfigError when the configuration asks for what this engine can't do."""
    for option in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if config.rollout.engine.options.get(option, 1) > 1:
            raise ConfigError(
                f"rollout.engine.core=inline runs in one process (rollout.engine.options.{option}="
                f"{config.rollout.engine.options[option]}); set rollout.engine.core=process"
            )
    if config.weights.keep_stale_kv and config.rollout.engine.options.get("async_scheduling"):
        raise ConfigError(
            "rollout.engine.core=inline can't tell which version a token came from with weights.keep_stale_kv and "
            "rollout.engine.options.async_scheduling=true; leave that option out, or set rollout.engine.core=process"
        )
