"""The real rollout server, with a drawn limit of tokens for each answer."""

import asyncio
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slipstream.configs.schema import RunConfig
from slipstream.rollout_servers import cli
from slipstream.rollout_servers.engines import registry
from slipstream.rollout_servers.engines.base import Completion, Engine, Request

LENGTHS_VARIABLE = "SLIPSTREAM_BENCH_LENGTHS"
"""Name of the distribution of lengths, in the environment of this process."""
MEAN_TOKENS = 64
MOST_TOKENS = 512
SIGMA = 1.0
"""Standard deviation of the logarithm of the lengths."""
Lengths = Literal["fixed", "log-normal"]


def draw(distribution: Lengths, answers: int, rng: np.random.Generator) -> list[int]:
    """Lengths in tokens: all MEAN_TOKENS, or log-normal with this mean, at least 1 and at most MOST_TOKENS."""
    if distribution == "fixed":
        return [MEAN_TOKENS] * answers
    drawn = rng.lognormal(math.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, answers)
    return [int(length) for length in drawn.round().clip(1, MOST_TOKENS)]


def limit_lengths(engine: Any, distribution: Lengths, *, seed: int) -> None:
    """Makes an engine generate each answer as a request of its own, which ends after a drawn number of tokens.

    Servers with the same seed draw the same lengths, in the order of the requests.
    """
    generate, rng = engine.generate, np.random.default_rng(seed)

    async def limited(request: Request) -> list[Completion]:
        lengths = draw(distribution, request.samples, rng)
        answers = [generate(replace(request, samples=1, max_tokens=tokens)) for tokens in lengths]
        return [completion for (completion,) in await asyncio.gather(*answers)]

    engine.generate = limited


def main() -> None:
    """Entry point; arguments are those of the rollout server."""
    distribution: Any = os.environ[LENGTHS_VARIABLE]
    start_engine = registry.start_engine

    async def start_limited(config: RunConfig, model: Path, *, eos_token_ids: tuple[int, ...]) -> Engine:
        engine = await start_engine(config, model, eos_token_ids=eos_token_ids)
        limit_lengths(engine, distribution, seed=0)
        return engine

    registry.start_engine = start_limited
    cli.main()


if __name__ == "__main__":
    main()
