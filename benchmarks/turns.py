"""Episodes of several turns with a tool: beside single turns of the same lengths, and beside agents of the gateway.

A tiny chat model answers with random lengths; after each answer a tool takes its time. The rollout server's player and
engine run in this process, agents in another. Single turns are the requests that the episodes made, one after the
other, so that vLLM finds nearly all of their prompts in its cache. All cases take turns; each is measured while it is
in full swing, from the middle of its episodes on.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import uvloop

from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.turns_agent import OBSERVATION, TOOL_S, TURNS
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import Action, AgentEndpoint, Split, Task, Turn
from slipstream.models.tiny import TEXT, build_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.scorer import Scorer
from slipstream.rollout_servers.engines.base import Completion, Engine, Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.rollouts.gateway.listener import serving
from slipstream.rollout_servers.rollouts.player import Player
from slipstream.rollout_servers.tally import Tally
from slipstream.tools.cli import at_least

PROMPT = [{"role": "user", "content": "Use the tool until you know."}]
DELTA_TOKENS = 64
"""At least as many as the chat template puts between two answers."""
DEADLINE_S = 600.0
END_S = 10.0
SHARE = Goal(">=", 0.9)
CPU_MS = Goal("<", 1.0)

Work = Callable[[], Coroutine[Any, Any, None]]

SINGLE, EPISODES, MORE, AGENTS = "single turns", "episodes", "more episodes", "agents"


@dataclass(frozen=True)
class ToolTasks:
    """Tasks whose episodes have `turns` turns; that of index `i` has `i + 1`, so that episodes begin at all phases."""

    turns: int
    tool_s: float

    def size(self, split: Split) -> int:
        """As many as there are numbers of turns."""
        return self.turns

    def task(self, split: Split, index: int) -> Task:
        """A task."""
        return Task(prompt=PROMPT, reference="", info={TURNS: index + 1, TOOL_S: self.tool_s})

    def fingerprint(self) -> str:
        """Not compared."""
        return ""


class NativeTasks(ToolTasks):
    """Played by sessions."""

    def session(self, task: Task) -> "ToolSession":
        """An episode."""
        return ToolSession(task.info[TURNS], self.tool_s)


class ToolSession:
    """An episode with a tool."""

    def __init__(self, turns: int, tool_s: float) -> None:
        self._left, self._tool_s = turns, tool_s

    async def reset(self) -> Sequence[Mapping[str, Any]]:
        """The prompt."""
        return PROMPT

    async def step(self, action: Action) -> Turn:
        """The tool's result."""
        self._left -= 1
        await asyncio.sleep(self._tool_s)
        return Turn([{"role": "user", "content": OBSERVATION}], done=self._left == 0)

    async def close(self) -> None:
        """Holds nothing."""


class AgentTasks(ToolTasks):
    """Played by agents from outside."""

    from_outside, needs_reward = True, True

    async def run_agent(self, task: Task, endpoint: AgentEndpoint) -> float | None:
        """Never called."""
        raise NotImplementedError


