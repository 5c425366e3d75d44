"""Which transports a learner offers, by `weights.transport`."""

from importlib import import_module

import torch

from slipstream.buffer.wire.weights.shm import SHARED_MEMORY, Segment, SegmentError
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import heavy_imports
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.members import BROADCAST
from slipstream.learner.weights.transports.base import Broadcast, Fetched, Transports
from slipstream.learner.weights.transports.fetch import FileTransport, ShmTransport, StreamTransport
from slipstream.learner.weights.transports.gloo import GlooTransport
from slipstream.learner.weights.transports.nccl import NcclTransport, SglangTransport

log = get_log("learner.weights.transports")

SENDER = "vllm.distributed.weight_transfer.nccl_common"


def transport_names(config: RunConfig) -> tuple[str, ...]:
    """What this learner sends through, the preferred one first; late joiners of a transfer group use the stream.

    Raises: ConfigError when what is asked for can't be had here.
    """
    name = config.weights.transport
    names: tuple[str, ...]
    if name == "auto":
        names = ("shm", "stream") if torch.cuda.is_available() else ("shm", "gloo", "stream")
        if torch.cuda.is_available() and config.rollout.engine.nccl == NcclTransport.name:
            names = _with_nccl(names)
    elif name == "nccl":
        way = config.rollout.engine.nccl or NcclTransport.name
        if (lack := _lack_of_nccl(way)) is not None:
            raise ConfigError(f"weights.transport=nccl needs {lack}; use auto, or gloo")
        names = (way, "stream")
    elif name in BROADCAST:
        names = (name, "stream")
    else:
        names = (name,)
    if "shm" not in names or (reason := _no_shared_memory(config.run.name)) is None:
        return names
    if name == "shm":
        raise ConfigError(f"weights.transport=shm: {reason}")
    log.warning("weights are not passed through shared memory", reason=reason)
    return tuple(each for each in names if each != "shm")


def build_transports(config: RunConfig) -> Transports:
    """The transports that `weights.transport` may need.

    Raises: ConfigError when a port is taken, a key file is missing, or a folder can't be written to.
    """
    order = transport_names(config)
    fetched: dict[str, Fetched] = {}
    broadcast: Broadcast | None = None
    try:
        for name in order:
            if name in BROADCAST:
                broadcast = _broadcast(name, config.weights)
            else:
                fetched[name] = _fetched(name, config)
    except ConfigError:
        Transports(order, fetched, broadcast).close()
        raise
    return Transports(order, fetched, broadcast)


def _broadcast(name: str, config: WeightsConfig) -> Broadcast:
    match name:
        case "gloo":
            return GlooTransport(config)
        case "nccl":
            return NcclTransport(config)
        case "nccl_sglang":
            return SglangTransport(config)
    raise AssertionError(f"no transport that broadcasts is called {name}")


def _fetched(name: str, config: RunConfig) -> Fetched:
    weights = config.weights
    match name:
        case "shm":
            return ShmTransport()
        case "file":
            folder = config.paths.weights if weights.folder is None else weights.folder / config.run.name
            return FileTransport(folder.absolute(), full_every=weights.full_every)
        case "stream":
            # Late joiners have nothing that a difference could be one to: only as the chosen transport it keeps them.
            full_every = weights.full_every if weights.transport == "stream" else 1
            return StreamTransport(weights, config.security, full_every=full_every)
    raise AssertionError(f"no transport that is fetched from is called {name}")


def _with_nccl(names: tuple[str, ...]) -> tuple[str, ...]:
    lack = _lack_of_nccl(NcclTransport.name)
    if lack is None:
        return (NcclTransport.name, *names)
    log.warning("weights are not passed through nccl", reason=f"it needs {lack}")
    return names


def _lack_of_nccl(way: str) -> str | None:
    """What is needed and not here, or None if nothing is. Imports it, which takes seconds that no group is to wait."""
    if not torch.cuda.is_available():
        return "a CUDA GPU, and this learner sees none"
    if way != NcclTransport.name:
        return None
    try:
        with heavy_imports():
            import_module(SENDER)
    except ImportError as error:
        return f"vLLM, by whose format weights travel, in the learner's environment too ({error})"
    return None


def _no_shared_memory(run: str) -> str | None:
    """Why there is none, or None if there is."""
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}"
    try:
        Segment(run, 1).close()
    except SegmentError as error:
        return str(error)
    return None
