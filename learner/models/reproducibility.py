"""Reproducibility of training: a checksum of the weights, and the surroundings that the last bits depend on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from slipstream.configs.runtime.hardware import processor_name
from slipstream.learner.parallel.mesh import World

_PACKAGES = ("torch", "transformers", "numpy")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the size of an element, in bytes."""
_CHUNK = {"cuda": 1 << 22, "cpu": 1 << 15}
"""Elements that are widened at once: to 32 MB on a GPU; on a CPU to what a core's cache holds, as for more torch would
wake other threads, which takes longer than the work."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Surroundings of a training: where they differ, the same step may round otherwise."""

    ranks: int
    device: str
    """`cpu`, or the name of the GPU."""
    threads: int
    """Threads of torch, on each rank."""
    cpu: str
    """The processor, and the vector instructions that torch takes."""
    versions: dict[str, str]
    """Packages that do the arithmetic."""

    @classmethod
    def here(cls, *, ranks: int, device: torch.device) -> "Surroundings":
        """Those of this process."""
        return cls(
            ranks=ranks,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            threads=torch.get_num_threads(),
            cpu=f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}",
            versions={package: version(package) for package in _PACKAGES},
        )


@torch.no_grad()
def weights_checksum(models: Iterable[nn.Module], world: World) -> str:
    """Checksum of all parameters that are trained, 16 hexadecimal digits, the same on all ranks; a collective.

    The sum of the squares of their bits as integers, modulo 2^64: it does not depend on how they are sharded, and takes
    one pass over the weights on their device. A square, because errors of rounding in both directions would cancel in a
    sum. Weights that change places are not noticed.
    """
    own = (
        _own_shard(parameter.detach(), world)
        for model in models
        for parameter in model.parameters()
        if parameter.requires_grad
    )
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    vectors = (shard.contiguous().view(-1).view(_BITS[shard.element_size()]) for shard in own if shard is not None)
    for bits in _portions(vectors, most=_CHUNK[world.device.type]):
        wide = bits.to(torch.int64, copy=True)
        total += wide.mul_(wide).sum().to(world.device)
    return f"{int(world.sum_of_all(total)) & (1 << 64) - 1:016x}"


def _own_shard(parameter: Tensor, world: World) -> Tensor | None:
    """This rank's part of a parameter; None where another rank counts the same values."""
    if not isinstance(parameter, DTensor):
        return parameter if world.is_root else None
    places = zip(parameter.placements, parameter.device_mesh.get_coordinate() or (), strict=True)
    if any(isinstance(placement, Replicate) and coordinate for placement, coordinate in places):
        return None
    return parameter.to_local()


def _portions(vectors: Iterable[Tensor], *, most: int) -> Iterator[Tensor]:
    """The vectors in portions of at most so many elements: small ones together, because each call has its price."""
    small: list[Tensor] = []
    size = 0
    for vector in vectors:
        if vector.numel() >= most:
            yield from vector.split(most)
            continue
        if size + vector.numel() > most:
            yield torch.cat(small)
            small, size = [], 0
        small.append(vector)
        size += vector.numel()
    if small:
        yield torch.cat(small)
