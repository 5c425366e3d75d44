"""Families of models by kinds of parallelism: four ranks compute what one process does, or refuse to."""

import re
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.learner.parallel.mesh import World
from tests.conftest import free_port
from tests.contract.families import FAMILIES, write_family
from tests.learner.parallel.families import LENGTHS, MESHES, RANKS, scores_and_gradients
from tests.pipeline.forked import run_to_end

ROOT = Path(__file__).parents[3]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES: Mapping[str, Mapping[str, int]] = {"DeepSeek-V3": {**HEADS, "num_key_value_heads": 4}}
"""Sizes of a family's model where heads are other than `HEADS`."""
FEW = ("cp, Gemma 2", "tp, Phi-3", "ep, gpt-oss", "tp+ep, DeepSeek-V3")
"""Cases that are not behind the marker."""
ROW = re.compile(rf"^\| ([^|`]+) \|((?: (?:yes)? ?\|){{{len(MESHES)}}})$", re.MULTILINE)


def claims() -> dict[str, list[str]]:
    """The kinds of parallelism of each family in the docs' table."""
    rows = ROW.findall((ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8"))
    return {
        family: [mesh for mesh, cell in zip(MESHES, cells.split("|"), strict=False) if cell.strip()]
        for families, cells in rows
        for family in families.split(", ")
    }


CLAIMS = claims()
CASES = [f"{mesh}, {family}" for family, meshes in CLAIMS.items() for mesh in meshes]
REFUSED = [f"{mesh}, {family}" for family, meshes in CLAIMS.items() for mesh in MESHES if mesh not in meshes]
Results = Callable[[str], Path]


def marked(cases: Iterable[str]) -> list[Any]:
    """The cases as parameters; only `FEW` run by default."""
    return [pytest.param(case, marks=[] if case in FEW else [pytest.mark.soak]) for case in cases]


@pytest.fixture(scope="module")
def folder_of(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns the folder in which four ranks have left the results of a case, and of those that run with it."""
    found: dict[bool, Path] = {}

    def run(case: str) -> Path:
        few = case in FEW
        if few not in found:
            found[few] = tmp_path_factory.mktemp("families")
            run_ranks(forks, found[few], FEW if few else [each for each in (*CASES, *REFUSED) if each not in FEW])
        return found[few]

    return run


def run_ranks(forks: ForkServerContext, folder: Path, cases: Iterable[str]) -> None:
    """Writes the models of some cases, and runs these."""
    for family in {case.split(", ")[1] for case in cases}:
        write_family(folder / family, family, **SIZES.get(family, HEADS))
    run_to_end(forks, "tests.learner.parallel.families", folder, free_port(), *cases, output=folder / "output")


@pytest.mark.parametrize("case", marked(CASES))
def test_ranks_compute_what_one_process_does(case: str, folder_of: Results, world: World) -> None:
    folder = folder_of(case)
    alone = scores_and_gradients(folder / case.split(", ")[1], world)
    of_ranks = [load_file(folder / f"{case}-{rank}.safetensors") for rank in range(RANKS)]
    together = {name: tensor for results in of_ranks for name, tensor in results.items()}
    assert together.keys() == alone.keys()
    for row in range(len(LENGTHS)):
        name = f"logprobs.{row}"
        torch.testing.assert_close(together[name], alone.pop(name), atol=2e-5, rtol=1e-5)
    for name, gradient in alone.items():
        largest = gradient.abs().max()
        assert largest > 0, name
        assert (together[name] - gradient).abs().max() < 2e-5 * largest, name


@pytest.mark.parametrize("case", marked(REFUSED))
def test_other_combinations_are_refused(case: str, folder_of: Results) -> None:
    reasons = {(folder_of(case) / f"{case}-{rank}.txt").read_text(encoding="utf-8") for rank in range(RANKS)}
    assert len(reasons) == 1
    assert "learner.parallel" in reasons.pop()


def test_table_has_each_family_once() -> None:
    assert list(CLAIMS) == list(FAMILIES)
    assert set(FEW) < set(CASES)
