"""The process `buffer`: serves one run's replay buffer until it is told to stop."""

import asyncio
import sys

import uvloop
import zmq.asyncio
from redis.exceptions import RedisError

from slipstream.buffer.service import BufferService
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import Outage, connect_async, unusable
from slipstream.buffer.wire.auth import service_keys
from slipstream.buffer.wire.sockets import MAX_MESSAGE_BYTES, bind_router
from slipstream.configs import RunConfig
from slipstream.configs.arguments import parse_run_arguments, start_log
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.processes import raise_open_file_limit
from slipstream.configs.runtime.signals import add_stop_handler
from slipstream.configs.runtime.threads import cancel_tasks

log = get_log("buffer.process")


async def serve(config: RunConfig) -> int:
    """Runs the service until SIGINT or SIGTERM; returns 128 + the signal's number.

    Raises: ConfigError when the address is taken or a key is missing, SlipstreamError when Redis can't be reached.
    """
    keys = service_keys(config.security)
    outage = Outage(config.redis)
    client = connect_async(config.redis, outage)
    context = zmq.asyncio.Context()
    socket = bind_router(
        context,
        config.buffer.bind,
        max_message_bytes=MAX_MESSAGE_BYTES,
        keys=keys,
        endpoint=config.buffer.endpoint,
    )
    service = BufferService(config, Ledger.of(client, config), socket, outage)
    serving = asyncio.create_task(service.run())
    told: asyncio.Queue[int] = asyncio.Queue()
    stopping = asyncio.create_task(told.get())
    add_stop_handler(told.put_nowait)
    log.info("buffer serves", bind=config.buffer.bind, redis=config.redis.address)
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        await cancel_tasks(serving)
        log.info("buffer stops")
        return 128 + await stopping
    except RedisError as error:
        raise unusable(config.redis, error) from error
    finally:
        await cancel_tasks(stopping)
        context.destroy(linger=0)
        await client.aclose()


def main() -> None:
    """Runs it, as the command line says."""
    config = parse_run_arguments("Serve the replay buffer of one run.")
    start_log(config, "buffer")
    raise_open_file_limit()
    try:
        sys.exit(uvloop.run(serve(config)))
    except SlipstreamError as error:
        for problem in error.problems:
            log.error("buffer failed", error=problem)
        sys.exit(1)
