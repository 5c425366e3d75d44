"""Metrics as columns: what thinning keeps, restarts, and a file that is read once however large it is."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.tools.dashboard.columns import MetricsTable, Table, numbers, thinned
from slipstream.tools.follow import PART_BYTES
from tests.tools.dashboard.recorded import append, step


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400),
    points=st.integers(3, 60),
)
def test_thinning_keeps_extremes_of_each_stretch_and_the_last_row(values: list[float], points: int) -> None:
    column, steps = np.array(values), np.arange(1, len(values) + 1, dtype=np.float64)
    thin_steps, thin = thinned(steps, {"x": column}, points)
    kept = thin["x"]
    assert len(kept) == len(thin_steps) <= max(points, 3)
    assert (np.diff(thin_steps) >= 0).all()
    assert (thin_steps[0], thin_steps[-1]) == (1, len(values))
    assert np.array_equal(kept[-1:], column[-1:], equal_nan=True)
    for extreme in (np.fmin, np.fmax):
        assert np.array_equal(extreme.reduce(kept), extreme.reduce(column), equal_nan=True)


def test_one_spike_in_a_million_steps_is_kept_in_every_column() -> None:
    steps = np.arange(1e6, dtype=np.float64)
    low, high = np.zeros(len(steps)), np.zeros(len(steps))
    low[777_777], high[333_333] = -1, 1
    thin_steps, thin = thinned(steps, {"low": low, "high": high}, 1000)
    for name, at in (("low", 777_777), ("high", 333_333)):
        (row,) = np.flatnonzero(thin[name])
        assert abs(thin_steps[row] - at) <= 2 * len(steps) / 1000


def test_of_a_step_that_was_trained_twice_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, step(1), step(2, entropy=0.5), step(3), step(2, reward=0.9), {"kind": "step", "reward": 7})
    table = MetricsTable(path)
    table.update()
    series = table.series(keys=["reward", "entropy"])
    assert series["step"] == [1, 2, 3]
    assert series["columns"] == {"reward": [0.1, 0.9, 0.3], "entropy": [None, None, None]}


def test_ten_thousand_steps_are_read_once_and_sent_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    keys = {f"key/{number}": 1.0 / number for number in range(1, 75)}
    append(path, *(step(number, **keys) for number in range(1, 10_001)))
    size = path.stat().st_size
    assert size > PART_BYTES
    table = MetricsTable(path)
    table.update()
    whole = table.series(points=500)
    assert (whole["total"], whole["offset"]) == (10_000, size)
    assert len(whole["columns"]) == 74 + 4, "reward, a score, steps and version"
    assert {len(column) for column in (whole["step"], *whole["columns"].values())} == {499}
    assert table.size_bytes < 10_000 * 80 * 8 * 1.5
    with path.open("r+b") as file:  # what was read is not read again
        file.write(b"#" * 1000)
    append(path, step(10_001))
    table.update()
    assert table.series(keys=["reward"], first=9_999)["step"] == [9_999, 10_000, 10_001]
    assert table.series(keys=["key/1"], first=1, last=1)["columns"] == {"key/1": [1]}


@pytest.mark.parametrize(
    ("values", "sent"),
    [
        ([1.0, 2.0, math.nan], [1, 2, None]),
        ([123456789.0, 2.0**60], [123456800.0, 1.152922e18]),
        ([1 / 3, 0.0, math.inf], [0.3333333, 0.0, None]),
        ([1e-300, -1.5], [1e-300, -1.5]),
        ([], []),
    ],
)
def test_numbers_are_sent_with_seven_digits(values: list[float], sent: list[float | None]) -> None:
    assert numbers(np.array(values)) == pytest.approx(sent)


def test_a_table_holds_rows_of_keys_that_come_and_go() -> None:
    table = Table("step")
    for record in ({"step": 2, "a": 1}, {"step": 1, "b": True}, {"step": 3, "a": "text", "b": 10**400}):
        table.add(record)
    steps, columns = table.sorted(["b", "a", "none"])
    assert steps.tolist() == [1, 2, 3]
    assert {name: numbers(column) for name, column in columns.items()} == {
        "b": [1, None, None], "a": [None, 1, None],
    }  # fmt: skip


def test_measurements_without_versions_are_of_their_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = [{"kind": "eval", "step": number, "time_s": 1.0, "loss": 1.0 / (1 + number)} for number in (0, 20, 40)]
    append(path, *losses, *({"kind": "step", "step": number, "loss": 2.0} for number in (20, 40)))
    table = MetricsTable(path)
    table.update()
    series = table.series("eval", keys=["loss"])
    assert series["step"] == [0, 20, 40]
    assert series["columns"]["loss"] == [1.0, pytest.approx(1 / 21, rel=1e-5), pytest.approx(1 / 41, rel=1e-5)]
