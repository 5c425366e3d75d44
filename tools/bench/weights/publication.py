"""How long it takes from `publish` until every server has the version, and what that costs the learner.

The servers are processes with the real weight member and an engine that does nothing.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from slipstream.configs import RunConfig
from slipstream.tools.bench.figures import Figure, Goal
from slipstream.tools.bench.weights import orders
from slipstream.tools.bench.weights.crew import Crew, Worker, alternately
from slipstream.tools.bench.weights.learner import Learner, Published
from slipstream.tools.bench.weights.policy import build_policy, shape_of
from slipstream.tools.bench.weights.settings import DEADLINE_S, settings

TRANSPORTS = ("shm", "gloo", "stream")
GROWTH = 1.5
"""Of the learner's CPU time, from the fewest servers to the most: less than with each of them it would be more."""


def publications(
    crew: Crew, *, size_mb: int, servers: Sequence[int], rounds: int
) -> tuple[list[Figure], dict[str, Any]]:
    """Times by transport and number of servers."""
    torch.set_num_threads(1)
    model = build_policy(shape_of(size_mb * 1_000_000 // 2))
    took: dict[str, list[Published]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        names = [f"server{number}" for number in range(max(servers))]
        workers = [stack.enter_context(crew.worker(name, "server", name)) for name in names]
        for worker in workers:
            worker.answer(orders.Here)
        for transport in TRANSPORTS:
            for label, published in _published(crew, model, transport, workers, servers=servers, rounds=rounds):
                took[label].append(published)
    figures = [Figure("a version of the publications", 2 * sum(p.numel() for p in model.parameters()) / 1e6, "MB")]
    for transport in TRANSPORTS:
        figures += _figures({count: took[f"{transport} {count}"] for count in servers}, transport)
    return figures, {label: [vars(each) for each in found] for label, found in took.items()}


def _published(
    crew: Crew, model: nn.Module, transport: str, workers: Sequence[Worker], *, servers: Sequence[int], rounds: int
) -> Iterator[tuple[str, Published]]:
    config = settings(crew.folder, f"{transport}-{crew.folder.name}", weights={"transport": transport})
    learner = Learner(crew, config, model, device=torch.device("cpu"))
    try:
        learner.publish()  # so that whoever joins has something to fetch, which tells that it has joined
        for count in alternately(rounds, [str(count) for count in servers]):
            with _following(learner, config, workers[: int(count)]):
                learner.train()
                learner.publish()  # gloo forms its group
                learner.train()
                yield f"{transport} {count}", learner.publish()
    finally:
        learner.close()


@contextlib.contextmanager
def _following(learner: Learner, config: RunConfig, workers: Sequence[Worker]) -> Iterator[None]:
    before = learner.updates
    for worker in workers:
        worker.tell(orders.Follow(config=config.model_dump_json()))
    learner.await_updates(before + len(workers), DEADLINE_S)
    yield
    for worker in workers:
        worker.ask(orders.Leave(), orders.Here)


def _figures(took: dict[int, list[Published]], transport: str) -> list[Figure]:
    figures, cpu_s = [], {}
    for count, published in took.items():
        cpu_s[count] = median(each.cpu_s for each in published)
        title = f"published to applied, {transport}, {count} server{'s' if count > 1 else ''}"
        figures += [
            Figure(title, 1000 * median(each.applied_s for each in published), "ms"),
            Figure("  learner's CPU time", 1000 * cpu_s[count], "ms"),
            Figure("  publish() blocks", 1000 * median(each.blocked_s for each in published), "ms"),
        ]
    fewest, most = min(took), max(took)
    if most > fewest:
        goal = Goal("<", GROWTH) if transport == "shm" else None
        figures.append(
            Figure(f"learner's CPU, {transport}, {most} / {fewest} servers", cpu_s[most] / cpu_s[fewest], "", goal)
        )
    return figures
