"""Episodes of several turns against single turns of the same lengths: `python -m slipstream.tools.bench.episodes`.

A tiny model answers at once in `--episodes` sessions of `--turns` turns, each of which waits `--tool-ms` for a tool.
The same requests without sessions and tools, one after the other in as many tasks, are the single turns. Two rounds of
each in turns; the first of each warms up.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import configure_logging
from slipstream.env.base import Action, Split, Task, Turn
from slipstream.models.digits import build_digits_model
from slipstream.rollout_servers.engines.base import Completion, Engine, Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.rollouts.base import Policy
from slipstream.rollout_servers.rollouts.multi_turn import MultiTurn
from slipstream.rollout_servers.tokenizer import Tokenizer
from slipstream.tools.bench.figures import Figure, Figures, Goal

OBSERVATION = "12345r"
DEADLINE_S = 600.0
ROUNDS = 3
"""Episodes of each task: towards the end of the last ones fewer are played at once."""
SHARE = Goal(">=", 0.9)


class ToolEpisodes:
    """An env whose sessions wait for a tool in every turn."""

    def __init__(self, turns: int, tool_s: float) -> None:
        self.turns, self.tool_s = turns, tool_s

    def size(self, split: Split) -> int:
        """One task."""
        return 1

    def task(self, split: Split, index: int) -> Task:
        """The task."""
        return Task(prompt=OBSERVATION, reference="")

    def fingerprint(self) -> str:
        """Not compared."""
        return ""

    def session(self, task: Task) -> "ToolSession":
        """An episode."""
        return ToolSession(self)


class ToolSession:
    """One episode."""

    def __init__(self, env: ToolEpisodes) -> None:
        self._env, self._turns = env, 0

    async def reset(self) -> str:
        """The prompt."""
        return OBSERVATION

    async def step(self, action: Action) -> Turn:
        """The tool's result."""
        self._turns += 1
        await asyncio.sleep(self._env.tool_s)
        return Turn(OBSERVATION, done=self._turns == self._env.turns)

    async def close(self) -> None:
        """Nothing is held."""


class RecordedEngine:
    """An engine whose answers have random lengths and end with `stop`.

    Attributes:
        requests: those that were answered, in their order.
    """

    def __init__(self, engine: Engine, *, least: int, most: int) -> None:
        self.engine, self.requests = engine, list[Request]()
        self._lengths, self._least, self._most = random.Random(0), least, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: Request) -> list[Completion]:
        """An answer of a random length."""
        chosen = replace(
            request, prompt_ids=tuple(request.prompt_ids), max_tokens=self._lengths.randint(self._least, self._most)
        )
        self.requests.append(chosen)
        return [replace(answer, finish_reason="stop") for answer in await self.engine.generate(chosen)]


async def episodes(config: RunConfig, engine: RecordedEngine, env: ToolEpisodes, at_once: int, model: Path) -> float:
    """Plays `ROUNDS` episodes one after the other in each of `at_once` tasks. Returns tokens/s."""
    rollout, tokens = MultiTurn(env, Policy(engine, Tokenizer(model), config.rollout)), 0

    async def work() -> None:
        nonlocal tokens
        for _ in range(ROUNDS):
            until = asyncio.get_running_loop().time() + DEADLINE_S
            played = await rollout.play(env.task("train", 0), samples=1, greedy=False, until=until)
            assert len(played.episodes) == 1, played.failure
            tokens += played.episodes[0].action_tokens

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())
    elapsed_s = time.perf_counter() - started
    rollout.close()
    return tokens / elapsed_s


async def single_turns(engine: Engine, requests: Sequence[Request], at_once: int) -> float:
    """Answers the same requests, `at_once` at a time. Returns tokens/s."""
    pending, tokens = list(reversed(requests)), 0

    async def work() -> None:
        nonlocal tokens
        while pending:
            (answer,) = await engine.generate(pending.pop())
            tokens += len(answer.token_ids)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())
    return tokens / (time.perf_counter() - started)


async def measure(argv: Sequence[str]) -> None:
    """Measures and prints."""
    arguments = _parser().parse_args(argv)
    configure_logging("bench", level="warning", folder=None)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build_digits_model(model, seed=0)
        tokens = arguments.turns * (arguments.most + len(OBSERVATION))
        settings = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": tokens + 64}))
        config = RunConfig.model_validate(
            {
                "run": {"dir": folder},
                "model": {"path": model, "dtype": "float32"},
                "rollout": {
                    "sampling": {"max_tokens": arguments.most, "ignore_eos": True},
                    "episode": {"tokens": tokens},
                    "engine": {
                        "name": arguments.engine, "core": "inline", "max_model_len": tokens + 64,
                        "max_sequences": arguments.episodes,
                    },
                },
            }
        )  # fmt: skip
        engine = await start_engine(config, model, eos_token_ids=())
        try:
            recorded = RecordedEngine(engine, least=arguments.least, most=arguments.most)
            env = ToolEpisodes(arguments.turns, arguments.tool_ms / 1000)
            for _ in range(2):
                recorded.requests.clear()
                several = await episodes(config, recorded, env, arguments.episodes, model)
                single = await single_turns(engine, recorded.requests, arguments.episodes)
        finally:
            await engine.close()
    title = f"{arguments.episodes} episodes of {arguments.turns} turns"
    Figures().show(
        [
            Figure(f"single turns, {arguments.engine}", single, "tokens/s"),
            Figure(f"{title}, tool of {arguments.tool_ms:g} ms", several, "tokens/s"),
            Figure("share", several / single, "", SHARE),
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--episodes", type=int, default=64, help="at once")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tool-ms", type=float, default=50.0)
    parser.add_argument("--least", type=int, default=16, help="tokens of the shortest answer")
    parser.add_argument("--most", type=int, default=112, help="tokens of the longest answer")
    return parser


def main() -> None:
    """Entry point."""
    try:
        asyncio.run(measure(sys.argv[1:]))
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
