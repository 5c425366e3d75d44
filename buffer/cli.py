"""The console script `buffer`: serves one run's replay buffer until SIGINT or SIGTERM.

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

    from slipstream.configs.arguments import parse_run_arguments, start_log
    from slipstream.configs.runtime.errors import SlipstreamError
    from slipstream.configs.runtime.logging import get_log
    from slipstream.configs.runtime.processes import raise_open_file_limit

    config = parse_run_arguments("Serve the replay buffer of one run.")
    start_log(config.paths, "buffer", level=config.run.log_level)
    raise_open_file_limit()
    try:
        sys.exit(uvloop.run(serve(config)))
    except SlipstreamError as error:
        for problem in error.problems:
            get_log("buffer.cli").error("buffer failed", error=problem)
        sys.exit(error.exit_code)


async def serve(config: "RunConfig") -> int:
    """Runs the service until SIGINT or SIGTERM; returns 128 + the signal's number.

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
    from slipstream.configs.runtime.logging import get_log
    from slipstream.configs.runtime.signals import add_stop_handler
    from slipstream.configs.runtime.threads import cancel_tasks

    log = get_log("buffer.cli")
    keys = service_keys(config.security, BUFFER)
    outage = Outage(config.redis)
    client = connect_async(config.redis, outage)
    context = zmq.asyncio.Context()
    buffer = config.buffer
    socket = bind_router(context, buffer.bind, max_message_bytes=MAX_MESSAGE_BYTES, keys=keys, endpoint=buffer.endpoint)
    service = BufferService(config, Ledger(client, config), socket, outage)
    serving = asyncio.create_task(service.run())
    signals: asyncio.Queue[int] = asyncio.Queue()
    stopping = asyncio.create_task(signals.get())
    add_stop_handler(signals.put_nowait)
    log.info("buffer serves", bind=config.buffer.bind, redis=config.redis.address)
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        await cancel_tasks(serving)
        log.info("buffer stops")
        return 128 + await stopping
    except RedisError as error:
        raise redis_error(config.redis, error) from error
    finally:
        await cancel_tasks(stopping)
        context.destroy(linger=0)
        await client.aclose()


if __name__ == "__main__":
    main()
