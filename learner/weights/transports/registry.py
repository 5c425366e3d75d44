"""Choice of the transports that a learner offers, by `weights.transport`."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from slipstream.buffer.wire.weights.shm import SHARED_MEMORY, Segment, SegmentError
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.signals import heavy_imports
from slipstream.configs.schema.weights import SecurityConfig, WeightsConfig
from slipstream.learner.weights.members import BROADCAST
from slipstream.learner.weights.transports.base import Broadcast, Fetched, Transports
from slipstream.learner.weights.transports.broadcast import GlooTransport, NcclTransport, SglangTransport
from slipstream.learner.weights.transports.fetch import FileTransport, ShmTransport, StreamTransport

log = get_log("learner.weights.transports")

SENDER = "vllm.distributed.weight_transfer.nccl_common"


def transport_names(name: str, *, run: str, nccl: str | None) -> tuple[str, ...]:
    """Names of this learner's transports, the preferred one first; late joiners of a transfer group use the stream.

    Args:
        name: `weights.transport`.
        nccl: the transport by which the engine receives through NCCL, if it can.

    Raises: ConfigError when this learner can't offer the transport.
    """
    names: tuple[str, ...]
    if name == "auto":
        names = ("shm", "stream") if torch.cuda.is_available() else ("shm", "gloo", "stream")
        if torch.cuda.is_available() and nccl == NcclTransport.name:
            names = _with_nccl(names)
    elif name == "nccl":
        nccl = nccl or NcclTransport.name
        if (lack := _lack_of_nccl(nccl)) is not None:
            raise ConfigError(f"weights.transport=nccl needs {lack}; use auto, or gloo")
        names = (nccl, "stream")
    elif name in BROADCAST:
        names = (name, "stream")
    else:
        names = (name,)
    if "shm" not in names or (reason := _no_shared_memory(run)) is None:
        return names
    if name == "shm":
        raise ConfigError(f"weights.transport=shm: {reason}")
    log.warning("weights are not passed through shared memory", reason=reason)
    return tuple(each for each in names if each != "shm")


def build_transports(config: RunConfig) -> Transports:
    """The transports that `weights.transport` may need.

    Raises: ConfigError when a port is taken, a key file is missing, or a folder can't be written to.
    """
    weights = config.weights
    nccl = None if config.model.lora is not None else config.rollout.engine.nccl  # adapters are small
    order = transport_names(weights.transport, run=config.run.name, nccl=nccl)
    folder = config.paths.weights if weights.folder is None else weights.folder / config.run.name
    fetched: dict[str, Fetched] = {}
    broadcast: Broadcast | None = None
    try:
        for name in order:
            if name in BROADCAST:
                broadcast = _broadcast(name, weights)
            else:
                fetched[name] = _fetched(name, order, weights, config.security, folder.absolute())
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
    raise AssertionError(f"{name} is not a broadcast transport")


def _fetched(
    name: str, order: Sequence[str], weights: WeightsConfig, security: SecurityConfig, folder: Path
) -> Fetched:
    match name:
        case "shm":
            return ShmTransport()
        case "file":
            return FileTransport(folder, full_every=weights.full_every)
        case "stream":
            # Beside a broadcast only late joiners use it, and they hold no version that a difference applies to.
            full_every = 1 if any(each in BROADCAST for each in order) else weights.full_every
            return StreamTransport(weights, security, full_every=full_every)
    raise AssertionError(f"{name} is not a fetched transport")


def _with_nccl(names: tuple[str, ...]) -> tuple[str, ...]:
    lack = _lack_of_nccl(NcclTransport.name)
    if lack is None:
        return (NcclTransport.name, *names)
    log.warning("weights are not passed through nccl", reason=f"it needs {lack}")
    return names


def _lack_of_nccl(name: str) -> str | None:
    """The missing prerequisite of NCCL, None if there is none. Imports vLLM here: later, a process group would wait."""
    if not torch.cuda.is_available():
        return "a CUDA GPU, and this learner sees none"
    if name != NcclTransport.name:
        return None
    try:
        with heavy_imports():
            import_module(SENDER)
    except ImportError as error:
        return f"vLLM, whose packed format it uses, in the learner's environment too ({error})"
    return None


def _no_shared_memory(run: str) -> str | None:
    """The reason why shared memory can't be used, None if it can."""
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}"
    try:
        Segment(run, 1).close()
    except SegmentError as error:
        return str(error)
    return None
