"""Rows of files and data sets as tasks."""

import datetime
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.builtin.rows import Rows
from tests.models.hub import serve_hub

Row = dict[str, Any]
Write = Callable[..., Path]


def write_lines(path: Path, *rows: object) -> Path:
    """One line per row; a row that is already a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_parquet(path: Path, *rows: Row) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def save_dataset(path: Path, *rows: Row) -> Path:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(path))
    return path


FORMATS = pytest.mark.parametrize("write", [write_lines, write_parquet, save_dataset])


def qa(number: int) -> Row:
    return {"prompt": f"{number}+1=", "answer": str(number + 1)}


def verl(number: int) -> Row:
    """A row as verl's preprocessing writes it; odd rows have a key more."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train", **({"tools_kwargs": {"a": 1}} if number % 2 else {})},
    }


def first(env: Rows) -> tuple[Any, str, dict[str, Any]]:
    task = env.task("train", 0)
    return task.prompt, task.reference, dict(task.info)


def prompts(env: Rows) -> list[Any]:
    return [env.task("train", index).prompt for index in range(env.size("train"))]


@FORMATS
def test_rows_keep_their_order_and_other_keys_become_info(tmp_path: Path, write: Write) -> None:
    env = Rows(write(tmp_path / "a", {**qa(1), "level": 3}, {**qa(2), "level": None}))
    assert first(env) == ("1+1=", "2", {"level": 3})
    assert prompts(env) == ["1+1=", "2+1="]
    assert env.task("train", 1).info == {}
    assert env.size("eval") == 0


@FORMATS
def test_rows_of_verl_are_read_unchanged(tmp_path: Path, write: Write) -> None:
    rows = [verl(number) for number in range(5000)]  # more than one batch
    env = Rows(write(tmp_path / "a", *rows), eval_rows=1)
    assert (env.size("train"), env.size("eval")) == (4999, 1)
    for split, index, row in (("train", 0, rows[0]), ("train", 4097, rows[4097]), ("eval", 0, rows[-1])):
        task = env.task(split, index)  # type: ignore[arg-type]
        assert (task.prompt, task.reference) == (row["prompt"], row["reward_model"]["ground_truth"])
        assert task.info == {key: value for key, value in row.items() if key != "prompt"}


@FORMATS
def test_formats_of_the_same_rows_have_one_fingerprint(tmp_path: Path, write: Write) -> None:
    rows = [verl(number) for number in range(3)]
    assert Rows(write(tmp_path / "a", *rows)).fingerprint() == Rows(write_lines(tmp_path / "b", *rows)).fingerprint()


USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Add."}


@pytest.mark.parametrize(
    ("row", "prompt", "reference"),
    [
        ({"prompt": [SYSTEM, USER], "answer": "2"}, [SYSTEM, USER], "2"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER], "2"),
        ({"prompt": "1+1", "completion": "2"}, "1+1", "2"),
        ({"prompt": [USER], "solution": "#### 2"}, [USER], "#### 2"),
        ({"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER], "2"),
        ({"messages": [USER, ASSISTANT], "answer": "3"}, [USER], "3"),
        ({"messages": [USER], "answer": "3"}, [USER], "3"),
        ({"question": "1+1", "answer": 2}, "1+1", "2"),
        ({"problem": "1+1", "answer": 2.0, "solution": "so 2"}, "1+1", "2"),
        ({"prompt": "1/2", "answer": 0.5}, "1/2", "0.5"),
        ({"prompt": "1<2", "answer": True}, "1<2", "true"),
        ({"prompt": "é?", "answer": ["é", "è"]}, "é?", '["é", "è"]'),
        ({"prompt": "1+1", "reward_model": {"ground_truth": 2}, "answer": "long"}, "1+1", "2"),
        ({"prompt": [{**USER, "name": None}], "answer": "2"}, [USER], "2"),
    ],
)
def test_row_shape_is_recognised_by_its_keys(tmp_path: Path, row: Row, prompt: Any, reference: str) -> None:
    for write in (write_lines, write_parquet):
        assert first(Rows(write(tmp_path / "a", row)))[:2] == (prompt, reference)


def test_keys_may_be_named_and_nested(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"task": {"text": "1+1", "gold": 2}, "a.b": "3", "answer": "no"})
    env = Rows(path, prompt_key="task.text", answer_key="task.gold")
    assert first(env) == ("1+1", "2", {"task": {"text": "1+1", "gold": 2}, "a.b": "3", "answer": "no"})
    assert first(Rows(path, prompt_key="answer", answer_key="a.b"))[:2] == ("no", "3")


