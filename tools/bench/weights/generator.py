"""A rollout server that generates when told to: `generator ORDERS CONFIG AT_ONCE`, with the address of its orders."""

import asyncio
import gc
import random
import sys
import time
from functools import partial

import uvloop
import zmq.asyncio

from slipstream.buffer.wire.codec import decode, encode
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.configs.runtime.processes import raise_malloc_thresholds
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.weights.eval_hold import EvaluationHold
from slipstream.rollout_servers.weights.follower import WeightMember
from slipstream.tools.bench.weights.orders import Generate, Generated, Here

PROMPT = list(range(2, 18))
SHORTEST, LONGEST = 32, 96
"""Tokens of an answer: of different lengths, so that they don't all end in the same step."""


async def answer(engine: RestartingEngine, *, seed: int, until: float) -> int:
    """One answer after the other; returns how many tokens they have, the last one cut off at `until`."""
    lengths, tokens = random.Random(seed), 0
    while (left_s := until - time.perf_counter()) > 0:
        length = lengths.randint(SHORTEST, LONGEST)
        (found,) = await engine.generate(PROMPT, samples=1, greedy=False, deadline_s=left_s, max_tokens=length)
        tokens += len(found.token_ids)
    return tokens


async def generate(engine: RestartingEngine, *, at_once: int, seconds: float) -> Generated:
    """Keeps the engine busy for so long."""
    started = time.perf_counter()
    working = [answer(engine, seed=seed, until=started + seconds) for seed in range(at_once)]
    tokens = sum(await asyncio.gather(*working))
    return Generated(tokens=tokens, seconds=time.perf_counter() - started)


async def serve(address: str, config: RunConfig, at_once: int) -> None:
    """Generates, and follows the learner."""
    assert config.model.path is not None, "written by the bench"
    start = partial(start_engine, config, config.model.path, eos_token_ids=())
    engine = RestartingEngine(await start(), start, config.rollout)
    context = zmq.asyncio.Context()
    member = WeightMember(config, "generator", engine, EvaluationHold(), on_applied=lambda: None)
    try:
        with context.socket(zmq.PAIR) as socket:
            socket.connect(address)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(member.run(context))
                await socket.send(encode(Here()))
                while True:
                    order = decode(await socket.recv(), Generate)
                    generated = await generate(engine, at_once=at_once, seconds=order.seconds)
                    await socket.send(encode(generated))
    finally:
        await engine.close()


def main() -> None:
    """Serves until it is stopped."""
    address, config_json, at_once = sys.argv[1:]
    config = RunConfig.model_validate_json(config_json)
    configure_logging("generator", level="warning", folder=None)
    raise_malloc_thresholds()
    use_loopback_interface(config.weights.bind)
    try:
        uvloop.run(serve(address, config, int(at_once)))
    finally:
        gc.freeze()  # the interpreter would walk through torch and vLLM once more before it ends


if __name__ == "__main__":
    main()
