"""The console script `rollout`: one rollout server, which runs until a signal or the end of the run.

Imports stand inside the functions: before `main` has set the handler, Ctrl-C would print a traceback.
"""

import itertools
import signal
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from slipstream.configs.runtime.signals import exit_on_signals, heavy_imports, restore_default_sigint

if TYPE_CHECKING:
    from slipstream.configs import RunConfig
    from slipstream.env.base import Env
    from slipstream.models.tokenizer import Tokenizer
    from slipstream.rollout_servers.rollouts.teaching import Teaching
    from slipstream.rollout_servers.server import RolloutServer

PROCESS_VARIABLE = "SLIPSTREAM_PROCESS"
"""Environment variable with the name of this server's log, set by `slipstream up`."""
GC_OBJECTS = 50_000
"""New objects, less freed ones, after which Python looks for cycles among them."""


def main() -> None:
    """Entry point."""
    restore_default_sigint()
    import gc
    import os
    import sys

    import uvloop

    from slipstream.configs.arguments import add_until_finished, read_run_arguments, run_parser, start_log
    from slipstream.configs.runtime.errors import SlipstreamError
    from slipstream.configs.runtime.logging import get_log
    from slipstream.configs.runtime.network import use_loopback_interface
    from slipstream.configs.runtime.passwords import drop_learners_secrets
    from slipstream.configs.runtime.processes import raise_malloc_thresholds, raise_open_file_limit
    from slipstream.configs.runtime.temporary import own_temporary_folder, remove_leftovers
    from slipstream.configs.runtime.tracing import start_tracing

    drop_learners_secrets()  # envs, tools and rewards must not see them
    parser = run_parser("Run one rollout server.")
    add_until_finished(parser)
    arguments, config = read_run_arguments(parser)
    # Before torch is imported: its threads would spin on the cores that the engine needs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name = server_name()
    # `slipstream up` follows the logs of its servers; those on other hosts may share the folder.
    process = os.environ.get(PROCESS_VARIABLE, name)
    start_log(config.paths, process, level=config.run.log_level, server=name)
    start_tracing(config.tracking.trace, config.paths.traces, run=config.run.name, process=process, instance=name)
    raise_malloc_thresholds()
    # Requests and episodes are many objects in few cycles: at the default threshold, 700, collections cost some
    # percent of the CPU time of short answers.
    gc.set_threshold(GC_OBJECTS)
    raise_open_file_limit()
    use_loopback_interface(config.weights.bind)
    if removed := remove_leftovers():
        get_log("rollout.cli").info("temporary files of dead processes removed", folders=len(removed))
    try:
        with own_temporary_folder():
            sys.exit(uvloop.run(serve(config, name, until_finished=arguments.until_finished)))
    except SlipstreamError as error:
        for problem in error.problems:
            get_log("rollout.cli").error("rollout server failed", error=problem)
        sys.exit(error.exit_code)
    finally:
        # Otherwise the interpreter collects all objects of torch and vLLM once more at exit, for 1.5 s.
        gc.freeze()


def load(config: "RunConfig") -> None:
    """Imports what the server and its engine need: seconds. Raises: ConfigError, ImportError when it can't be."""
    with heavy_imports():
        from slipstream.rollout_servers import server  # noqa: F401
        from slipstream.rollout_servers.engines.registry import engine_class

        engine_class(config)


async def serve(config: "RunConfig", name: str, *, until_finished: bool = False) -> int:
    """Starts the engine and serves until SIGINT, SIGTERM or, with `until_finished`, the end of the run.

    A server at work leaves in order on SIGTERM, within `rollout.notice_s`; a second signal ends it.

    Returns: the exit code.

    Raises: ConfigError when keys, env, rewards or model can't be used, EngineError when the engine does not start or
    crashes too often, RefusedError.
    """
    import asyncio

    from slipstream.configs.runtime.files import wait_for_file
    from slipstream.configs.runtime.logging import get_log
    from slipstream.configs.runtime.signals import add_stop_handler, service_exit_code
    from slipstream.configs.runtime.threads import cancel_tasks

    if until_finished and config.paths.summary.exists():
        return 0
    serving, exit_codes, at_work = asyncio.current_task(), list[int](), list["RolloutServer"]()
    assert serving is not None, "a coroutine runs in a task"

    def stop(code: int) -> None:
        exit_codes.append(code)
        serving.cancel()

    def receive(number: int) -> None:
        if at_work and number == signal.SIGTERM and not exit_codes:
            exit_codes.append(service_exit_code(number))
            at_work[0].leave()
        else:
            stop(service_exit_code(number))

    add_stop_handler(receive)
    finishing = [asyncio.create_task(wait_for_file(config.paths.summary))] if until_finished else []
    for task in finishing:
        task.add_done_callback(lambda ended: None if ended.cancelled() else stop(0))
    try:
        await _serve(config, name, at_work.append)
    except asyncio.CancelledError:
        if not exit_codes:
            raise
        get_log("rollout.cli").info("rollout server stops")
    except SystemExit as stopped:  # by `exit_on_signals`
        if stopped.code != 128 + signal.SIGTERM:
            raise
        exit_codes.append(service_exit_code(signal.SIGTERM))
    else:
        get_log("rollout.cli").info("rollout server has left")
        return 0
    finally:
        await cancel_tasks(*finishing)
    return exit_codes[-1]


