"""The device mesh and its axes, and the store of the ranks."""

import socket
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.learner import ParallelConfig
from slipstream.learner.parallel.mesh import MeshSizes, build_mesh, join_world, leave_world
from slipstream.learner.parallel.plans import parallelise
from tests.conftest import free_port

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
        (MeshSizes(cp=8, ep=4), {"dp_shard": 1, "cp": 8}),
    ],
)
def test_mesh_has_named_axes(sizes: MeshSizes, axes: dict[str, int], fake_ranks: None) -> None:
    mesh = build_mesh("cpu", sizes)
    assert mesh.mesh_dim_names == tuple(axes)
    assert {name: mesh[name].size() for name in axes} == axes


@pytest.mark.parametrize(
    ("parallel", "dp_shard"), [({}, 8), ({"dp_replicate": 2}, 4), ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, 2)]
)
def test_rest_of_ranks_shares_a_copy(parallel: dict[str, int], dp_shard: int) -> None:
    assert MeshSizes.of(ParallelConfig(**parallel), ranks=RANKS).dp_shard == dp_shard


@pytest.mark.parametrize("parallel", [{"dp_shard": 4}, {"dp_replicate": 3}, {"tp": 16}])
def test_sizes_must_multiply_to_number_of_ranks(parallel: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"learner\.parallel.* 8"):
        MeshSizes.of(ParallelConfig(**parallel), ranks=RANKS)


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Describes a learner's only rank with a store at an address; returns its port."""

    def describe(address: str) -> int:
        port = free_port()
        described = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        for name, value in described.items():
            monkeypatch.setenv(name, value)
        return port

    return describe


def test_store_listens_on_master_address_only(rank_0: Callable[[str], int]) -> None:
    port = rank_0("127.0.0.1")
    world = join_world()
    try:
        world.store.set("key", "value")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10)
    finally:
        leave_world()


def test_store_at_foreign_address_is_refused(rank_0: Callable[[str], int]) -> None:
    port = rank_0("192.0.2.1")
    with pytest.raises(ConfigError, match=rf"192\.0\.2\.1:{port}.*MASTER_ADDR"):
        join_world()


def test_axes_that_older_transformers_lack_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)  # imports of it fail
    alone: Any = SimpleNamespace(sizes=MeshSizes(), expert_mesh=None)
    parallelise(None, alone)
    several: Any = SimpleNamespace(sizes=MeshSizes(tp=2), expert_mesh=None)
    with pytest.raises(ConfigError, match=r"tp=2, ep=1 need transformers .* and \d"):
        parallelise(None, several)
