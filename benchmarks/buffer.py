"""Throughput, latency, cost of a lease and memory of the buffer."""

import argparse
import asyncio
import os
import random
import shutil
import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

import numpy as np

from benchmarks.buffer_run import GROUPS_PER_STEP, BufferWorkers, Pipeline, Transfer, whole_steps
from benchmarks.figures import Figure, Figures, Goal
from benchmarks.producer import TASKS, trajectories
from slipstream.buffer.policies.sampling import order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import connect_async
from slipstream.buffer.store.spill import Spiller, SpillFolder
from slipstream.buffer.store.types import DeliveredGroup, Facts, TicketRequest
from slipstream.buffer.wire.codec import encode, encode_group
from slipstream.buffer.wire.messages import TRAIN, Group
from slipstream.configs.schema.buffer import SamplerConfig
from slipstream.tools.cli import at_least, seconds

ANSWERS, TOKENS = 8, 1024
LOW_RATE = 100.0
"""Groups per second: more than 800,000 tokens per second."""
SMALL_ANSWERS, SMALL_TOKENS = 2, 16
MAX_GROWTH_BYTES = 64
"""Per group: less than one entry of a dict."""
LONG_ANSWERS, LONG_TOKENS = 16, 32_000
SAMPLERS = ("fifo", "prioritized")
LEASES, LEASED = 30, 8
"""Number of leases and groups in each: few, so that the smallest ledger has enough for all."""
TICKETS_PER_ISSUE = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of the measurements."""
    add, positive = parser.add_argument, at_least(1)
    add("--groups", type=positive, default=20_000, help="groups for the memory's growth")
    add("--path-groups", type=positive, default=4096, help="groups per round of the path")
    add("--spilled-groups", type=positive, default=64, help="groups of long answers to spill")
    add("--rounds", type=positive, default=5, help="rounds of path and bare commands")
    add("--latency-s", type=seconds, default=20.0, help="seconds at each load")
    ready = at_least(LEASES * LEASED)
    add("--ready", type=ready, nargs="+", default=[1000, 10_000, 100_000], help="numbers of ready groups")


def measure(options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Measures and shows all figures. Raises: SlipstreamError when a process fails."""
    with BufferWorkers.start() as workers:
        with workers.pipeline(group_size=ANSWERS) as pipeline:
            pipeline.transfer(GROUPS_PER_STEP, answers=ANSWERS, tokens=TOKENS)  # warm-up
            groups = whole_steps(options.path_groups)
            measured, details = throughput(workers, pipeline, groups=groups, rounds=options.rounds)
            figures.show(*measured)
            max_rate = measured[0].value
            figures.show(*latency(workers, pipeline, max_rate=max_rate, seconds=options.latency_s))
        figures.show(*lease_times(workers, ready=sorted(set(options.ready))))
        figures.show(memory_growth(workers, groups=options.groups))
        figures.show(*asyncio.run(spilled_memory(workers, groups=options.spilled_groups)))
    return details


def throughput(
    workers: BufferWorkers, pipeline: Pipeline, *, groups: int, rounds: int
) -> tuple[list[Figure], dict[str, Any]]:
    """Medians over rounds that alternate with bare SET and MGET of the same bytes; CPU time of each process."""
    blob = _blob()
    bare: list[float] = []
    transfers: list[Transfer] = []
    for _ in range(rounds):
        bare.append(_bare_groups_per_s(workers, blob, groups))
        transfers.append(pipeline.transfer(groups, answers=ANSWERS, tokens=TOKENS))
    rates = [each.groups_per_s for each in transfers]
    total = sum(each.groups for each in transfers)
    cpu_us = {name: 1e6 * sum(each.cpu_s[name] for each in transfers) / total for name in transfers[0].cpu_s}
    figures = [
        Figure("group path, groups", median(rates), "/s"),
        Figure("bare SET and MGET, groups", median(bare), "/s"),
        Figure("group path / bare", median(rates) / median(bare), "", Goal(">=", 0.6)),
        *(Figure(f"  CPU of {name}", used_us, "µs/group") for name, used_us in cpu_us.items()),
    ]
    return figures, {"groups_per_s": rates, "bare_groups_per_s": bare, "cpu_us": cpu_us, "group_bytes": len(blob)}