@pytest.mark.parametrize(
    ("options", "of_text", "of_chat"),
    [
        ({"template": "Q: {prompt}\nA:"}, "Q: 1+1\nA:", [SYSTEM, {"role": "user", "content": "Q: 1+1\nA:"}]),
        ({"chat": True}, [USER], [SYSTEM, USER]),
        ({"system": "Hi."}, [{"role": "system", "content": "Hi."}, USER], None),
    ],
)
def test_prompt_may_be_put_into_template_and_chat(tmp_path: Path, options: Row, of_text: Any, of_chat: Any) -> None:
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": [SYSTEM, USER], "answer": "2"}]
    env = Rows(write_lines(tmp_path / "a", *rows), **options)
    system = [{"role": "system", "content": options.get("system")}]
    assert prompts(env) == [of_text, of_chat or [*system, SYSTEM, USER]]


def test_values_of_parquet_become_plain_json(tmp_path: Path) -> None:
    row = {**qa(1), "day": datetime.date(2026, 1, 31), "nothing": {"a": None}, "list": [None, 1]}
    assert first(Rows(write_parquet(tmp_path / "a", row)))[2] == {"day": "2026-01-31", "nothing": {}, "list": [None, 1]}


@pytest.mark.parametrize("index", [-1, 1])
def test_index_outside_split_is_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError):
        Rows(write_lines(tmp_path / "a.jsonl", qa(1))).task("train", index)


def test_last_rows_are_held_out_on_request(tmp_path: Path) -> None:
    env = Rows(write_lines(tmp_path / "a.jsonl", *map(qa, range(5))), eval_rows=2)
    assert prompts(env) == ["0+1=", "1+1=", "2+1="]
    assert [env.task("eval", index).prompt for index in range(env.size("eval"))] == ["3+1=", "4+1="]


def test_held_out_rows_may_come_from_another_file(tmp_path: Path) -> None:
    held_out = write_parquet(tmp_path / "b", qa(2), qa(3))
    env = Rows(write_lines(tmp_path / "a.jsonl", qa(1)), eval_path=held_out)
    assert (env.size("train"), env.size("eval")) == (1, 2)
    assert env.task("eval", 1).reference == "4"


def test_several_files_and_patterns_are_joined_in_order(tmp_path: Path) -> None:
    for number in (2, 1):
        write_parquet(tmp_path / f"part-{number}.parquet", qa(10 * number), qa(10 * number + 1))
    last = write_lines(tmp_path / "last.jsonl", {"question": "x", "solution": "y"})
    env = Rows([str(tmp_path / "part-*.parquet"), last])
    assert prompts(env) == ["10+1=", "11+1=", "20+1=", "21+1=", "x"]


