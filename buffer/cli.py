"""The console script `buffer`: serves one run's replay buffer until a signal or the end of the run.

Imports stand inside the functions: before `main` has set the handler, Ctrl-C would print a traceback.
"""

from typing import TYPE_CHECKING

from slipstream.configs.runtime.signals import restore_default_sigint

if TYPE_CHECKING:
    from slipstream.configs import RunConfig


def main() -> None:
    """Entry point."""
    restore_default_sigint()
    import sys

    import uvloop

    from slipstream.configs.arguments import add_until_finished, exit_code, read_run_arguments, run_parser, start_log
    from slipstream.configs.runtime.errors import SlipstreamError
    from slipstream.configs.runtime.logging import get_log
    from slipstream.configs.runtime.processes import raise_open_file_limit
    from slipstream.configs.runtime.tracing import start_tracing

    parser = run_parser("Serve the replay buffer of one run.")
    add_until_finished(parser)
    parser.add_argument(
        "--ping",
        metavar="SERVER",
        nargs="?",
        const="",
        type=server_prefix,
        help="serve nothing: exit with 0 if the running service answers, and has a rollout server whose name begins so",
    )
    arguments, config = read_run_arguments(parser)
    if arguments.ping is not None:
        sys.exit(exit_code(lambda: ping(config, arguments.ping)))
    start_log(config.paths, "buffer", level=config.run.log_level)
    start_tracing(config.tracking.trace, config.paths.traces, run=config.run.name, process="buffer")
    raise_open_file_limit()
    try:
        sys.exit(uvloop.run(serve(config, until_finished=arguments.until_finished)))
    except SlipstreamError as error:
        for problem in error.problems:
            get_log("buffer.cli").error("buffer failed", error=problem)
        sys.exit(error.exit_code)


def server_prefix(text: str) -> str:
    """Argument type: the beginning of a server's name. Without this, an override behind `--ping` would be one."""
    from argparse import ArgumentTypeError

    if "=" in text:
        raise ArgumentTypeError(f"{text} is no server; put what changes a key before --ping")
    return text


def ping(config: "RunConfig", server: str) -> int:
    """Requests the state of the running service; returns 0, or 1 if no server's name begins with `server`.

    Raises: DeadlineError when it does not answer in time, SlipstreamError when it refuses, ConfigError without keys.
    """
    import uuid

    import zmq

    from slipstream.buffer.wire import messages as m
    from slipstream.buffer.wire.auth import BUFFER, LEARNER, client_keys
    from slipstream.buffer.wire.codec import decode, encode
    from slipstream.buffer.wire.sockets import connect_dealer
    from slipstream.configs.runtime.errors import DeadlineError, RefusedError

    endpoint, deadline_s = config.buffer.endpoint, config.buffer.reply_deadline_s
    keys = client_keys(config.security, LEARNER, service=BUFFER)
    with zmq.Context() as context:
        socket = connect_dealer(context, endpoint, identity=f"ping-{uuid.uuid4().hex}", keys=keys)
        with socket:
            socket.send(encode(m.StateRequest(request=1)))
            if not socket.poll(round(deadline_s * 1000)):
                raise DeadlineError(f"the buffer at {endpoint} did not answer within {deadline_s:g} s")
            state = decode(socket.recv(), m.ToLearner)
    if not isinstance(state, m.State):
        raise RefusedError(f"the buffer at {endpoint} answered {state}")
    names = [status.server for status in state.servers]
    print(f"version {state.version}, {state.counts.trained} groups trained, rollout servers: {', '.join(names) or '-'}")
    return 0 if not server or any(name.startswith(server) for name in names) else 1


async def serve(config: "RunConfig", *, until_finished: bool = False) -> int:
    """Runs the service until SIGINT, SIGTERM or, with `until_finished`, the end of the run; returns the exit code.

    Raises: ConfigError when the address is in use or a key is missing, SlipstreamError when Redis can't be reached.
    """
    import asyncio

    import zmq.asyncio
    from redis.exceptions import RedisError

    from slipstream.buffer.service import BufferService
    from slipstream.buffer.store.ledger import Ledger
    from slipstream.buffer.store.redis import Outage, connect_async, redis_error
    from slipstream.buffer.wire.auth import BUFFER, service_keys
    from slipstream.buffer.wire.sockets import MAX_MESSAGE_BYTES, bind_router
    from slipstream.configs.runtime.exposition import serve_metrics
    from slipstream.configs.runtime.files import wait_for_file
    from slipstream.configs.runtime.logging import get_log
    from slipstream.configs.runtime.signals import add_stop_handler, service_exit_code
    from slipstream.configs.runtime.threads import cancel_tasks

    log = get_log("buffer.cli")
    keys = service_keys(config.security, BUFFER)
    outage = Outage(config.redis)
    client = connect_async(config.redis, outage)
    context = zmq.asyncio.Context()
    buffer = config.buffer
    socket = bind_router(context, buffer.bind, max_message_bytes=MAX_MESSAGE_BYTES, keys=keys, endpoint=buffer.endpoint)
    service = BufferService(config, Ledger(client, config), socket, outage)
    serve_metrics(
        config.tracking.prometheus,
        config.paths.prometheus,
        run=config.run.name,
        process="buffer",
        read=service.readings,
    )
    serving = asyncio.create_task(service.run())
    signals: asyncio.Queue[int] = asyncio.Queue()
    stopping = asyncio.create_task(signals.get())
    finishing = [asyncio.create_task(wait_for_file(config.paths.summary))] if until_finished else []
    add_stop_handler(signals.put_nowait)
    log.info("buffer serves", bind=config.buffer.bind, redis=config.redis.address)
    try:
        done, _ = await asyncio.wait([serving, stopping, *finishing], return_when=asyncio.FIRST_COMPLETED)
        await cancel_tasks(serving)
        log.info("buffer stops")
        return 0 if done.isdisjoint([stopping]) else service_exit_code(await stopping)
    except RedisError as error:
        raise redis_error(config.redis, error) from error
    finally:
        await cancel_tasks(stopping, *finishing)
        context.destroy(linger=0)
        await client.aclose()


if __name__ == "__main__":
    main()
