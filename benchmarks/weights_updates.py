"""Cost of weight updates: time until every server has applied a version, stall and lost speed of generation."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.weights_learner import (
    CONTEXT,
    Learner,
    Publication,
    Shape,
    adapt,
    build_policy,
    shape_of,
    weights_config,
)
from benchmarks.weights_worker import MODULE
from benchmarks.workers import ONE_THREAD, Worker, Workers
from slipstream.configs import RunConfig
from slipstream.configs.runtime.network import use_loopback_interface

DEADLINE_S = 120.0
MAX_CPU_GROWTH = 1.5
"""Of the learner's CPU time, from the fewest servers to the most: it must not grow with each server."""
CPU_GOALS = ("shm", "stream")
SMALL_PROCESS = {**ONE_THREAD, "MALLOC_ARENA_MAX": "1"}
"""Environment of servers without an engine, of which there may be many: glibc keeps freed memory per arena."""
UPDATE_EVERY_S = 1.0
ENGINE_START_S = 700.0
"""Longer than the engine's own deadline, whose error has the reason."""


@dataclass(frozen=True)
class Case:
    """An engine and its policy."""

    title: str
    policy: Shape | Path
    """See `build_policy`."""
    dtype: str
    engine: Mapping[str, Any]
    """Keys of `rollout.engine`."""
    transport: str = "auto"
    concurrency: int = 32
    """Answers that are generated at a time."""
    device: str = "cpu"
    """Of the learner's policy."""
    environment: Mapping[str, str] = field(default_factory=lambda: ONE_THREAD)
    """Of the engine's process."""
    keep_stale_kv: bool = False
    lora: Mapping[str, Any] | None = None


