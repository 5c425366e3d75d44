"""The process `rollout`: one rollout server, until it is told to stop."""

import asyncio
import gc
import itertools
import os
import secrets
import socket
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing

import uvloop

from slipstream.buffer.wire.auth import client_keys
from slipstream.configs import RunConfig
from slipstream.configs.arguments import parse_run_arguments, start_log
from slipstream.configs.models import initial_model
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.configs.runtime.processes import raise_malloc_thresholds, raise_open_file_limit
from slipstream.configs.runtime.signals import add_stop_handler, exit_on_signals, heavy_imports
from slipstream.env.registry import build_env
from slipstream.rewards.runners.pool import Scorer

log = get_log("rollout.process")


async def serve(config: RunConfig, name: str) -> int:
    """Starts the engine and serves until SIGINT or SIGTERM; returns 128 + the signal's number.

    Raises: ConfigError when keys, env, rewards or model can't be used, EngineError when the engine does not start or
    too many of its successors die, RefusedError.
    """
    serving, told = asyncio.current_task(), list[int]()
    assert serving is not None, "a coroutine runs in a task"

    def stop(number: int) -> None:
        told.append(number)
        serving.cancel()

    add_stop_handler(stop)
    try:
        await _serve(config, name)
    except asyncio.CancelledError:
        if not told:
            raise
        log.info("rollout server stops")
    return 128 + told[0]


async def _serve(config: RunConfig, name: str) -> None:
    # Whatever may be misspelt comes first: what follows takes many seconds.
    client_keys(config.security)
    with exit_on_signals():  # the user's own code may take its time
        env = build_env(config.env)
        scorer = Scorer.from_config(config)
    with closing(scorer):
        with heavy_imports():
            from slipstream.rollout_servers.engines.base import Engine
            from slipstream.rollout_servers.engines.registry import start_engine
            from slipstream.rollout_servers.engines.supervisor import RestartingEngine
            from slipstream.rollout_servers.rollouts.single_turn import Player
            from slipstream.rollout_servers.server import RolloutServer
            from slipstream.rollout_servers.tokenizer import Text

        model = initial_model(config)
        text = Text(model)
        seeds = engine_seeds(config, name)

        async def start() -> Engine:
            run = config.run.model_copy(update={"seed": next(seeds)})
            return await start_engine(config.model_copy(update={"run": run}), model, eos_token_ids=text.eos_token_ids)

        log.info("engine starts", model=str(model), engine=config.rollout.engine.name)
        engine = RestartingEngine(await start(), start, config.rollout)
        log.info("engine ready")
        try:
            await RolloutServer(config, name, Player(config, env, text, engine, scorer), engine).run()
        finally:
            await engine.close()


def engine_seeds(config: RunConfig, name: str) -> Iterator[int]:
    """A seed for each engine that a server starts: no other engine of the run has it.

    The same random numbers would tie an answer's new tokens to its old ones, or what one server tries to what others
    try.
    """
    return (zlib.crc32(f"{config.run.seed} {name} {number}".encode()) for number in itertools.count())


def server_name() -> str:
    """A name that no other rollout server of the run has."""
    # Not by host and process alone: containers that share a network are of one host name, and count alike.
    return f"rollout-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def main() -> None:
    """Runs it, as the command line says."""
    config = parse_run_arguments("Run one rollout server.")
    # Before torch is imported: what its threads do here is not worth the cores on which they spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name = server_name()
    # `slipstream up` starts one server and follows its log; others of the run may share the folder, from other hosts.
    process = "rollout" if "SLIPSTREAM_SUPERVISED" in os.environ else name
    start_log(config, process, server=name)
    raise_malloc_thresholds()
    raise_open_file_limit()
    use_loopback_interface(config.weights.bind)
    try:
        sys.exit(uvloop.run(serve(config, name)))
    except SlipstreamError as error:
        for problem in error.problems:
            log.error("rollout server failed", error=problem)
        sys.exit(1)
    finally:
        # Otherwise the interpreter walks through all of torch and vLLM once more before it ends, for 1.5 s.
        gc.freeze()