def test_splits_of_a_saved_folder_are_chosen(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    splits = {
        name: datasets.Dataset.from_list(list(map(qa, of))) for name, of in {"train": [1], "test": [2, 3]}.items()
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    env = Rows(tmp_path / "both", eval_split="test")
    assert (prompts(env), env.size("eval")) == (["1+1="], 2)
    assert Rows(tmp_path / "both", split="test").size("train") == 2
    assert Rows(tmp_path / "both", eval_path=tmp_path / "both").size("eval") == 2
    with pytest.raises(ConfigError, match="train, test"):
        Rows(tmp_path / "both", split="dev")
    with pytest.raises(ConfigError, match="split='dev'"):
        Rows(save_dataset(tmp_path / "one", qa(1)), split="dev")


def test_all_malformed_lines_are_reported_with_their_numbers(tmp_path: Path) -> None:
    deep = '{"prompt": "x", "answer": "y", "deep": ' + "[" * 100_000
    lines: list[object] = [qa(1), "{oops", "", "[1]", {"prompt": "x"}, {"prompt": "x", "answer": None}]
    lines += [{"prompt": prompt, "answer": "y"} for prompt in ([], [{"role": "user"}], 3, [{"role": 1, "content": ""}])]
    lines += [deep, '{"prompt": "\\ud800", "answer": ""}']
    lines += [{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "y"}]
    train = write_lines(tmp_path / "a.jsonl", *lines)
    held_out = tmp_path / "b.jsonl"
    held_out.write_bytes(b'{"prompt": "\xff", "answer": ""}\n{"prompt": "a", "answer": ""}\n')
    with pytest.raises(ConfigError) as caught:
        Rows(train, eval_path=held_out)
    places = [re.search(r"[ab]\.jsonl:\d+", problem) for problem in caught.value.problems]
    bad = [number for number in range(2, len(lines) + 1) if number != 3]
    assert [place and place[0] for place in places] == ["b.jsonl:1", *(f"a.jsonl:{number}" for number in bad)]
    assert "'answer'" in caught.value.problems[3]
    assert "['prompt']" in caught.value.problems[3]


def test_malformed_rows_of_parquet_are_reported_with_their_index(tmp_path: Path) -> None:
    rows = [{**qa(1), "audio": None}, {**qa(2), "audio": [{"bytes": b"RIFF", "path": None}]}, {"prompt": "3"}]
    with pytest.raises(ConfigError) as caught:
        Rows(write_parquet(tmp_path / "a.parquet", *rows))
    assert [re.search(r"a\.parquet\[\d\]", problem)[0] for problem in caught.value.problems] == [  # type: ignore[index]
        "a.parquet[1]",
        "a.parquet[2]",
    ]


def test_unknown_keys_are_reported_with_the_rows_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*prompt_key.* text, gold"):
        Rows(write_lines(tmp_path / "a.jsonl", {"text": "x", "gold": "y"}))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*answer_key.* prompt, gold"):
        Rows(write_lines(tmp_path / "a.jsonl", {"prompt": "x", "gold": "y"}))


def test_malformed_rows_before_unknown_keys_are_reported_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Rows(write_lines(tmp_path / "a.jsonl", "[]", {}))
    assert [re.search(r"a\.jsonl:\d", problem)[0] for problem in caught.value.problems] == [  # type: ignore[index]
        "a.jsonl:1",
        "a.jsonl:2",
    ]


def test_reported_rows_are_limited(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Rows(write_lines(tmp_path / "a.csv", *["a,b"] * 1000))
    assert len(caught.value.problems) == 21
    assert "980" in caught.value.problems[-1]


def test_train_row_whose_prompt_is_held_out_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", qa(1), qa(2), {**qa(1), "level": 3})
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*a\.jsonl:3"):
        Rows(path, eval_rows=1)


def test_parquet_is_recognised_by_its_content(tmp_path: Path) -> None:
    assert Rows(write_parquet(tmp_path / "a.jsonl", qa(1))).size("train") == 1
    with pytest.raises(ConfigError, match=r"a\.parquet .*\.jsonl"):
        Rows(write_lines(tmp_path / "a.parquet", qa(1)))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(ConfigError, match=r"b\.parquet"):
        Rows(tmp_path / "b.parquet")


def test_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_lines(tmp_path / "a.jsonl", qa(1))
    assert Rows("~/a.jsonl").size("train") == 1


def rows_of_hub(home: Path, **environment: str) -> str:
    """The last line of a process that reads a data set of the hub: its sizes, or an error."""
    program = """
from slipstream.env.builtin.rows import Rows
env = Rows("org/rows", eval_split="test")
print(env.size("train"), env.size("eval"), env.task("train", 0).prompt)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"HF_HOME": str(home), "PATH": "", "PYTHONPATH": ":".join(sys.path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.splitlines()[-1]


def test_data_set_of_hub_is_read(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    write_lines(served / "train.jsonl", qa(1), qa(2))
    write_lines(served / "test.jsonl", qa(3))
    with serve_hub({"org/rows": served}) as endpoint:
        assert rows_of_hub(tmp_path / "home", HF_ENDPOINT=endpoint) == "2 1 1+1="
    assert rows_of_hub(tmp_path / "home", HF_HUB_OFFLINE="1") == "2 1 1+1="  # from the library's cache
    missing = rows_of_hub(tmp_path / "other", HF_HUB_OFFLINE="1")
    assert re.search(r"ConfigError: env rows: org/rows .*split='train'", missing)


@pytest.mark.parametrize(
    ("missing", "name"), [("pyarrow", "a.parquet"), ("datasets", "folder"), ("datasets", "org/name")]
)
def test_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, name: str
) -> None:
    write_parquet(tmp_path / "a.parquet", qa(1))
    save_dataset(tmp_path / "folder", qa(1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=re.escape("slipstream[data]")):
        Rows(name)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"eval_rows": 2}, "eval_rows=2"),
        ({"eval_rows": 0.5}, "eval_rows=0.5"),
        ({"eval_rows": "1"}, "eval_rows='1'"),
        ({"eval_rows": -1}, "eval_rows=-1"),
        ({"eval_rows": 1, "eval_path": "b.jsonl"}, "eval_rows=1 excludes"),
        ({"eval_rows": 1, "eval_split": "test"}, "eval_rows=1 excludes"),
        ({"eval_path": "/none.jsonl"}, "/none.jsonl can't be read"),
        ({"eval_path": "~nobody-here/b.jsonl"}, "~nobody-here/b.jsonl can't be read"),
        ({"eval_path": "a\0b.jsonl"}, "can't be read"),
        ({"path": "/none/*.jsonl"}, "/none/*.jsonl"),
        ({"path": "/"}, "save_to_disk"),
        ({"path": "/dev/null"}, "/dev/null holds no rows"),
        ({"path": []}, "holds no rows"),
        ({"eval_path": "/dev/null"}, "/dev/null holds no rows"),
        ({"template": "Q:"}, "template='Q:'"),
    ],
)
def test_contradictory_options_are_refused(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", qa(1), qa(2))
    with pytest.raises(ConfigError, match=re.escape(part)):
        Rows(**{"path": path, **options})


def test_json_array_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([qa(1)]))
    with pytest.raises(ConfigError, match="jq"):
        Rows(tmp_path / "a.json")


def test_fingerprint_depends_on_tasks_and_split_only(tmp_path: Path) -> None:
    rows = [{**qa(number), "question": f"{number}-1=", "gold": "2"} for number in range(4)]
    whole = write_lines(tmp_path / "a.jsonl", *rows)
    parts = [
        (write_lines(tmp_path / f"{at}.jsonl", *rows[:at]), write_lines(tmp_path / f"{at}-eval.jsonl", *rows[at:]))
        for at in (1, 2, 3)
    ]
    different = [
        Rows(whole),
        Rows(write_lines(tmp_path / "longer.jsonl", *rows, qa(9))),
        Rows(whole, prompt_key="question"),
        Rows(whole, answer_key="gold"),
        Rows(whole, template="{prompt}?"),
        Rows(whole, chat=True),
        *(Rows(train, eval_path=held_out) for train, held_out in parts),
    ]
    assert len({env.fingerprint() for env in different}) == len(different)
    assert Rows(whole).fingerprint() == Rows(shutil.copy(whole, tmp_path / "b.jsonl")).fingerprint()
    assert Rows(whole, eval_rows=1).fingerprint() == different[-1].fingerprint()


IMAGE = b"\x89PNG of a test"
"""Rows don't decode images."""


@pytest.mark.parametrize(
    ("row", "images"),
    [
        ({**verl(1), "images": [{"bytes": IMAGE, "path": None}]}, ({"bytes": IMAGE},)),
        ({**qa(1), "image": {"bytes": IMAGE, "path": "a.png"}}, ({"bytes": IMAGE, "path": "a.png"},)),
        ({**qa(1), "image": IMAGE}, (IMAGE,)),
        ({**qa(1), "images": None}, ()),
    ],
    ids=["verl", "datasets", "bytes", "none"],
)
def test_images_of_a_row_are_no_info(tmp_path: Path, row: Row, images: tuple[object, ...]) -> None:
    path = write_parquet(tmp_path / "a.parquet", row, {**row, "answer": "9"} if "answer" in row else row)
    task = Rows(path).task("train", 0)
    plain = tuple({k: v for k, v in each.items() if v} if isinstance(each, dict) else each for each in task.images)
    assert plain == images
    assert not {"image", "images"} & task.info.keys() - {key for key in row if row[key] is None}


def test_text_is_an_image_only_under_image_key(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {**qa(1), "image": "a.png"})
    assert (Rows(path).task("train", 0).images, Rows(path).task("train", 0).info) == ((), {"image": "a.png"})
    assert Rows(path, image_key="image").task("train", 0).images == ("a.png",)
    write_lines(tmp_path / "a.jsonl", {**qa(1), "prompt": "<image> colour?", "image": "a.png"})
    with pytest.raises(ConfigError, match="image_key=image"):
        Rows(path)


def test_parts_of_messages_keep_their_images(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": IMAGE, "text": None}, {"type": "text", "image": None, "text": "colour?"}]
    path = write_parquet(tmp_path / "a.parquet", {"prompt": [{"role": "user", "content": parts}], "answer": "r"})
    content = [{"type": "image", "image": IMAGE}, {"type": "text", "text": "colour?"}]
    assert Rows(path).task("train", 0).prompt == [{"role": "user", "content": content}]


def test_same_prompt_with_another_image_may_be_held_out(tmp_path: Path) -> None:
    rows = [{**qa(1), "image": bytes([number])} for number in (1, 2, 1)]
    Rows(write_parquet(tmp_path / "a.parquet", *rows[:2]), eval_rows=1)
    with pytest.raises(ConfigError, match=r"a\.parquet\[0\]"):
        Rows(write_parquet(tmp_path / "a.parquet", *rows), eval_rows=1)
