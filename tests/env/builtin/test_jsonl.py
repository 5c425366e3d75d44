"""Prompt/answer rows from JSON-lines files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.builtin.jsonl import Rows


def written(path: Path, *rows: object) -> Path:
    """One line per row; a row that is already a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def qa(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}+1=", "answer": str(number + 1)}


def test_rows_keep_their_order_and_other_keys_become_info(tmp_path: Path) -> None:
    env = Rows(written(tmp_path / "a.jsonl", {**qa(1), "level": 3}, "", qa(2)))
    assert env.size("train") == 2
    first = env.task("train", 0)
    assert (first.prompt, first.reference, first.info) == ("1+1=", "2", {"level": 3})
    assert env.task("train", 1).prompt == "2+1="
    assert env.size("eval") == 0


def test_prompts_may_be_chats_and_keys_may_be_named(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    path = written(tmp_path / "a.jsonl", {"question": messages, "gold": "2"})
    assert Rows(path, prompt_key="question", answer_key="gold").task("train", 0).prompt == messages


@pytest.mark.parametrize("index", [-1, 1])
def test_an_index_outside_the_split_is_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError):
        Rows(written(tmp_path / "a.jsonl", qa(1))).task("train", index)


def test_the_last_rows_are_held_out_on_request(tmp_path: Path) -> None:
    env = Rows(written(tmp_path / "a.jsonl", *map(qa, range(5))), eval_rows=2)
    assert [env.task("train", index).prompt for index in range(env.size("train"))] == ["0+1=", "1+1=", "2+1="]
    assert [env.task("eval", index).prompt for index in range(env.size("eval"))] == ["3+1=", "4+1="]


def test_held_out_rows_may_come_from_another_file(tmp_path: Path) -> None:
    env = Rows(written(tmp_path / "a.jsonl", qa(1)), eval_path=written(tmp_path / "b.jsonl", qa(2), qa(3)))
    assert (env.size("train"), env.size("eval")) == (1, 2)
    assert env.task("eval", 1).reference == "4"


def test_all_malformed_lines_are_reported_with_their_numbers(tmp_path: Path) -> None:
    deep = '{"prompt": "x", "answer": "y", "deep": ' + "[" * 100_000
    lines: list[object] = [qa(1), "{oops", "[1]", {"prompt": "x"}, {"prompt": "x", "answer": 3}]
    lines += [{"prompt": [{"role": "user"}], "answer": "y"}, {"prompt": [], "answer": "y"}, deep]
    train = written(tmp_path / "a.jsonl", *lines)
    held_out = tmp_path / "b.jsonl"
    held_out.write_bytes(b'{"prompt": "\xff", "answer": ""}\n')
    with pytest.raises(ConfigError) as caught:
        Rows(train, eval_path=held_out)
    places = [re.search(r"([ab]\.jsonl:\d+): (.{8})", problem) for problem in caught.value.problems]
    assert [place and place[1] for place in places] == [*(f"a.jsonl:{n}" for n in range(2, 9)), "b.jsonl:1"]
    assert "'answer'" in caught.value.problems[2]
    assert "['prompt']" in caught.value.problems[2]
    assert "'answer'" in caught.value.problems[3]
    assert caught.value.problems[3].endswith("3")


def test_reported_lines_are_limited(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Rows(written(tmp_path / "a.csv", *["a,b"] * 1000))
    assert len(caught.value.problems) == 21
    assert "980" in caught.value.problems[-1]


def test_a_train_row_whose_prompt_is_held_out_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", qa(1), qa(2), {**qa(1), "level": 3})
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*a\.jsonl:3"):
        Rows(path, eval_rows=1)


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "a.jsonl", qa(1))
    assert Rows("~/a.jsonl").size("train") == 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"eval_rows": 2}, "eval_rows=2 must"),
        ({"eval_rows": 0.5}, "eval_rows=0.5 must"),
        ({"eval_rows": "1"}, "eval_rows='1' must"),
        ({"eval_rows": -1}, "eval_rows=-1 must"),
        ({"eval_rows": 1, "eval_path": "b.jsonl"}, "eval_path='b.jsonl' or eval_rows=1"),
        ({"eval_path": "/none.jsonl"}, "/none.jsonl can't be read"),
        ({"eval_path": "~nobody-here/b.jsonl"}, "~nobody-here/b.jsonl can't be read"),
        ({"path": "/dev/null"}, "/dev/null holds no rows"),
        ({"eval_path": "/dev/null"}, "/dev/null holds no rows"),
        ({"answer_key": "prompt"}, "prompt_key and answer_key"),
    ],
)
def test_contradictory_options_are_refused(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    path = written(tmp_path / "a.jsonl", qa(1), qa(2))
    with pytest.raises(ConfigError, match=re.escape(part)):
        Rows(**{"path": path, **options})


def test_the_fingerprint_depends_on_content_split_and_keys_only(tmp_path: Path) -> None:
    rows = [{**qa(number), "question": f"{number}-1=", "gold": "2"} for number in range(4)]
    whole = written(tmp_path / "a.jsonl", *rows)
    parts = [
        (written(tmp_path / f"{at}.jsonl", *rows[:at]), written(tmp_path / f"{at}-eval.jsonl", *rows[at:]))
        for at in (1, 2, 3)
    ]
    different = [
        Rows(whole),
        Rows(written(tmp_path / "longer.jsonl", *rows, qa(9))),
        Rows(whole, eval_rows=1),
        Rows(whole, prompt_key="question"),
        Rows(whole, answer_key="gold"),
        *(Rows(train, eval_path=held_out) for train, held_out in parts),
    ]
    assert len({env.fingerprint() for env in different}) == len(different)
    assert Rows(whole).fingerprint() == Rows(written(tmp_path / "b.jsonl", *rows)).fingerprint()
