"""`slipstream ledger filtration-report`."""

import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.tools.ledger.filtration_report import command

Row = dict[str, Any]


def rows(groups: int = 60, answers: int = 6) -> list[Row]:
    """Answers whose reward predicts the true score only at its ends."""
    rng = np.random.default_rng(5)
    made: list[Row] = []
    for group in range(groups):
        for reward in rng.uniform(-1, 1, answers):
            truth = reward > 0 if abs(reward) > 0.6 else rng.random() < 0.5
            made.append({"group_id": f"g{group}", "reward": float(reward), "passed": int(truth)})
    return made


def write_csv(path: Path, content: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(content[0]))
        writer.writeheader()
        writer.writerows(content)


def write_jsonl(path: Path, content: Sequence[Row]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in content))


def write_parquet(path: Path, content: Sequence[Row]) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(list(content)), path)


Writer = Callable[[Path, Sequence[Row]], None]
WRITERS: dict[str, Writer] = {"csv": write_csv, "jsonl": write_jsonl, "parquet": write_parquet}


def report(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    assert command([str(path), "--true-score", "passed", "--json", *options]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def refusal(path: Path, *options: str) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        command([str(path), "--true-score", "passed", *options])
    return caught.value


@pytest.mark.parametrize("ending", WRITERS)
def test_all_formats_give_the_same_report(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, reference = tmp_path / f"groups.{ending}", tmp_path / "reference.jsonl"
    WRITERS[ending](path, rows())
    write_jsonl(reference, rows())
    assert report(capsys, path) == {**report(capsys, reference), "file": str(path)}


def test_equal_best_strategies_are_all_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With rewards of few values the powers weigh alike, but for rounding."""
    rng = np.random.default_rng(5)
    drawn = [(group, int(thirds)) for group in range(50) for thirds in rng.integers(0, 4, 8)]
    made = [{"group_id": f"g{group}", "reward": thirds / 3, "passed": int(thirds == 3)} for group, thirds in drawn]
    write_jsonl(tmp_path / "groups.jsonl", made)
    strategies = report(capsys, tmp_path / "groups.jsonl")["strategies"]
    best, *others = [each for each in strategies if each["r_squared"] is not None]
    alike = [each["best"] for each in others if abs(each["r_squared"] - best["r_squared"]) < 1e-9]
    assert alike
    assert all(alike)


def test_strategies_are_sorted_by_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "groups.jsonl", rows())
    printed = report(capsys, tmp_path / "groups.jsonl", "--bins", "0")
    assert (printed["groups"], printed["answers"]) == (60, 360)
    found = [each["r_squared"] for each in printed["strategies"]]
    assert found == sorted(found, reverse=True)
    assert [each["best"] for each in printed["strategies"]] == [True] + [False] * 6
    names = [each["strategy"] for each in printed["strategies"]]
    assert names.index("best_worst") < names.index("none")
    used = {each["strategy"]: each["answers_used"] for each in printed["strategies"]}
    assert (used["none"], used["best_of_n"], used["best_worst"], used["best_random"]) == (360, 60, 120, 360)


def test_table_lists_every_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(tmp_path / "groups.csv", rows())
    assert command([str(tmp_path / "groups.csv"), "--true-score", "passed"]) == 0
    printed = capsys.readouterr().out
    for text in ("60 groups", "none", "best_of_n", "best_random", "best_worst", "pow 1", "pow 2", "pow 3"):
        assert text in printed
    assert len([line for line in printed.splitlines() if line.rstrip(" │").endswith(" best")]) == 1


def test_two_valued_rewards_need_no_bins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "groups.jsonl"
    write_jsonl(path, [{"group_id": n // 4, "reward": n % 2, "passed": n % 3 == 0} for n in range(40)])
    assert all(each["r_squared"] is None for each in report(capsys, path)["strategies"])
    assert command([str(path), "--true-score", "passed"]) == 0
    assert "--bins 0" in capsys.readouterr().out
    assert any(each["r_squared"] is not None for each in report(capsys, path, "--bins", "0")["strategies"])


def test_column_names_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "plain.jsonl", rows())
    renamed = [{"task": row["group_id"], "rm": row["reward"], "passed": row["passed"]} for row in rows()]
    write_csv(tmp_path / "renamed.csv", renamed)
    printed = report(capsys, tmp_path / "renamed.csv", "--group", "task", "--reward", "rm")
    assert printed["strategies"] == report(capsys, tmp_path / "plain.jsonl")["strategies"]


def test_order_of_answers_does_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = rows()
    write_csv(tmp_path / "shuffled.csv", [content[n] for n in np.random.default_rng(0).permutation(len(content))])
    write_csv(tmp_path / "sorted.csv", content)
    shuffled, in_order = (report(capsys, tmp_path / f"{name}.csv")["strategies"] for name in ("shuffled", "sorted"))
    for one, other in zip(shuffled, in_order, strict=True):
        assert one["strategy"] == other["strategy"]
        assert one["r_squared"] == pytest.approx(other["r_squared"])


@pytest.mark.parametrize("ending", WRITERS)
def test_missing_column_is_named_with_the_file(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"groups.{ending}"
    WRITERS[ending](path, rows())
    error = refusal(path, "--reward", "score")
    assert all(part in str(error) for part in (str(path), "'score'", "group_id, reward, passed"))
    assert isinstance(error, ConfigError) == (ending != "jsonl")  # only its rows name columns


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize("value", ["good", "nan", "inf", "1e999", None])
def test_invalid_number_is_named_with_its_row(value: object, ending: str, tmp_path: Path) -> None:
    content, path = rows(), tmp_path / f"groups.{ending}"
    content[6]["passed"] = value
    WRITERS[ending](path, content)
    message = str(refusal(path))
    assert f"{path}, row 7: " in message
    assert "passed" in message
    assert value is None or repr(value) in message


def test_group_of_one_answer_is_named(tmp_path: Path) -> None:
    write_csv(tmp_path / "groups.csv", [*rows(2), {"group_id": "alone", "reward": 1.0, "passed": 1}])
    assert "row 13: group_id='alone'" in str(refusal(tmp_path / "groups.csv"))


@pytest.mark.parametrize(
    ("text", "row"), [('{"group_id": 1, "reward": 1, "passed": 1}\n{"group_id"\n', 2), ("[1, 2]\n", 1)]
)
def test_invalid_json_line_is_named(tmp_path: Path, text: str, row: int) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text(text)
    error = refusal(path)
    assert f"{path}, row {row}" in str(error)
    assert not isinstance(error, ConfigError)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("missing.csv", None, ConfigError),
        ("groups.xlsx", None, ConfigError),
        ("empty.jsonl", b"", SlipstreamError),
        ("binary.csv", b"\xff\xfe\x00", SlipstreamError),
        ("groups.parquet", b"no parquet at all", SlipstreamError),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes | None, kind: type) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = refusal(tmp_path / name)
    assert type(error) is kind
    assert str(tmp_path / name) in str(error)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    (tmp_path / "groups.parquet").touch()
    assert "slipstream[export]" in str(refusal(tmp_path / "groups.parquet"))
