"""A rollout server that generates all the time: `generator ORDERS CONFIG AT_ONCE`, with the address of its orders."""

import asyncio
import gc
import random
import sys
import time
from functools import partial
from itertools import count

import uvloop
import zmq.asyncio

from slipstream.buffer.wire.codec import decode, encode
from slipstream.configs import RunConfig
from slipstream.configs.logs import configure_logging
from slipstream.configs.memory import keep_freed_memory
from slipstream.configs.network import stay_on_loopback
from slipstream.rollout_servers.engines.build import start_engine
from slipstream.rollout_servers.engines.restart import RestartingEngine
from slipstream.rollout_servers.weights.hold import EvaluationHold
from slipstream.rollout_servers.weights.member import WeightMember
from slipstream.tools.bench.weights.orders import Generate, Generated, Here

PROMPT = list(range(2, 18))
SHORTEST, LONGEST = 32, 96
"""Tokens of an answer: of different lengths, so that they don't all end in the same step."""
ANSWER_S = 600.0


class Load:
    """Keeps the engine busy.

    Attributes:
        tokens: of all answers that are finished.
    """

    def __init__(self, engine: RestartingEngine) -> None:
        self.tokens = 0
        self._engine = engine

    async def run(self, seed: int) -> None:
        """One answer after the other."""
        lengths = random.Random(seed)
        for _ in count():
            length = lengths.randint(SHORTEST, LONGEST)
            (answer,) = await self._engine.generate(
                PROMPT, samples=1, greedy=False, deadline_s=ANSWER_S, max_tokens=length
            )
            self.tokens += len(answer.token_ids)


async def serve(address: str, config: RunConfig, at_once: int) -> None:
    """Generates, and follows the learner."""
    assert config.model.path is not None, "written by the bench"
    start = partial(start_engine, config, config.model.path, eos_token_ids=())
    engine = RestartingEngine(await start(), start, config.rollout)
    load = Load(engine)
    context = zmq.asyncio.Context()
    member = WeightMember(config, "generator", engine, EvaluationHold(), on_applied=lambda: None)
    try:
        with context.socket(zmq.PAIR) as socket:
            socket.connect(address)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(member.run(context))
                for seed in range(at_once):
                    tasks.create_task(load.run(seed))
                await socket.send(encode(Here()))
                while True:
                    order = decode(await socket.recv(), Generate)
                    started, before = time.perf_counter(), load.tokens
                    await asyncio.sleep(order.seconds)
                    tokens, seconds = load.tokens - before, time.perf_counter() - started
                    await socket.send(encode(Generated(tokens=tokens, seconds=seconds)))
    finally:
        await engine.close()


def main() -> None:
    """Serves until it is stopped."""
    address, config_json, at_once = sys.argv[1:]
    config = RunConfig.model_validate_json(config_json)
    configure_logging("generator", level="warning", folder=None)
    keep_freed_memory()
    stay_on_loopback(config)
    try:
        uvloop.run(serve(address, config, int(at_once)))
    finally:
        gc.freeze()  # the interpreter would walk through torch and vLLM once more before it ends


if __name__ == "__main__":
    main()