async def _serve(config: "RunConfig", name: str, start_work: "Callable[[RolloutServer], object]") -> None:
    from contextlib import closing

    from slipstream.buffer.wire.auth import BUFFER, LEARNER, ROLLOUT, client_keys
    from slipstream.configs.runtime.errors import ConfigError
    from slipstream.configs.runtime.logging import get_log
    from slipstream.env.base import gives_rewards, offers_tools
    from slipstream.env.registry import build_env
    from slipstream.models.folder import initial_model
    from slipstream.rewards.scorer import Scorer
    from slipstream.rollout_servers.plugins import env_problems

    log = get_log("rollout.cli")
    # Names and keys are checked first: the engine's start takes many seconds.
    for service in (BUFFER, LEARNER):
        client_keys(config.security, ROLLOUT, service=service)
    with exit_on_signals():  # an env's constructor may block
        env = build_env(config.env)
        if problems := env_problems(config, env):
            raise ConfigError(problems)
        scorer = Scorer(config.rewards, config.scoring, evaluated=config.evaluated)
    with closing(scorer):
        scorer.require_time(generation_s=config.rollout.group_deadline_s, ticket_s=config.buffer.ticket_deadline_s)
        with heavy_imports():
            from slipstream.models.tokenizer import Tokenizer
            from slipstream.rollout_servers.engines.base import Engine
            from slipstream.rollout_servers.engines.registry import start_engine
            from slipstream.rollout_servers.engines.supervisor import RestartingEngine
            from slipstream.rollout_servers.prompt_filter import without_long_prompts
            from slipstream.rollout_servers.rollouts.conversation import ChatFormat
            from slipstream.rollout_servers.rollouts.player import Player
            from slipstream.rollout_servers.server import RolloutServer, require_accepted, server_hello

        tokenizer = Tokenizer(initial_model(config))
        if gives_rewards(env):
            ChatFormat.of(tokenizer, config.rollout.episode).check(tools=offers_tools(env))
        if config.rollout.skip_long_prompts:
            with exit_on_signals():
                env = without_long_prompts(env, tokenizer, config.rollout)
        teaching = await _open_teaching(config, env, tokenizer)
        await require_accepted(config.buffer, config.security, name, server_hello(config, env, tokenizer))
        seeds = engine_seeds(config.run.seed, name)

        async def start() -> Engine:
            seeded = config.model_copy(update={"run": config.run.model_copy(update={"seed": next(seeds)})})
            return await start_engine(seeded, tokenizer.model, eos_token_ids=tokenizer.eos_token_ids)

        log.info("engine starts", model=str(tokenizer.model), engine=config.rollout.engine.name)
        engine = RestartingEngine(await start(), start, config.rollout)
        log.info("engine ready")
        try:
            player = Player.from_config(config, env, tokenizer, engine, scorer, teaching)
            server = RolloutServer(config, name, player, engine)
            _serve_metrics(config, name, server)
            start_work(server)
            await server.run()
        finally:
            await engine.close()


async def _open_teaching(config: "RunConfig", env: "Env", tokenizer: "Tokenizer") -> "Teaching | None":
    from slipstream.rollout_servers.rollouts.teaching import Teaching

    return await Teaching.open(config, env, tokenizer)


def _serve_metrics(config: "RunConfig", name: str, server: "RolloutServer") -> None:
    import os

    from slipstream.configs.runtime.exposition import serve_metrics

    process, folder = os.environ.get(PROCESS_VARIABLE, name), config.paths.prometheus
    address = config.tracking.prometheus
    serve_metrics(address, folder, run=config.run.name, process=process, read=server.readings, server=name)


def engine_seeds(run_seed: int, server: str) -> Iterator[int]:
    """Seeds for the engines that a server starts, one each; no two engines of a run share one.

    A shared seed would correlate an answer's tokens before and after a restart, and the samples of different servers.
    """
    return (zlib.crc32(f"{run_seed} {server} {number}".encode()) for number in itertools.count())


def server_name() -> str:
    """A name that is unique within the run."""
    import os
    import secrets
    import socket

    # Host and process id are not enough: containers that share a network share both.
    return f"rollout-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


if __name__ == "__main__":
    main()
