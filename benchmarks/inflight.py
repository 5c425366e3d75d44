"""Groups in flight: fixed numbers beside `rollout.groups_in_flight: auto` from a bad start, with long-tailed lengths.

vLLM has a KV cache for some twenty groups. Each case runs for the same number of the engine's steps; all take turns.
Tokens per step do not depend on the machine's load: on a GPU, whose steps take about as long with more sequences, they
are the speed. Groups are compared by their age in steps, on which their staleness depends.
"""

import argparse
import asyncio
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.step import qwen3, write_model
from slipstream.configs import RunConfig
from slipstream.rollout_servers.concurrency import ConcurrencyLimiter
from slipstream.rollout_servers.engines.base import Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.tools.cli import at_least

GROUP_SIZE, PROMPT_TOKENS = 8, 64
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 48, 1.0, 512
"""Lengths of answers: log-normal, at most MOST_TOKENS."""
VOCABULARY, HEAD, KV_HEADS = 512, 64, 2
SEQUENCES = 512
READING_STEPS = 50
"""Steps between two readings of the engine's load: about the server's second, with steps of 20 ms."""
DEADLINE_S = 600.0
SHARE_OF_BEST = Goal(">=", 0.95)


@dataclass(frozen=True)
class Count:
    """Totals since the engine's start."""

    steps: int
    tokens: int
    wall_s: float
    cpu_s: float
    preemptions: int


@dataclass(frozen=True)
class Speed:
    """A case's speed in some of its steps."""

    tokens_per_step: float
    tokens_per_cpu_s: float
    tokens_per_s: float
    preemptions: float
    """Per 1,000 tokens."""

    @classmethod
    def between(cls, first: Count, last: Count) -> "Speed":
        """The speed between two counts."""
        tokens = last.tokens - first.tokens
        return cls(
            tokens_per_step=tokens / (last.steps - first.steps),
            tokens_per_cpu_s=tokens / (last.cpu_s - first.cpu_s),
            tokens_per_s=tokens / (last.wall_s - first.wall_s),
            preemptions=1000 * (last.preemptions - first.preemptions) / tokens,
        )


@dataclass(frozen=True)
class Result:
    """A case: its speed in all steps and in the second half, the mean age of its groups, the limit at each reading."""

    whole: Speed
    late: Speed
    age_steps: float
    limits: list[int] = field(default_factory=list)


