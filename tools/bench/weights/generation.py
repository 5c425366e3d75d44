"""What updates cost a generating engine: how long it stands still, and how many tokens fewer it generates.

The engine is the real one, in a process with the real weight member; the learner publishes every second, or not.
"""

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from slipstream.configs import RunConfig
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.tools.bench.figures import Figure, Goal
from slipstream.tools.bench.processes import ONE_THREAD
from slipstream.tools.bench.weights import orders
from slipstream.tools.bench.weights.crew import Crew, Worker, alternately
from slipstream.tools.bench.weights.learner import Learner, Published
from slipstream.tools.bench.weights.policy import CONTEXT, SMALL, TINY, Shape, build_policy, write_policy
from slipstream.tools.bench.weights.settings import settings

EVERY_S = 1.0
NO_UPDATES, UPDATES = "none", "updates"
KV_CACHE_BYTES = 256 << 20
AT_ONCE = 32
"""Answers that are generated at a time."""
START_S = 700.0
"""The engine's own deadline comes first: its error says more."""


@dataclass(frozen=True)
class Case:
    """An engine, and what it generates with."""

    title: str
    shape: Shape
    dtype: str
    core: str
    kv_cache_bytes: int | None = None
    transport: str = "auto"
    at_once: int = AT_ONCE
    device: str = "cpu"
    """Where the learner's policy lies."""
    environment: Mapping[str, str] = field(default_factory=lambda: ONE_THREAD)
    """Of the engine's process."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`rollout.engine.options`."""
    keep_stale_kv: bool = False
    """`weights.keep_stale_kv`."""


POLICIES = {
    "tiny": Case("vLLM inline, tiny", TINY, "float32", "inline", KV_CACHE_BYTES),
    "small": Case("vLLM inline, small", SMALL, "bfloat16", "inline", KV_CACHE_BYTES),
}
"""What two cores can generate with."""


def generation(
    crew: Crew, *, policies: Sequence[str], rounds: int, seconds: float, keep_stale_kv: bool = False
) -> tuple[list[Figure], dict[str, Any]]:
    """Stall and speed of vLLM inside the server, with small policies on a CPU."""
    torch.set_num_threads(1)  # as in a learner that `slipstream up` starts: the other core is the engine's
    figures: list[Figure] = []
    details = {}
    for name in policies:
        case = POLICIES[name]
        if keep_stale_kv:
            case = replace(case, title=f"{case.title}, KV cache kept", keep_stale_kv=True)
        found, details[name] = stalls(crew, case, rounds=rounds, seconds=seconds)
        figures += found
    return figures, details


def stalls(crew: Crew, case: Case, *, rounds: int, seconds: float) -> tuple[list[Figure], dict[str, Any]]:
    """Windows of generation without and with an update each second, in turn; the learner is as busy in both."""
    model = build_policy(case.shape)
    config = _config(crew, case, model)
    use_loopback_interface(config.weights.bind)  # as the engine's process does
    device = torch.device(case.device)
    learner = Learner(crew, config, model.to(device), device=device)
    tokens_per_s: dict[str, list[float]] = defaultdict(list)
    published: list[Published] = []
    words = [config.model_dump_json(), str(case.at_once)]
    try:
        with crew.worker("generator", "generator", *words, environment=case.environment) as worker:
            worker.answer(orders.Here, START_S)
            _warm_up(learner, worker)
            for kind in alternately(rounds, [NO_UPDATES, UPDATES]):
                worker.tell(orders.Generate(seconds=seconds))
                published += _learn(crew, learner, seconds, publish=kind == UPDATES)
                generated = worker.answer(orders.Generated)
                tokens_per_s[kind].append(generated.tokens / generated.seconds)
            stalls_s = list(learner.publisher.figures.stalls_s)[-len(published) :]
    finally:
        learner.close()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    figures = _figures(case.title, parameters, tokens_per_s, stalls_s, published)
    return figures, {"tokens_per_s": tokens_per_s, "stalls_s": stalls_s, "published": [vars(p) for p in published]}


def _config(crew: Crew, case: Case, model: nn.Module) -> RunConfig:
    """The configuration of the run; the policy is written where it says."""
    name = f"{case.title.replace(' ', '-').replace(',', '')}-{os.getpid()}"
    folder = crew.folder / name / "policy"
    write_policy(model, folder)
    engine = {
        "core": case.core,
        "max_model_len": CONTEXT,
        "max_sequences": case.at_once,
        "kv_cache_bytes": case.kv_cache_bytes,
        "options": dict(case.options),
    }
    return settings(
        crew.folder,
        name,
        model={"path": str(folder), "dtype": case.dtype},
        rollout={"engine": engine, "sampling": {"max_tokens": CONTEXT // 2}},
        weights={"verify": True, "transport": case.transport, "keep_stale_kv": case.keep_stale_kv},
    )


def _warm_up(learner: Learner, worker: Worker) -> None:
    """Two versions, with the group formed and all memory touched, and some answers."""
    learner.publish()
    learner.await_updates(1, START_S)  # a transport that hangs costs a deadline, and an engine
    learner.train()
    learner.publish()
    learner.insist()
    worker.ask(orders.Generate(seconds=EVERY_S), orders.Generated)


def _learn(crew: Crew, learner: Learner, seconds: float, *, publish: bool) -> list[Published]:
    """The policy changes in the middle of each second, and is published or not."""
    published = []
    until = time.monotonic() + seconds
    while True:
        crew.pause(EVERY_S / 2)
        learner.train()
        if publish:
            published.append(learner.publish())
        took_s = published[-1].taken_s + published[-1].applied_s if publish else 0.0
        crew.pause(max(0.0, EVERY_S / 2 - took_s))
        if time.monotonic() + EVERY_S / 2 >= until:  # another update would come when nothing is generated any more
            return published


def _figures(
    title: str,
    parameters: int,
    tokens_per_s: Mapping[str, Sequence[float]],
    stalls_s: Sequence[float],
    published: Sequence[Published],
) -> list[Figure]:
    pairs = zip(tokens_per_s[UPDATES], tokens_per_s[NO_UPDATES], strict=True)
    return [
        Figure(f"{title}: parameters", parameters / 1e6, "million"),
        Figure("  generation stands still, each update", 1000 * median(stalls_s), "ms"),
        Figure("  at most", 1000 * max(stalls_s), "ms"),
        Figure("  published to applied and verified", 1000 * median(each.applied_s for each in published), "ms"),
        Figure("  learner: copy and probe", 1000 * median(each.taken_s for each in published), "ms"),
        Figure("  tokens/s without updates", median(tokens_per_s[NO_UPDATES]), "/s"),
        Figure("  tokens/s with one each second", median(tokens_per_s[UPDATES]), "/s"),
        Figure(f"{title}: tokens/s with / without", median(some / none for some, none in pairs), "", Goal(">=", 0.9)),
    ]
