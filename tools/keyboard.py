"""An engine whose answers are lines that a user types."""

import asyncio
from collections.abc import Sequence
from typing import TextIO

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.base import (
    BaseEngine,
    Completion,
    EngineError,
    Generation,
    Pressure,
    Request,
    UpdateFailed,
)
from slipstream.rollout_servers.engines.staging import Staging


class KeyboardEngine(BaseEngine):
    """Shows what is new in a context, and takes one line as the answer, ended by the tokenizer's stop token."""

    name = "keyboard"

    def __init__(self, tokenizer: Tokenizer, lines: TextIO, screen: TextIO) -> None:
        super().__init__(Generation(max_tokens=1, temperature=1.0, ignore_eos=False, stop_token_ids=()))
        self._tokenizer = tokenizer
        self._lines, self._screen = lines, screen
        self._seen: list[int] = []
        self._turn = asyncio.Lock()

    @property
    def version(self) -> int:
        return 0

    async def generate(self, request: Request) -> list[Completion]:
        async with self._turn:
            return [await self._answer(request) for _ in range(request.samples)]

    async def _answer(self, request: Request) -> Completion:
        context = list(request.prompt_ids)
        known = len(self._seen) if context[: len(self._seen)] == self._seen else 0
        print(self._tokenizer.decode([context[known:]])[0], file=self._screen)
        print("> ", end="", file=self._screen, flush=True)
        line = await run_in_thread(self._lines.readline)
        if not line:
            raise EngineError("the standard input has ended, and the episode has not")
        ids = self._tokenizer.encode_observation(line.rstrip("\n"))
        ids += self._tokenizer.eos_token_ids[:1]
        most = request.max_tokens or len(ids)
        ids, reason = ids[:most], "stop" if len(ids) <= most else "length"
        self._seen = [*context, *ids]
        span = VersionSpan(version=0, start=0, end=len(ids))
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), spans=[span], finish_reason=reason)

    async def _load(self, manifest: Manifest, staging: Staging) -> float:
        raise UpdateFailed("a keyboard has no weights")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise EngineError("a keyboard has no log-probs")

    async def pressure(self) -> Pressure:
        return Pressure(kv_cache_usage=0.0, preemptions=0)

    async def close(self) -> None:
        """Holds nothing."""
