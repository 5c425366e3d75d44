"""What a rollout server can receive through."""

from slipstream.configs import RunConfig
from slipstream.rollout_servers.weights.transports.base import Receiver
from slipstream.rollout_servers.weights.transports.file import FileReceiver
from slipstream.rollout_servers.weights.transports.gloo import GlooReceiver
from slipstream.rollout_servers.weights.transports.shm import ShmReceiver
from slipstream.rollout_servers.weights.transports.stream import StreamReceiver


def build_receivers(config: RunConfig) -> dict[str, Receiver]:
    """All of them, by name; the learner chooses. Raises: ConfigError when a key file is missing."""
    return {"gloo": GlooReceiver(), "shm": ShmReceiver(), "file": FileReceiver(), "stream": StreamReceiver(config)}