def latency(workers: BufferWorkers, pipeline: Pipeline, *, max_rate: float, seconds: float) -> list[Figure]:
    """Time from a group's last token to its acknowledgement, for groups at random times: at half load, and at few.

    Beside it, the same of a bare SET.
    """
    figures = []
    half = max_rate / 2
    for load, rate, goal in (("half load", half, Goal("<", 20)), (f"{LOW_RATE:g}/s", LOW_RATE, None)):
        groups = whole_steps(rate * seconds)
        os.sync()  # gigabytes of earlier measurements may wait for the disk
        measured = pipeline.transfer(groups, answers=ANSWERS, tokens=TOKENS, rate=rate).latencies_s
        bare = _bare_latencies_s(workers, _blob(), groups, rate)
        figures += [
            Figure(f"last token to ready at {load}, median", 1000 * median(measured), "ms"),
            Figure(f"last token to ready at {load}, p99", 1000 * quantiles(measured, n=100)[98], "ms", goal),
            Figure(f"bare SET at {load}, p99", 1000 * quantiles(bare, n=100)[98], "ms"),
        ]
    return figures


def memory_growth(workers: BufferWorkers, *, groups: int) -> Figure:
    """Growth per group of the service's resident memory, after a warm-up of a quarter more."""
    groups = whole_steps(groups)
    sizes = []
    with workers.pipeline(group_size=SMALL_ANSWERS) as pipeline:
        for count in (whole_steps(groups / 4), groups):
            pipeline.transfer(count, answers=SMALL_ANSWERS, tokens=SMALL_TOKENS)
            sizes.append(pipeline.service.memory_info().rss)
    growth = (sizes[1] - sizes[0]) / groups
    return Figure("service's memory, growth", growth, "B/group", Goal("<", MAX_GROWTH_BYTES))


async def spilled_memory(workers: BufferWorkers, *, groups: int) -> list[Figure]:
    """Redis's memory for trained groups of long answers, before and after their bytes are in spill files."""
    config = workers.config(group_size=LONG_ANSWERS, max_ready=None)
    answers, rng = trajectories(LONG_ANSWERS, LONG_TOKENS), np.random.default_rng(0)
    used: list[int] = []
    async with connect_async(config.redis) as redis:

        async def note_memory() -> None:
            used.append((await redis.info("memory"))["used_memory"])

        ledger = Ledger(redis, config)
        spiller = Spiller(ledger.scripts, SpillFolder(config.paths.spill))
        await ledger.join("bench", "bench")
        await note_memory()
        tasks = (await ledger.issue([TicketRequest("bench", 0, groups, groups)], train_tasks=TASKS))[0]
        for task in tasks:
            workers.check()
            group = Group(id=task.id, kind=TRAIN, epoch=0, indices=[0], trajectories=answers)
            await ledger.deliver([_delivered(config.buffer.sampler, task.id, encode_group(group), rng)])
        assert await ledger.lease(0, consuming_version=0, count=groups) is not None
        await ledger.train(0)
        await note_memory()
        started = time.perf_counter()
        await spiller.spill()
        took_s = time.perf_counter() - started
        await note_memory()
        spilled_bytes = (await ledger.counts()).spilled_bytes
        await redis.flushdb()
    shutil.rmtree(config.paths.spill)
    per_group = [(size - used[0]) / groups / 1000 for size in used[1:]]
    return [
        Figure("Redis per trained group of long answers", per_group[0], "KB"),
        Figure("the same, spilled", per_group[1], "KB"),
        Figure("spilling", spilled_bytes / took_s / 1e6, "MB/s"),
    ]


