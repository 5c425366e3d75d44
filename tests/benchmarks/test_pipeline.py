"""A small `slipstream bench pipeline`: real processes at two bounds of staleness."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.pipeline import Speed, figures_of
from benchmarks.pipeline_server import MEAN_TOKENS, MOST_TOKENS, draw
from tests.benchmarks.conftest import measured

SMALL = ["--steps", "2", "--groups-per-step", "1", "--lengths", "log-normal", "--staleness", "1", "--engine", "hf"]


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_left")
def test_all_figures_are_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = measured("pipeline", SMALL, tmp_path / "runs")
    printed = capsys.readouterr().out.splitlines()
    assert [line[:46].rstrip() for line in printed[:-1]] == [figure["name"] for figure in record["figures"]]
    assert len([figure for figure in record["figures"] if figure["goal"]]) == 1
    ((synchronous,), (stale,)) = record["details"]["log-normal"].values()
    assert synchronous["staleness"] == 0
    assert stale["staleness"] > 0
    assert MEAN_TOKENS not in (synchronous["answer_tokens"], stale["answer_tokens"])  # lengths were drawn


def test_limit_is_the_longer_phase() -> None:
    phases = {"generator_idle": 0.0, "answer_tokens": 64.0}
    runs = {
        0: [Speed(tokens_per_s=100, step_s=4, wait_s=1, staleness=0, **phases)],
        1: [Speed(tokens_per_s=120, step_s=10 / 3, wait_s=0.3, staleness=1, **phases)],
    }
    values = {figure.name.strip(): figure.value for figure in figures_of("fixed", runs)}
    assert values["limit, (G + T) / max(G, T) times that"] == pytest.approx(400 / 3)
    assert values["of the limit, fixed, 1"] == pytest.approx(0.9)


def test_log_normal_lengths_keep_mean_and_bounds() -> None:
    lengths = draw("log-normal", 20_000, np.random.default_rng(0))
    assert np.mean(lengths) == pytest.approx(MEAN_TOKENS, rel=0.05)
    assert min(lengths) >= 1
    assert max(lengths) == MOST_TOKENS
    assert np.median(lengths) < 0.7 * MEAN_TOKENS
    assert draw("fixed", 3, np.random.default_rng(0)) == [MEAN_TOKENS] * 3
