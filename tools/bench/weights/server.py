"""A rollout server without an engine that generates: `server ORDERS NAME`, with the address of its orders."""

import asyncio
import contextlib
import sys

import uvloop
import zmq.asyncio

from slipstream.buffer.wire.codec import decode, encode
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightMember
from slipstream.tools.bench.weights.engine import SilentEngine
from slipstream.tools.bench.weights.orders import Follow, Here, Leave


async def serve(address: str, name: str) -> None:
    """Follows whichever learner it is told to."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        await socket.send(encode(Here()))
        while True:
            order = decode(await socket.recv(), Follow)
            following = asyncio.create_task(_follow(RunConfig.model_validate_json(order.config), name))
            hearing = asyncio.ensure_future(socket.recv())
            await asyncio.wait({following, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
            decode(await hearing, Leave)
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            await socket.send(encode(Here()))


async def _follow(config: RunConfig, name: str) -> None:
    use_loopback_interface(config.weights.bind)
    context = zmq.asyncio.Context()
    member = WeightMember(config, name, SilentEngine(), EvaluationHold(), on_applied=lambda: None)
    try:
        await member.run(context)
    finally:
        context.term()


def main() -> None:
    """Serves until it is stopped."""
    address, name = sys.argv[1:]
    configure_logging(name, level="warning", folder=None)
    uvloop.run(serve(address, name))


if __name__ == "__main__":
    main()
