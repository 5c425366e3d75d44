"""Which transports a learner offers, by `weights.transport`."""

import torch

from slipstream.buffer.wire.segments import SHARED_MEMORY, Segment, SegmentError
from slipstream.configs import RunConfig
from slipstream.configs.errors import ConfigError
from slipstream.configs.folder import RunFolder
from slipstream.configs.logs import get_log
from slipstream.learner.weights.transports.base import WeightTransport
from slipstream.learner.weights.transports.file import FileTransport
from slipstream.learner.weights.transports.gloo import GlooTransport
from slipstream.learner.weights.transports.nccl import NcclTransport
from slipstream.learner.weights.transports.shm import ShmTransport
from slipstream.learner.weights.transports.stream import StreamTransport

log = get_log("learner.weights.transports")


def transport_names(config: RunConfig) -> tuple[str, ...]:
    """What this learner sends through, the preferred one first; late joiners of a transfer group use the stream."""
    name = config.weights.transport
    names: tuple[str, ...]
    if name == "auto":
        names = ("nccl", "shm", "stream") if torch.cuda.is_available() else ("shm", "gloo", "stream")
    elif name in ("gloo", "nccl"):
        names = (name, "stream")
    else:
        names = (name,)
    if "shm" not in names or (reason := _no_shared_memory(config.run.name)) is None:
        return names
    if name == "shm":
        raise ConfigError(f"weights.transport=shm: {reason}")
    log.warning("weights are not passed through shared memory", reason=reason)
    return tuple(each for each in names if each != "shm")


def build_transports(config: RunConfig) -> dict[str, WeightTransport]:
    """The transports that `weights.transport` may need, by name, the preferred one first.

    Raises: ConfigError when a port is taken, a key file is missing, or a folder can't be written to.
    """
    built: dict[str, WeightTransport] = {}
    try:
        for name in transport_names(config):
            built[name] = _build(name, config)
    except ConfigError:
        for transport in built.values():
            transport.close()
        raise
    return built


def _build(name: str, config: RunConfig) -> WeightTransport:
    weights = config.weights
    match name:
        case "gloo":
            return GlooTransport(weights)
        case "nccl":
            return NcclTransport(weights)
        case "shm":
            return ShmTransport()
        case "file":
            folder = RunFolder.of(config).weights if weights.folder is None else weights.folder / config.run.name
            return FileTransport(folder.absolute(), full_every=weights.full_every)
        case "stream":
            # Late joiners have nothing that a difference could be one to: only as the chosen transport it keeps them.
            return StreamTransport(config, full_every=weights.full_every if weights.transport == "stream" else 1)
    raise AssertionError(f"no transport is called {name}")


def _no_shared_memory(run: str) -> str | None:
    """Why there is none, or None if there is."""
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}"
    try:
        Segment(run, 1).close()
    except SegmentError as error:
        return str(error)
    return None