def publications(
    workers: Workers,
    figures: Figures,
    *,
    size_bytes: int,
    servers: Sequence[int],
    transports: Sequence[str],
    rounds: int,
) -> dict[str, Any]:
    """Shows times by transport and number of servers: processes with the real weight channel and no engine."""
    policy = build_policy(shape_of(size_bytes // 2))
    details: dict[str, Any] = {}
    size_mb = 2 * sum(parameter.numel() for parameter in policy.parameters()) / 1e6
    figures.show(Figure("a version of the publications", size_mb, "MB"))
    with contextlib.ExitStack() as stack:
        names = [f"server{number}" for number in range(max(servers))]
        processes = [
            stack.enter_context(workers.worker(name, MODULE, "follow", name, environment=SMALL_PROCESS))
            for name in names
        ]
        for process in processes:
            process.receive()
        for transport in transports:
            measured = _publish(workers, policy, transport, processes, servers=servers, rounds=rounds)
            figures.show(*_publication_figures(transport, measured))
            details |= {f"{transport} {count}": [vars(each) for each in found] for count, found in measured.items()}
    return details


def _publish(
    workers: Workers,
    policy: nn.Module,
    transport: str,
    processes: Sequence[Worker],
    *,
    servers: Sequence[int],
    rounds: int,
) -> dict[int, list[Publication]]:
    config = weights_config(workers.folder, f"{transport}-{workers.folder.name}", weights={"transport": transport})
    measured: dict[int, list[Publication]] = {count: [] for count in servers}
    with contextlib.closing(Learner(workers, config, policy, device=torch.device("cpu"))) as learner:
        learner.publish()  # so that a server that joins fetches a version, which shows that it has joined
        for count in interleave(rounds, servers):
            before = learner.updates
            for process in processes[:count]:
                process.call("follow", config.model_dump_json())
            learner.await_updates(before + count, DEADLINE_S)
            learner.train()
            learner.publish()  # gloo forms its process group
            learner.train()
            measured[count].append(learner.publish())
            for process in processes[:count]:
                process.call("leave")
    return measured


def _publication_figures(transport: str, measured: Mapping[int, Sequence[Publication]]) -> Iterator[Figure]:
    cpu_s = {count: median(each.cpu_s for each in published) for count, published in measured.items()}
    for count, published in measured.items():
        name = f"published to applied, {transport}, {count} server{'s' if count > 1 else ''}"
        yield Figure(name, 1000 * median(each.applied_s for each in published), "ms")
        yield Figure("  learner's CPU time", 1000 * cpu_s[count], "ms")
    fewest, most = min(measured), max(measured)
    if most > fewest:
        goal = Goal("<", MAX_CPU_GROWTH) if transport in CPU_GOALS else None
        yield Figure(f"learner's CPU, {transport}, {most} / {fewest} servers", cpu_s[most] / cpu_s[fewest], "", goal)


def generation(workers: Workers, figures: Figures, case: Case, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Shows figures of windows of generation without and with an update each second, in turn.

    The engine runs in a process with the real weight channel. The learner changes its policy in both kinds of windows.
    """
    policy = build_policy(case.policy)
    config = _generation_config(workers, case, policy)
    if config.model.lora is not None:
        adapt(policy, config.model.lora)
    use_loopback_interface(config.weights.bind)  # as the engine's process does
    device = torch.device(case.device)
    tokens_per_s: dict[bool, list[float]] = defaultdict(list)
    published: list[Publication] = []
    with (
        contextlib.closing(Learner(workers, config, policy.to(device), device=device)) as learner,
        workers.worker("generator", MODULE, "generate", environment=case.environment) as worker,
    ):
        worker.receive()
        worker.call("start", config.model_dump_json(), deadline_s=ENGINE_START_S)
        _warm_up(learner, worker, case.concurrency)
        for updates in interleave(rounds, [False, True]):
            worker.send("generate", seconds, case.concurrency)
            published += _train(workers, learner, seconds, publish=updates)
            tokens_per_s[updates].append(worker.receive())
        stalls_s = list(learner.publisher.metrics.stalls_s)[-len(published) :]
    without, with_updates = tokens_per_s[False], tokens_per_s[True]
    ratio = median(b / a for a, b in zip(without, with_updates, strict=True))
    figures.show(
        Figure(f"{case.title}: parameters", sum(each.numel() for each in policy.parameters()) / 1e6, "million"),
        Figure("  a version", learner.version_bytes / 1e6, "MB"),
        Figure("  generation stands still, each update", 1000 * median(stalls_s), "ms"),
        Figure("  at most", 1000 * max(stalls_s), "ms"),
        Figure("  published to applied and verified", 1000 * median(each.applied_s for each in published), "ms"),
        Figure("  tokens/s without updates", median(without), "/s"),
        Figure(f"{case.title}: tokens/s with / without", ratio, "", Goal(">=", 0.9)),
    )
    return {
        "tokens_per_s": {"none": without, "updates": with_updates},
        "stalls_s": stalls_s,
        "published": [vars(each) for each in published],
    }


def _generation_config(workers: Workers, case: Case, policy: Any) -> RunConfig:
    """The configuration of the run; writes the policy where it says, for an engine that needs no tokenizer."""
    name = f"generation-{os.getpid()}"
    folder = workers.folder / name / "policy"
    policy.save_pretrained(folder)
    engine = {"max_model_len": CONTEXT, "max_sequences": case.concurrency, **case.engine}
    return weights_config(
        workers.folder,
        name,
        model={"path": str(folder), "dtype": case.dtype, "lora": case.lora},
        rollout={"engine": engine, "sampling": {"max_tokens": CONTEXT // 2}},
        weights={"verify": True, "transport": case.transport, "keep_stale_kv": case.keep_stale_kv},
    )


def _warm_up(learner: Learner, worker: Worker, concurrency: int) -> None:
    """Two versions, so that the process group is formed and all memory touched, and some answers."""
    learner.publish()
    learner.await_updates(1, ENGINE_START_S)  # a transport that hangs costs a deadline, and an engine
    learner.train()
    learner.publish()
    learner.require_transport()
    worker.call("generate", UPDATE_EVERY_S, concurrency)


def _train(workers: Workers, learner: Learner, seconds: float, *, publish: bool) -> list[Publication]:
    """Changes the policy in the middle of each second, and publishes it if requested."""
    published = []
    until = time.monotonic() + seconds
    while True:
        workers.pause(UPDATE_EVERY_S / 2)
        learner.train()
        if publish:
            published.append(learner.publish())
        took_s = published[-1].taken_s + published[-1].applied_s if publish else 0.0
        workers.pause(max(0.0, UPDATE_EVERY_S / 2 - took_s))
        if time.monotonic() + UPDATE_EVERY_S / 2 >= until:  # generation would end before another update
            return published
