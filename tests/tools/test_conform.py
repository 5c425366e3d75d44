"""`slipstream conform` on the reference figures, whole and damaged."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.conform import command

GOLDEN = Path(__file__).parents[1] / "golden" / "algorithms.json"


def damaged(tmp_path: Path, damage: Callable[[Any], object]) -> str:
    """A copy of the golden file after `damage`."""
    found = json.loads(GOLDEN.read_text(encoding="utf-8"))
    damage(found)
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return str(path)


def test_every_vector_of_the_reference_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([str(GOLDEN)]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    found = json.loads(GOLDEN.read_text(encoding="utf-8"))
    vectors = [
        f"{section}/{name}" for section in found if section not in ("shape", "inputs") for name in found[section]
    ]
    assert sorted(line.split()[0] for line in lines) == sorted(vectors)
    assert verdict == f"all {len(vectors)} agree (within 1e-05)"


@pytest.mark.parametrize(
    ("path", "vector"),
    [
        (("advantages", "rloo", "out", 8, 0), "advantages/rloo"),
        (("advantages", "gae_gamma1.0_lambda1.0", "returns", 8, 0), "advantages/gae_gamma1.0_lambda1.0"),
        (("losses", "gspo", "loss"), "losses/gspo"),
        (("losses", "gspo", "grad", 8, 0), "losses/gspo"),
        (("losses", "value_clipped", "loss"), "losses/value_clipped"),
        (("kl", "k2", 8, 0), "kl/k2"),
        (("aggregation", "token-sum"), "aggregation/token-sum"),
        (("correction", "token_tis2", "weights", 8, 0), "correction/token_tis2"),
        (("correction", "token_tis2", "metrics", "rollout_corr/chi2_seq"), "correction/token_tis2"),
        (("correction", "reject_token_k1_0.7_1.4", "mask", 8, 0), "correction/reject_token_k1_0.7_1.4"),
    ],
)
@pytest.mark.parametrize("by", [2e-5, math.nan])
def test_a_figure_that_differs_is_named_and_fails(
    path: tuple[str | int, ...], vector: str, by: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shift(found: Any) -> None:
        *parents, last = path
        for key in parents:
            found = found[key]
        found[last] += by

    assert command([damaged(tmp_path, shift)]) == 1
    different = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("DIFFERS")]
    assert different == [vector]


def test_a_vector_that_nothing_is_registered_for_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = damaged(tmp_path, lambda found: found["losses"].update(newest=found["losses"]["reinforce"]))
    assert command([file]) == 1
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("losses/newest"))
    assert "NOT RUN: nothing is registered under 'newest'" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "can't be read"), ("no json", "can't be read"), ("{}", "is no golden file: it lacks inputs, shape")],
)
def test_a_file_that_is_no_golden_file_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        command([str(path)])
