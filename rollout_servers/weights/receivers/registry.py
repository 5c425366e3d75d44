"""What a rollout server can receive through."""

from slipstream.configs import RunConfig
from slipstream.rollout_servers.weights.receivers.base import Receiver
from slipstream.rollout_servers.weights.receivers.file import FileReceiver
from slipstream.rollout_servers.weights.receivers.gloo import GlooReceiver
from slipstream.rollout_servers.weights.receivers.shm import ShmReceiver
from slipstream.rollout_servers.weights.receivers.stream import StreamReceiver


def build_receivers(config: RunConfig) -> dict[str, Receiver]:
    """All of them, by name; the learner chooses. Raises: ConfigError when a key file is missing."""
    return {"gloo": GlooReceiver(), "shm": ShmReceiver(), "file": FileReceiver(), "stream": StreamReceiver(config)}
