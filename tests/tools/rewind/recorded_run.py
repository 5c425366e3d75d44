"""Real runs without an engine: buffer service, Redis and learner, and a rollout server with random answers."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from slipstream.buffer.service import BufferService
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import decode, encode_group
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.signals import GracefulStop
from slipstream.learner.trainers.assemble import assemble
from slipstream.learner.trainers.rl.trainer import RLTrainer
from slipstream.models.folder import initial_model, model_fingerprint
from tests.buffer.peers import PATIENCE_S, Peer, connected, serving
from tests.conftest import free_port, wait_until_free
from tests.learner.recorded import VOCABULARY, trajectory

SETTINGS: Mapping[str, Any] = {
    "model": {"build": "digits", "dtype": "float32"},
    "env": {"name": "digits", "options": {"operation": "reverse", "length": 3}},
    "rewards": [{"name": "exact_match"}],
    "eval": {"tasks": 0},
    "rollout": {"group_size": 4, "group_deadline_s": PATIENCE_S / 2, "sampling": {"temperature": 0.8}},
    "learner": {
        "steps": 6,
        "groups_per_step": 4,
        "token_budget": 160,
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        "checkpoint": {"every_steps": 3, "keep": 2},
        "wait_deadline_s": PATIENCE_S,
    },
    "weights": {"publish_every_steps": 2},
    "buffer": {"max_staleness": 1, "keep_trained": "all", "retention": {"max_groups": 0}},
}


class CrashError(Exception):
    """Ends a learner without its last words."""


def make_config(folder: Path, redis_url: str, name: str, **sections: Mapping[str, Any]) -> RunConfig:
    """A small run; keyword arguments change keys of sections."""
    address = f"tcp://127.0.0.1:{free_port()}"
    ports = {name: free_port() for name in ("control_port", "store_port", "stream_port")}
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder)},
        "redis": {"url": redis_url},
        **{section: {**keys} if isinstance(keys, dict) else keys for section, keys in SETTINGS.items()},
    }
    tree["buffer"] |= {"bind": address, "endpoint": address}
    tree["weights"] |= ports
    for section, keys in sections.items():
        tree[section] |= keys
    return RunConfig.model_validate(tree)


def record_run(config: RunConfig, *, crash_after: int | None = None, ranks: int = 1) -> RunPaths:
    """Runs it to its end; with `crash_after`, the learner crashes in that step, and another one continues."""
    with _services(config):
        if ranks > 1:
            _learn_on_ranks(config, ranks)
        else:
            if crash_after is not None:
                _crash(config, crash_after)
            _learn(config)
    return config.paths


def _learn(config: RunConfig) -> None:
    with ExitStack() as cleanup:
        assemble(RLTrainer, config, started=time.monotonic(), cleanup=cleanup, signals=GracefulStop()).run()


def _crash(config: RunConfig, step: int) -> None:
    after_update = RLTrainer.after_update

    def crash(trainer: RLTrainer, metrics: Mapping[str, float]) -> Mapping[str, float]:
        if trainer.state.step == step:
            assert trainer.reporter is not None, "rank 0 has one"
            trainer.reporter.close()
            raise CrashError
        return after_update(trainer, metrics)

    with patch.object(RLTrainer, "after_update", crash), pytest.raises(CrashError):
        _learn(config)
    wait_until_free(config.weights.control_port)


def _learn_on_ranks(config: RunConfig, ranks: int) -> None:
    file = config.paths.root.parent / f"{config.run.name}.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "slipstream.learner.cli", str(file)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=2 * PATIENCE_S)
            assert process.returncode == 0, output.decode()[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def _services(config: RunConfig) -> Iterator[None]:
    """Buffer service and rollout server, in a thread."""
    ended = threading.Event()

    async def serve() -> None:
        async with serving(config) as service, connected(config) as peer:
            answering = asyncio.create_task(_answer(config, service, peer))
            while not (ended.is_set() or answering.done()):
                await asyncio.sleep(0.02)
            if answering.done():
                answering.result()
            answering.cancel()
            await asyncio.wait([answering])

    with ThreadPoolExecutor(1) as thread:
        services = thread.submit(asyncio.run, serve())
        try:
            yield
        finally:
            ended.set()
        services.result(PATIENCE_S)


async def _answer(config: RunConfig, service: BufferService, peer: Peer) -> None:
    """A rollout server that answers each ticket at once, with the latest version."""
    await peer.hello(
        model_fingerprint=model_fingerprint(initial_model(config)), vocab_size=VOCABULARY, train_tasks=1000
    )
    while True:
        version = await service.ledger.version()
        await peer.credits(config.learner.groups_per_step, version=version)
        try:
            async with asyncio.timeout(0.2):
                message = decode(await peer.socket.recv(), m.ToServer)
        except TimeoutError:
            continue
        if isinstance(message, m.Tickets):
            await peer.send(
                m.Deliver(ids=[ticket.id for ticket in message.tickets]),
                *(encode_group(_group(config, ticket, version)) for ticket in message.tickets),
            )


def _group(config: RunConfig, ticket: m.Ticket, version: int) -> m.Group:
    rng = np.random.default_rng(int(ticket.id))
    return m.Group(
        id=ticket.id,
        kind=m.TRAIN,
        epoch=ticket.epoch,
        indices=ticket.indices,
        trajectories=[
            trajectory(rng, tokens=int(rng.integers(6, 24)), versions=(version,), episode=episode)
            for episode in range(config.rollout.group_size)
        ],
    )