def lease_times(workers: BufferWorkers, *, ready: Sequence[int]) -> list[Figure]:
    """Median time of a lease by the number of ready groups, for each sampler."""
    figures = []
    for sampler in SAMPLERS:
        took_s = asyncio.run(_lease_times(workers, sampler, ready))
        figures += [Figure(f"lease, {sampler}, {count:,} ready", 1000 * took_s[count], "ms") for count in ready]
        least, most = ready[0], ready[-1]
        name = f"lease, {sampler}, {most:,} / {least:,} ready"
        figures.append(Figure(name, took_s[most] / took_s[least], "", Goal("<", 1.5)))
    return figures


async def _lease_times(workers: BufferWorkers, sampler: str, ready: Sequence[int]) -> dict[int, float]:
    """The ledgers take turns, so that changes of the machine's speed affect all alike."""
    filled: dict[int, Ledger] = {}
    lease_s: dict[int, list[float]] = {count: [] for count in ready}
    async with connect_async(workers.config().redis) as redis:
        for count in ready:
            config = workers.config(sampler=sampler, max_ready=None)
            filled[count] = Ledger(redis, config)
            await _fill(workers, filled[count], config.buffer.sampler, count)
        for step in range(LEASES):
            workers.check()
            for count, ledger in filled.items():
                started = time.perf_counter()
                lease = await ledger.lease(step, consuming_version=0, count=LEASED)
                lease_s[count].append(time.perf_counter() - started)
                assert lease is not None, f"{count} ready groups are too few for {LEASES} leases"
                await ledger.train(step)
        await redis.flushdb()
    return {count: median(took_s) for count, took_s in lease_s.items()}


async def _fill(workers: BufferWorkers, ledger: Ledger, sampler: SamplerConfig, ready: int) -> None:
    """Delivers groups until so many are ready."""
    rng = np.random.default_rng(0)
    await ledger.join("bench", "bench")
    done = 0
    while done < ready:
        workers.check()
        tickets = min(TICKETS_PER_ISSUE, ready - done)
        tasks = (await ledger.issue([TicketRequest("bench", 0, tickets, tickets)], train_tasks=TASKS))[0]
        assert tasks, f"the ledger issues no more than {done} tickets"
        await ledger.deliver([_delivered(sampler, task.id, b"bytes", rng) for task in tasks])
        done += len(tasks)


def _delivered(sampler: SamplerConfig, group_id: str, blob: bytes, rng: np.random.Generator) -> DeliveredGroup:
    place = order(sampler, number=int(group_id), oldest_version=0, rewards=rng.random(2).tolist(), rng=rng)
    facts = Facts(tokens=1, delivered={1: 1}, kept={1: 1})
    return DeliveredGroup(id=group_id, blob=blob, oldest_version=0, newest_version=0, order=place, facts=facts)


def _blob() -> bytes:
    return encode(Group(id="1", kind=TRAIN, epoch=0, indices=[0], trajectories=trajectories(ANSWERS, TOKENS)))


def _bare_groups_per_s(workers: BufferWorkers, blob: bytes, groups: int) -> float:
    """Pipelined SET, then MGET, a step's groups at a time."""
    keys = [f"bare:{number}" for number in range(GROUPS_PER_STEP)]
    with workers.redis_client() as redis:
        started = time.monotonic()
        for _ in range(groups // GROUPS_PER_STEP):
            workers.check()
            pipeline = redis.pipeline(transaction=False)
            for key in keys:
                pipeline.set(key, blob)
            pipeline.execute()
            redis.mget(keys)
        took_s = time.monotonic() - started
        redis.delete(*keys)
    return groups / took_s


def _bare_latencies_s(workers: BufferWorkers, blob: bytes, groups: int, rate: float) -> list[float]:
    rng = random.Random(0)
    latencies_s = []
    with workers.redis_client() as redis:
        due = time.monotonic()
        for number in range(groups):
            workers.check()
            due += rng.expovariate(rate)
            time.sleep(max(0.0, due - time.monotonic()))
            redis.set(f"bare:{number % GROUPS_PER_STEP}", blob)
            latencies_s.append(time.monotonic() - due)
        redis.delete(*(f"bare:{number}" for number in range(GROUPS_PER_STEP)))
    return latencies_s
