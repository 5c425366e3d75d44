"""A process that receives versions into staging memory: `receiver ORDERS CONFIG`, with the address of its orders."""

import sys
import time
from typing import Any

import zmq

from slipstream.buffer.wire.codec import decode, encode
from slipstream.buffer.wire.messages import Message
from slipstream.buffer.wire.weights.protocol import Announce, Form, Manifest
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import configure_logging
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.receivers.registry import build_receivers
from slipstream.tools.bench.weights.baselines import BareGloo
from slipstream.tools.bench.weights.orders import Broadcast, Here, Received


class TimedStaging(Staging):
    """Knows how long its last check took."""

    check_s = 0.0

    def finish(self, manifest: Manifest) -> None:
        """As in Staging."""
        started = time.perf_counter()
        super().finish(manifest)
        self.check_s = time.perf_counter() - started


class Receiving:
    """Does what the bench orders."""

    def __init__(self, config: RunConfig) -> None:
        self._receivers = build_receivers(config)
        self._staging = TimedStaging(config.run.name, shared=False)
        self._bare: dict[str, BareGloo] = {}

    def obey(self, order: Any) -> Message:
        """Returns what is to be answered."""
        match order:
            case Form():
                self._receivers[order.transport].enter(order)
            case Announce():
                started, cpu_started = time.perf_counter(), time.process_time()
                self._receivers[order.transport].receive(order, self._staging)
                return Received(
                    receive_s=time.perf_counter() - started,
                    check_s=self._staging.check_s,
                    cpu_s=time.process_time() - cpu_started,
                )
            case Broadcast():
                if order.config not in self._bare:
                    self._bare[order.config] = BareGloo(RunConfig.model_validate_json(order.config), 1, None)
                self._bare[order.config].run(order.size_bytes)
        return Here()


def main() -> None:
    """Serves until it is stopped."""
    address, config_json = sys.argv[1:]
    config = RunConfig.model_validate_json(config_json)
    configure_logging("receiver", level="warning", folder=None)
    use_loopback_interface(config.weights.bind)
    receiving = Receiving(config)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        socket.send(encode(Here()))
        while True:
            socket.send(encode(receiving.obey(decode(socket.recv(), Form | Announce | Broadcast))))


if __name__ == "__main__":
    main()
