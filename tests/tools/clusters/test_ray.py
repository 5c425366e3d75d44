"""`slipstream ray` without a cluster: the size of one, and refusals. Runs on a real one: `test_ray_cluster.py`."""

import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.clusters.ray import cluster_size
from tests.tools.conftest import CommandLine


def node(cpus: float, gpus: float = 0, *, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}}


HEAD = node(4)
MIXED = [HEAD, node(64, 8), node(48, 8), node(64, 8, alive=False)]


@pytest.mark.parametrize(
    ("nodes", "given", "size"),
    [
        ([HEAD, node(2)], (None, None, None), (2, 0, 2)),
        (MIXED, (None, None, None), (2, 8, 48)),
        (MIXED, (1, 4, 20), (1, 4, 20)),
        (MIXED, (None, 0, None), (3, 0, 4)),
    ],
)
def test_size_of_cluster(
    nodes: list[dict[str, Any]], given: tuple[int | None, int | None, int | None], size: tuple[int, int, int]
) -> None:
    assert cluster_size(nodes, *given) == size


@pytest.mark.parametrize("given", [(3, None, None), (None, 16, None)])
def test_too_small_cluster_is_refused(given: tuple[int | None, int | None, int | None]) -> None:
    with pytest.raises(ConfigError, match=r"cluster's 3 nodes [02] "):
        cluster_size(MIXED, *given)


def test_library_is_needed(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli("ray", Path("configs/demo.yaml").absolute(), f"run.dir={tmp_path}") == 2
    assert "slipstream[ray]" in cli.err
    assert list(tmp_path.iterdir()) == []
