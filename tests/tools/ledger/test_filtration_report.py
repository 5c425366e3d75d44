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
    """A reward that tells the truth at its ends only."""
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


WRITERS: dict[str, Callable[[Path, Sequence[Row]], None]] = {
    "csv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


def report(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    assert command([str(path), "--true-score", "passed", "--json", *options]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def refusal(path: Path, *options: str) -> str:
    return str(refused(path, *options))


def refused(path: Path, *options: str) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        command([str(path), "--true-score", "passed", *options])
    return caught.value


@pytest.mark.parametrize("ending", WRITERS)
def test_every_kind_of_file_gives_the_same_report(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, reference = tmp_path / f"groups.{ending}", tmp_path / "reference.jsonl"
    WRITERS[ending](path, rows())
    write_jsonl(reference, rows())
    assert report(capsys, path) == {**report(capsys, reference), "file": str(path)}


def test_all_strategies_of_the_best_figure_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of rewards of few values the powers weigh alike, but for rounding."""
    rng = np.random.default_rng(5)
    drawn = [(group, int(thirds)) for group in range(50) for thirds in rng.integers(0, 4, 8)]
    made = [{"group_id": f"g{group}", "reward": thirds / 3, "passed": int(thirds == 3)} for group, thirds in drawn]
    path = tmp_path / "groups.jsonl"
    write_jsonl(path, made)
    best, *others = [each for each in report(capsys, path)["strategies"] if each["r_squared"] is not None]
    alike = [each["best"] for each in others if abs(each["r_squared"] - best["r_squared"]) < 1e-9]
    assert alike
    assert all(alike)


def test_strategies_are_sorted_and_the_best_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_table_names_every_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(tmp_path / "groups.csv", rows())
    assert command([str(tmp_path / "groups.csv"), "--true-score", "passed"]) == 0
    printed = capsys.readouterr().out
    for text in ("60 groups", "none", "best_of_n", "best_random", "best_worst", "pow 1", "pow 2", "pow 3"):
        assert text in printed
    marked = [line for line in printed.splitlines() if line.rstrip(" │").endswith(" best")]
    assert len(marked) == 1


def test_rewards_of_two_values_have_no_fit_over_groups_and_the_report_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = [{"group_id": n // 4, "reward": n % 2, "passed": n % 3 == 0} for n in range(40)]
    write_jsonl(tmp_path / "groups.jsonl", content)
    assert all(each["r_squared"] is None for each in report(capsys, tmp_path / "groups.jsonl")["strategies"])
    assert command([str(tmp_path / "groups.jsonl"), "--true-score", "passed"]) == 0
    assert "--bins 0" in capsys.readouterr().out
    by_answer = report(capsys, tmp_path / "groups.jsonl", "--bins", "0")["strategies"]
    assert any(each["r_squared"] is not None for each in by_answer)


def test_columns_may_have_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "plain.jsonl", rows())
    renamed = [{"task": row["group_id"], "rm": row["reward"], "passed": row["passed"]} for row in rows()]
    write_csv(tmp_path / "renamed.csv", renamed)
    printed = report(capsys, tmp_path / "renamed.csv", "--group", "task", "--reward", "rm")
    assert printed["strategies"] == report(capsys, tmp_path / "plain.jsonl")["strategies"]


def test_the_answers_of_a_group_need_not_stand_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = rows()
    write_csv(tmp_path / "apart.csv", [content[n] for n in np.random.default_rng(0).permutation(len(content))])
    write_csv(tmp_path / "together.csv", content)
    apart, together = (report(capsys, tmp_path / f"{name}.csv")["strategies"] for name in ("apart", "together"))
    for one, other in zip(apart, together, strict=True):
        assert one["strategy"] == other["strategy"]
        assert one["r_squared"] == pytest.approx(other["r_squared"])


@pytest.mark.parametrize("ending", WRITERS)
def test_a_missing_column_is_named_with_the_file_and_what_there_is(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"groups.{ending}"
    WRITERS[ending](path, rows())
    message = refusal(path, "--reward", "score")
    assert str(path) in message
    assert "'score'" in message
    assert "group_id, reward, passed" in message


@pytest.mark.parametrize("value", ["good", "nan", "inf", [1], "1e999"])
def test_what_is_no_number_is_named_with_file_row_and_column(value: object, tmp_path: Path) -> None:
    content = rows()
    content[6]["passed"] = value
    write_jsonl(tmp_path / "groups.jsonl", content)
    message = refusal(tmp_path / "groups.jsonl")
    assert f"{tmp_path / 'groups.jsonl'}, row 7: passed={value!r}" in message


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_an_empty_cell_is_named_with_file_row_and_column(ending: str, tmp_path: Path) -> None:
    content = rows()
    content[3]["reward"] = None
    WRITERS[ending](tmp_path / f"groups.{ending}", content)
    assert f"{tmp_path}/groups.{ending}, row 4: column 'reward' is missing" in refusal(tmp_path / f"groups.{ending}")


def test_a_group_of_one_answer_is_named(tmp_path: Path) -> None:
    write_csv(tmp_path / "groups.csv", [*rows(2), {"group_id": "alone", "reward": 1.0, "passed": 1}])
    assert "row 13: group_id='alone' has a single answer" in refusal(tmp_path / "groups.csv")


def test_a_line_that_is_no_json_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text('{"group_id": 1, "reward": 1, "passed": 1}\n{"group_id"\n')
    assert f"{path}, row 2" in refusal(path)
    path.write_text("[1, 2]\n")
    assert "row 1: [1, 2] is no JSON object" in refusal(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "can't read" in refusal(tmp_path / "missing.csv")
    assert "is no .parquet, .csv, .jsonl file" in refusal(tmp_path / "groups.xlsx")
    (tmp_path / "empty.jsonl").touch()
    assert "has no rows" in refusal(tmp_path / "empty.jsonl")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    assert "can't read" in refusal(tmp_path / "binary.csv")


def test_a_file_or_a_column_that_is_not_there_is_a_mistake_in_the_command_line(tmp_path: Path) -> None:
    file, damaged = tmp_path / "groups.csv", tmp_path / "groups.jsonl"
    write_csv(file, rows())
    damaged.write_text("[1, 2]\n")
    assert isinstance(refused(tmp_path / "missing.csv"), ConfigError)
    assert isinstance(refused(tmp_path / "groups.xlsx"), ConfigError)
    assert isinstance(refused(file, "--reward", "score"), ConfigError)
    assert not isinstance(refused(damaged), ConfigError)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    (tmp_path / "groups.parquet").touch()
    assert "slipstream[export]" in refusal(tmp_path / "groups.parquet")


def test_a_file_that_only_claims_to_be_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "groups.parquet").write_bytes(b"no parquet at all")
    assert "can't read" in refusal(tmp_path / "groups.parquet")
