"""One end of a gloo transfer group, in a process that leaves the group when its standard input ends, and ends too.

python -m tests.learner.weights.leaves learner|server PORT
"""

import os
import sys

from slipstream.buffer.wire.weights.protocol import Form
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig
from slipstream.learner.weights.broadcast import GlooTransport
from slipstream.rollout_servers.weights.receivers import GlooReceiver

DEADLINE_S = 60.0


def learner(port: int) -> GlooTransport:
    """The learner's end, once the server is there."""
    transport = GlooTransport(WeightsConfig(store_port=port, deadline_s=DEADLINE_S))
    os.write(1, b"listens\n")
    transport.form(1, 2)
    return transport


def server(port: int) -> GlooReceiver:
    """The server's end, once the learner is there."""
    receiver = GlooReceiver(SecurityConfig())
    receiver.enter(
        Form(transfer=1, epoch=1, transport="gloo", host="127.0.0.1", port=port, rank=1, world=2, deadline_s=DEADLINE_S)
    )
    return receiver


if __name__ == "__main__":
    end = (learner if sys.argv[1] == "learner" else server)(int(sys.argv[2]))
    os.write(1, b"entered\n")
    sys.stdin.read()
    end.close()
