"""The order of training rows: epochs, mixtures, the same at any step; rows that are held out."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.trainers import DataConfig
from slipstream.learner.data.row_order import RowRef, open_rows

Write = Callable[..., DataConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows 0 … count - 1 of a name, as a source."""

    def source(name: str, count: int, weight: float | None = None) -> DataConfig:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps({'row': f'{name}{index}'})}\n" for index in range(count)))
        return DataConfig(path=str(file), weight=weight)

    return source


def names(refs: list[RowRef]) -> list[str]:
    return [str(ref.read()["row"]) for ref in refs]


def test_each_row_comes_once_in_an_epoch(write: Write) -> None:
    order, held_out = open_rows([write("a", 10), write("b", 4)], validation=(), held_out=0, seed=0)
    epochs = [sorted(name for step in range(7 * epoch, 7 * epoch + 7) for name in names(order.step(step, rows=2)))
              for epoch in range(2)]  # fmt: skip
    assert epochs[0] == epochs[1] == sorted([f"a{i}" for i in range(10)] + [f"b{i}" for i in range(4)])
    first, second = ([names(order.step(step, rows=2)) for step in range(7 * e, 7 * e + 7)] for e in range(2))
    assert first != second
    assert (order.rows, held_out) == (14, [])


@pytest.mark.parametrize("weights", [(None, None), (3.0, 1.0)])
def test_any_step_is_the_same_from_anywhere(write: Write, weights: tuple[float | None, float | None]) -> None:
    data = [write("a", 7, weights[0]), write("b", 5, weights[1])]
    orders = [open_rows(data, validation=(), held_out=0, seed=seed)[0] for seed in (1, 1, 2)]
    in_order = [names(orders[0].step(step, rows=3)) for step in range(20)]
    assert [names(orders[1].step(step, rows=3)) for step in reversed(range(20))] == in_order[::-1]
    assert [names(orders[2].step(step, rows=3)) for step in range(20)] != in_order


def test_weights_are_the_shares_of_any_stretch(write: Write) -> None:
    order, _ = open_rows([write("a", 50, 3.0), write("b", 5, 1.0)], validation=(), held_out=0, seed=0)
    for steps in (range(4), range(10, 20), range(100)):
        drawn = [name[0] for step in steps for name in names(order.step(step, rows=4))]
        assert Counter(drawn)["a"] / len(drawn) == pytest.approx(0.75, abs=2 / len(drawn))
    of_b = [name for step in range(20) for name in names(order.step(step, rows=4)) if name.startswith("b")]
    assert set(Counter(of_b[:5]).values()) == {1}  # each row of a source once before any comes again


def test_rows_at_the_ends_are_held_out(write: Write) -> None:
    order, held_out = open_rows([write("a", 10), write("b", 30)], validation=(), held_out=4, seed=0)
    assert names(held_out) == ["a9", "b27", "b28", "b29"]
    trained = [name for step in range(36) for name in names(order.step(step, rows=1))]
    assert not {*trained} & {*names(held_out)}
    assert len({*trained}) == order.rows == 36
    _, others = open_rows([write("a", 10)], validation=[write("c", 2)], held_out=0, seed=0)
    assert names(others) == ["c0", "c1"]


@pytest.mark.parametrize(("rows", "held_out"), [(0, 0), (3, 3), (3, 4)])
def test_no_training_rows_are_refused(write: Write, rows: int, held_out: int) -> None:
    with pytest.raises(ConfigError, match=r"learner\.trainer\.(data|validation\.rows)"):
        open_rows([write("a", rows)], validation=(), held_out=held_out, seed=0)


def test_missing_files_are_named_by_their_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.trainer\.data: .*missing\.jsonl"):
        open_rows([DataConfig(path=str(tmp_path / "missing.jsonl"))], validation=(), held_out=0, seed=0)