@dataclass(frozen=True)
class Count:
    """Totals, or the difference of two."""

    wall_s: float
    calls: int
    tokens: int
    steps: int
    step_s: float
    """Time of the engine's steps."""
    cpu_s: float
    """CPU time of the process: all but the agents'."""
    loop_cpu_s: float
    """CPU time of the thread with the server's event loop: all but engine and env."""
    prompt_tokens: int
    cached_tokens: int

    def since(self, first: Self) -> "Count":
        """The difference to an earlier count."""
        return Count(*(getattr(self, each.name) - getattr(first, each.name) for each in fields(self)))

    def plus(self, other: Self) -> "Count":
        """The sum of two differences."""
        return Count(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class MeteredEngine:
    """An engine whose answers have random lengths, and whose steps are counted.

    Attributes:
        requests: those that were made, in their order; None: they are not kept.
    """

    def __init__(self, engine: RestartingEngine, stepped: Any, *, least: int, most: int) -> None:
        """`stepped`: what the engine's thread steps; None: it steps in a process of its own, uncounted."""
        self.engine = engine
        self.requests: list[Request] | None = None
        self.tally = Tally()
        self._lengths, self._least, self._most = random.Random(0), least, most
        self._calls = self._prompt_tokens = self._cached_tokens = self._steps = 0
        self._step_s = 0.0
        self._awaited, self._reached = 0, asyncio.Event()
        if stepped is not None:
            self._step = stepped.step
            stepped.step = self._timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def _timed(self) -> Any:
        began = time.perf_counter()
        finished = self._step()
        self._steps += 1
        self._step_s += time.perf_counter() - began
        return finished

    async def generate(self, request: Request) -> list[Completion]:
        """An answer of a random length."""
        request = replace(request, max_tokens=self._lengths.randint(self._least, self._most))
        if self.requests is not None:
            self.requests.append(replace(request, prompt_ids=tuple(request.prompt_ids)))
        return await self.answer(request)

    async def answer(self, request: Request) -> list[Completion]:
        """The answer to a request."""
        (answer,) = answers = await self.engine.generate(request)
        self._calls += 1
        if self._calls == self._awaited:
            self._reached.set()
        self._prompt_tokens += len(request.prompt_ids)
        self._cached_tokens += answer.cached_tokens
        return answers

    def count(self) -> Count:
        """The totals, tokens of unfinished answers included; in the event loop's thread."""
        return Count(
            wall_s=time.perf_counter(),
            calls=self._calls,
            tokens=self.tally.sampled,
            steps=self._steps,
            step_s=self._step_s,
            cpu_s=time.process_time(),
            loop_cpu_s=time.thread_time(),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    async def window(self, *, after: int, calls: int) -> Count:
        """The difference over so many answers, after so many from now on."""
        await self._more(after)
        first = self.count()
        await self._more(calls)
        return self.count().since(first)

    async def _more(self, calls: int) -> None:
        """Returns after so many answers."""
        self._awaited = self._calls + calls
        self._reached.clear()
        await self._reached.wait()


class Measurement:
    """The cases on one engine."""

    def __init__(self, config: RunConfig, model: Path, engine: MeteredEngine, options: argparse.Namespace) -> None:
        self._config, self._options, self._engine = config, options, engine
        self._tool_s = options.tool_ms / 1000
        self._tokenizer = Tokenizer(model)
        self._requests: list[Request] = []

    def _player(self, env: ToolTasks) -> Player:
        scorer = Scorer(self._config.rewards, self._config.scoring, evaluated=self._config.evaluated)
        engine: Any = self._engine
        return Player.from_config(self._config, env, self._tokenizer, engine, scorer)

    async def run(self, case: str) -> Count:
        """Measures a case once. Raises: EngineError."""
        options = self._options
        if case == SINGLE:
            return await self._single_turns(options.episodes)
        at_once = options.episodes if case == EPISODES else options.sessions
        player = self._player((AgentTasks if case == AGENTS else NativeTasks)(options.turns, self._tool_s))
        # Until most of the first episodes, which have all numbers of turns, have ended.
        after = at_once * options.turns * 3 // 4
        workers = [self._playing(player, number % options.turns) for number in range(at_once)]
        async with (
            serving(player.gateway, self._config, case),
            _working(workers),
            _agents(self._config.paths.gateways / f"{case}.json", at_once if case == AGENTS else 0),
        ):
            if case != EPISODES:
                return await self._engine.window(after=after, calls=options.calls)
            self._engine.requests = kept = list[Request]()
            found = await self._engine.window(after=after, calls=options.calls)
            self._engine.requests, self._requests = None, kept[-options.calls :]
            return found

    def _playing(self, player: Player, first: int) -> Work:
        """Plays one episode after the other, the first of the task `first`."""

        async def work() -> None:
            index = first
            while True:
                await player.generate("train", index, samples=1, tally=self._engine.tally)
                index = self._options.turns - 1

        return work

    async def _single_turns(self, at_once: int) -> Count:
        """Answers the requests that the episodes have made."""
        pending = list(reversed(self._requests))

        async def work() -> None:
            while pending:
                with self._engine.tally.part() as tally:
                    await self._engine.answer(replace(pending.pop(), tally=tally))

        async with _working([work] * at_once):
            return await self._engine.window(after=at_once, calls=len(self._requests) - 2 * at_once)


@asynccontextmanager
async def _working(workers: Sequence[Work]) -> AsyncIterator[None]:
    """While these work; they are cancelled at the end. Raises: what one of them raises."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(worker()) for worker in workers]
        yield
        for task in running:
            task.cancel()


@asynccontextmanager
async def _agents(gateway: Path, count: int) -> AsyncIterator[None]:
    """While so many agents play in a process of their own, if any."""
    if not count:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.turns_agent", str(gateway), str(count)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield
    finally:
        process.terminate()
        async with asyncio.timeout(END_S):
            await process.wait()


def run_config(model: Path, folder: Path, options: argparse.Namespace) -> RunConfig:
    """A run whose engine is in this process."""
    tokens = options.turns * (options.most + DELTA_TOKENS)
    engine = {
        "name": options.engine,
        "max_model_len": tokens + DELTA_TOKENS,
        "max_sequences": options.episodes,
        **({"core": options.core, "options": {"block_size": options.block_tokens}} if options.engine == "vllm" else {}),
    }
    return RunConfig.model_validate(
        {
            "run": {"dir": folder},
            "model": {"path": model, "dtype": "float32"},
            "rewards": [{"name": "none"}],
            "scoring": {"workers": 0},
            "rollout": {
                "group_size": 1,
                "group_deadline_s": DEADLINE_S,
                "sampling": {"max_tokens": options.most, "ignore_eos": True},
                "episode": {"tokens": tokens},
                "engine": engine,
            },
            "buffer": {"ticket_deadline_s": 2 * DEADLINE_S},
            "learner": {"advantage": "reinforce_plus_plus", "wait_deadline_s": 2 * DEADLINE_S},
        }
    )


async def measure_cases(config: RunConfig, model: Path, options: argparse.Namespace) -> dict[str, list[Count]]:
    """The measurements of every case, in turns."""

    async def start() -> Engine:
        return await start_engine(config, model, eos_token_ids=())

    inner: Any = await start()
    engine = RestartingEngine(inner, start, config.rollout)
    found = defaultdict[str, list[Count]](list)
    try:
        is_apart = config.rollout.engine.name == "vllm" and options.core == "process"
        stepped = None if is_apart else inner._stepped
        metered = MeteredEngine(engine, stepped, least=options.least, most=options.most)
        measurement = Measurement(config, model, metered, options)
        for case in interleave(options.rounds, (EPISODES, SINGLE, MORE, AGENTS)):
            found[case].append(count := await measurement.run(case))
            print(f"{case}: {count.tokens / count.wall_s:,.0f} tokens/s", file=sys.stderr, flush=True)
    finally:
        await engine.close()
    return found


def figures_of(found: Mapping[str, Sequence[Count]], options: argparse.Namespace) -> list[Figure]:
    """Figures of all rounds together."""
    totals = {case: reduce(Count.plus, counts) for case, counts in found.items()}
    places = options.episodes
    names = {
        SINGLE: f"{places} single turns",
        EPISODES: f"{places} episodes",
        MORE: f"{options.sessions} episodes on {places} places",
        AGENTS: f"{options.sessions} agents on {places} places",
    }
    figures = list[Figure]()
    for case, total in totals.items():
        figures += [
            Figure(f"{names[case]}: speed", total.tokens / total.wall_s, "tokens/s"),
            Figure("  per CPU second", total.tokens / total.cpu_s, "tokens"),
            *step_figures(total),
            Figure("  CPU of the server per call", cpu_ms(total), "ms"),
            Figure("  prompt tokens from the prefix cache", total.cached_tokens / total.prompt_tokens),
        ]
    for case, other in ((EPISODES, SINGLE), (MORE, SINGLE), (AGENTS, MORE)):
        one, two = totals[case], totals[other]
        figures += [
            Figure(
                f"{names[case]} / {names[other]}: speed", one.tokens / one.wall_s / (two.tokens / two.wall_s), "", SHARE
            ),
            Figure("  per CPU second", one.tokens / one.cpu_s / (two.tokens / two.cpu_s)),
        ]
        if one.steps:
            figures.append(Figure("  tokens per step", one.tokens / one.steps / (two.tokens / two.steps)))
    overhead_ms = cpu_ms(totals[AGENTS]) - cpu_ms(totals[MORE])
    return [*figures, Figure("  overhead of the gateway, CPU per call", overhead_ms, "ms", CPU_MS)]


def step_figures(total: Count) -> list[Figure]:
    """The engine's steps, if they were counted."""
    if not total.steps:
        return []
    return [
        Figure("  tokens per step", total.tokens / total.steps),
        Figure("  engine busy", total.step_s / total.wall_s),
        Figure("  step", 1000 * total.step_s / total.steps, "ms"),
    ]


def cpu_ms(count: Count) -> float:
    """CPU time of the server's thread per answer."""
    return 1000 * count.loop_cpu_s / count.calls


def add_options(parser: argparse.ArgumentParser) -> None:
    """Size of the episodes, the engine."""
    add, positive = parser.add_argument, at_least(1)
    add("--engine", choices=("vllm", "hf"), default="vllm", help="the engine")
    add("--core", choices=("inline", "process"), default="inline", help="vLLM in this process, or one of its own")
    add("--episodes", type=positive, default=64, help="in flight, as many as the engine runs answers at once")
    add("--sessions", type=positive, default=100, help="episodes and agents in flight of the other cases")
    add("--turns", type=positive, default=10, help="of an episode")
    add("--tool-ms", type=float, default=50.0, help="time of the tool, in each turn")
    add("--least", type=positive, default=16, help="tokens of the shortest answer")
    add("--most", type=positive, default=112, help="tokens of the longest answer")
    add("--block-tokens", type=positive, default=128, help="of a block of vLLM's KV cache")
    add("--calls", type=positive, default=640, help="answers in each case and round")
    add("--rounds", type=positive, default=2, help="of all cases, in turns")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures. Raises: ConfigError for too few answers."""
    if options.calls <= 2 * options.episodes:
        raise ConfigError(f"--calls {options.calls} must be more than twice --episodes {options.episodes}")
    with TemporaryDirectory(prefix="slipstream-bench-") as folder:
        model = Path(folder) / "model"
        build_model(model, TEXT, seed=0)
        found = uvloop.run(measure_cases(run_config(model, Path(folder), options), model, options))
    figures.show(*figures_of(found, options))
    return {case: [asdict(count) for count in counts] for case, counts in found.items()}