class MeteredEngine:
    """vLLM in this process, which counts its steps and tokens."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.steps = 0
        self._tokens = 0
        self._step = engine._stepped.step
        engine._stepped.step = self._counted

    def _counted(self) -> Any:
        self.steps += 1
        return self._step()

    async def count(self) -> Count:
        """The totals, tokens of unfinished answers included."""
        scheduler = self.engine._stepped._scheduler

        def unfinished() -> int:
            return sum(request.num_output_tokens for request in list(scheduler.requests.values()))

        tokens = self._tokens + await self.engine._thread.call(unfinished)
        pressure = await self.engine.pressure()
        return Count(self.steps, tokens, time.monotonic(), time.process_time(), pressure.preemptions)

    async def group(self, number: int) -> int:
        """Generates the group of a number; returns its age in steps."""
        generator, began = random.Random(number), self.steps
        prompt = [generator.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        lengths = [round(generator.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)) for _ in range(GROUP_SIZE)]
        await asyncio.gather(*(self._answer(prompt, min(MOST_TOKENS, max(1, length))) for length in lengths))
        return self.steps - began

    async def _answer(self, prompt: Sequence[int], tokens: int) -> None:
        await self.engine.generate(Request(prompt, deadline_s=DEADLINE_S, max_tokens=tokens))
        self._tokens += tokens


def run_config(model: Path, folder: Path, *, layers: int, kv_tokens: int) -> RunConfig:
    """A run whose engine is vLLM in this process, with a KV cache for `kv_tokens`."""
    engine = {
        "core": "inline",
        "max_model_len": PROMPT_TOKENS + MOST_TOKENS,
        "max_sequences": SEQUENCES,
        "kv_cache_bytes": kv_tokens * layers * 2 * KV_HEADS * HEAD * 4,
        "options": {"block_size": 32},
    }
    sampling = {"max_tokens": MOST_TOKENS, "ignore_eos": True}
    return RunConfig.model_validate(
        {
            "run": {"dir": folder},
            "model": {"path": model, "dtype": "float32"},
            "rollout": {"group_size": GROUP_SIZE, "engine": engine, "sampling": sampling},
        }
    )


async def run(metered: MeteredEngine, limiter: ConcurrencyLimiter | None, limit: int, *, steps: int) -> Result:
    """Runs a case: `limit` groups in flight, or as many as the limiter allows."""
    ages, limits, numbers = list[int](), list[int](), iter(range(10**9))
    running = set[asyncio.Task[int]]()
    counts = [await metered.count()]
    reading_at = metered.steps + READING_STEPS
    until = [metered.steps + steps // 2, metered.steps + steps]
    while until:
        allowed = limiter.limit if limiter else limit
        running |= {asyncio.create_task(metered.group(next(numbers))) for _ in range(allowed - len(running))}
        done, running = await asyncio.wait(running, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
        ages += [group.result() for group in done]
        if metered.steps >= reading_at:
            reading_at = metered.steps + READING_STEPS
            if limiter:
                limiter.observe(await metered.engine.pressure(), groups=len(running), finished=len(ages))
                limits.append(limiter.limit)
        if metered.steps >= until[0]:
            del until[0]
            counts.append(await metered.count())
    for group in running:
        group.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    whole, late = Speed.between(counts[0], counts[2]), Speed.between(counts[1], counts[2])
    return Result(whole, late, age_steps=mean(ages) if ages else math.nan, limits=limits)


async def measure_cases(config: RunConfig, model: Path, options: argparse.Namespace) -> dict[str, list[Result]]:
    """The results of every case, by its name, in turns."""
    engine = await start_engine(config, model, eos_token_ids=())
    metered, results = MeteredEngine(engine), defaultdict[str, list[Result]](list)
    cases = [(f"fixed {limit}", limit, False) for limit in options.fixed]
    cases += [(f"auto from {start}", start, True) for start in options.starts]
    try:
        await run(metered, None, 1, steps=50)  # the first steps of a process are slower
        for name, start, adapts in interleave(options.rounds, cases):
            limiter = ConcurrencyLimiter(start, SEQUENCES, group_size=GROUP_SIZE, max_sequences=SEQUENCES)
            result = await run(metered, limiter if adapts else None, start, steps=options.steps)
            results[name].append(result)
            moves = f", limits {result.limits}" if adapts else ""
            print(f"{name}: {result.whole.tokens_per_step:.1f} tokens per step{moves}", file=sys.stderr, flush=True)
    finally:
        await engine.close()
    return results


def figures_of(results: Mapping[str, Sequence[Result]]) -> Iterator[Figure]:
    """A row for each case, and the speed of `auto` as a share of the best fixed number's."""

    def middle(name: str, part: str, key: str) -> float:
        return float(median(getattr(getattr(result, part), key) for result in results[name]))

    fixed = [name for name in results if name.startswith("fixed")]
    best = {
        (part, key): max(middle(name, part, key) for name in fixed)
        for part in ("whole", "late")
        for key in ("tokens_per_step", "tokens_per_cpu_s")
    }
    for name, found in results.items():
        yield Figure(f"{name}: tokens per step", middle(name, "whole", "tokens_per_step"))
        yield Figure("  per CPU second", middle(name, "whole", "tokens_per_cpu_s"))
        yield Figure("  per second", middle(name, "whole", "tokens_per_s"))
        yield Figure("  preemptions per 1,000 tokens", middle(name, "whole", "preemptions"))
        yield Figure("  age of a group", median(result.age_steps for result in found), "steps")
    for name in results.keys() - set(fixed):
        for part, title in (("whole", "all steps"), ("late", "second half")):
            step, cpu = (middle(name, part, key) / best[part, key] for key in ("tokens_per_step", "tokens_per_cpu_s"))
            goal = SHARE_OF_BEST if part == "late" else None
            yield Figure(f"{name}, {title}, share of the best fixed: per step", step, "", goal)
            yield Figure("  per CPU second", cpu, "", goal)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The cases."""
    add, positive = parser.add_argument, at_least(1)
    add("--fixed", nargs="+", type=positive, default=[1, 2, 4, 8, 12, 16, 20, 24, 32, 64], help="groups in flight")
    add("--starts", nargs="+", type=positive, default=[1, 64], help="numbers from which auto begins")
    add("--steps", type=positive, default=3000, help="engine steps of a case")
    add("--rounds", type=positive, default=3, help="runs of each case, in turns")
    add("--layers", type=positive, default=2, help="of the random model")
    add("--hidden", type=positive, default=128, help="its hidden size")
    add("--kv-tokens", type=positive, default=8192, help="room of the KV cache")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures."""
    with TemporaryDirectory(prefix="slipstream-bench-") as folder:
        shape = qwen3(vocabulary=VOCABULARY, hidden=options.hidden, layers=options.layers, heads=4, kv_heads=KV_HEADS)
        model = write_model(shape, Path(folder) / "model", dtype="float32")
        config = run_config(model, Path(folder), layers=options.layers, kv_tokens=options.kv_tokens)
        results = asyncio.run(measure_cases(config, model, options))
    figures.show(*figures_of(results))
    return {name: [asdict(result) for result in found] for name, found in results.items()}
