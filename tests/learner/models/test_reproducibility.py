"""The checksum of weights. `trainers/rl/test_two_ranks.py` has that of shards."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipstream.learner.models.reproducibility import weights_checksum
from slipstream.learner.parallel.mesh import World


def model(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)


def next_up(weight: Tensor) -> None:
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))


def round_otherwise(weight: Tensor) -> None:
    """One bit more in one weight, and one less in another."""
    bits = weight.view(torch.int32)
    bits[0, 0] += 1
    bits[0, 1] -= 1


def negate_zero(weight: Tensor) -> None:
    weight[0, 0] = -0.0


@pytest.mark.parametrize("change", [next_up, round_otherwise, negate_zero])
def test_any_changed_bit_changes_the_checksum(change: Callable[[Tensor], None], world: World) -> None:
    changed, same = model(), model()
    for each in (changed, same):
        each[0].get_parameter("weight").data[0, 0] = 0.0
    with torch.no_grad():
        change(changed[0].get_parameter("weight"))
    assert weights_checksum([same], world) != weights_checksum([changed], world)


def test_only_trained_weights_count(world: World) -> None:
    frozen = model()
    frozen[1].requires_grad_(False)
    checksums = [weights_checksum(models, world) for models in ([model()], [frozen], [frozen, model()], [])]
    assert len({*checksums}) == len(checksums)
    assert weights_checksum([model()], world) == checksums[0]
    with torch.no_grad():
        frozen[1].get_parameter("weight").add_(1)
    assert weights_checksum([frozen], world) == checksums[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_precision_has_a_checksum(dtype: torch.dtype, world: World) -> None:
    checksum = weights_checksum([model(dtype=dtype)], world)
    assert len(checksum) == 16 and int(checksum, 16) > 0
