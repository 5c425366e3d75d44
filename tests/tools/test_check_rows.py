"""`slipstream check` of a training on rows: a row with its targets marked, and what is left out of each source."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.tools.check import command

GOOD = [{"prompt": f"{n:03}r", "completion": f"{n}"} for n in range(3)]
LONG = {"prompt": "1" * 40, "completion": "2"}


def checked(folder: Path, capsys: pytest.CaptureFixture[str], *options: str, **sources: list[Any]) -> tuple[int, str]:
    """Exit code and output for rows by the name of their file; a text is a line as it is."""
    for name, rows in sources.items():
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    data = [str(folder / f"{name}.jsonl") for name in sources]
    run = {
        "run": {"dir": str(folder)}, "model": {"build": "digits"},
        "learner": {"trainer": {"name": "sft", "data": data, "max_tokens": 20, "validation": {"rows": 1}}},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(run))
    code = command([str(folder / "run.yaml"), *options])
    return code, capsys.readouterr().out


def test_targets_are_marked_and_rows_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = checked(tmp_path, capsys, good=GOOD, mixed=[LONG, *GOOD, "{"])
    assert code == 0
    assert "000r⟦0<eos>⟧" in text
    assert "7 to train on, 1 of validation" in text
    assert "1 too_long, 1 malformed" in text
    assert "warning: learner.trainer.data.1: 2 of 5 rows" in text
    assert "no problems" in text


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ([], "learner.distill"),
        (["learner.distill={teachers: [{model: no/folder}]}"], "learner.distill.teachers.0.model"),
    ],
)
def test_distillation_without_its_teacher_is_a_problem(
    options: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["learner.trainer.name=distill", "learner.streams.ref_kl=1", *options]
    code, text = checked(tmp_path, capsys, *given, good=GOOD)
    assert code == 1
    assert key in next(line for line in text.splitlines() if line.startswith("problem: "))


def test_source_without_usable_rows_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = checked(tmp_path, capsys, "--json", good=GOOD, bad=[LONG, LONG])
    found = json.loads(text)
    assert code == 1
    assert [problem.partition(":")[0] for problem in found["problems"]] == ["learner.trainer.data.1"]
    assert found["rows"]["sources"][1]["left_out"] == {"too_long": 2}
    assert found["rows"]["sources"][0]["example"] | {"row": ""} == {
        "row": "", "tokens": 6, "in_loss": 2, "text": "000r⟦0<eos>⟧",
    }  # fmt: skip
