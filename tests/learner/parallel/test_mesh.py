"""The device mesh and its axes."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.parallel.mesh import MeshSizes, build_mesh

RANKS = 8


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """A process group of eight ranks; only this one is real."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        (MeshSizes(dp_shard=8), {"dp_shard": 8}),
        (MeshSizes(dp_replicate=2, dp_shard=2, tp=2), {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        (MeshSizes(cp=2, ep=4), {"dp_shard": 1, "cp": 2, "ep": 4}),
    ],
)
def test_mesh_has_named_axes(sizes: MeshSizes, axes: dict[str, int], fake_ranks: None) -> None:
    mesh = build_mesh("cpu", sizes)
    assert mesh.mesh_dim_names == tuple(axes)
    assert {name: mesh[name].size() for name in axes} == axes


def test_sizes_must_multiply_to_number_of_ranks(fake_ranks: None) -> None:
    with pytest.raises(ConfigError, match=r"'dp_shard': 4, .* 8"):
        build_mesh("cpu", MeshSizes(dp_shard=4))
