"""Train and test rows for the recipes `smollm2_arithmetic`, `sft`, `sft_smollm2`, `smollm2_*`, `constants`
and `mbpp`.

    python examples/rows/make_rows.py arithmetic data/arithmetic
    python examples/rows/make_rows.py digits data/digits
    python examples/rows/make_rows.py constants data/constants
    python examples/rows/make_rows.py largest data/largest
    python examples/rows/make_rows.py mbpp data/mbpp [--source FOLDER_OR_NAME]

The source of `mbpp` is a folder of JSON-lines or parquet files or a data set of the hub, with the columns of MBPP.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datasets import load_dataset
from pyarrow import Table, parquet

MBPP = "google-research-datasets/mbpp"
LARGEST = 20
TRAIN, TEST = 792, 200
TEST_CONSTANTS = 100
DEMONSTRATIONS, PROMPTS = 64, 1000


def row(source: str, question: str, truth: str, index: int, **columns: Any) -> dict[str, Any]:
    """A row as verl's preparation scripts write it, with further columns."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "code" if source == "mbpp" else "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index},
        **columns,
    }


def arithmetic() -> dict[str, list[dict[str, Any]]]:
    """Different sums, differences and products of numbers of one and two digits; products have a one-digit factor."""
    pairs = [(first, second) for first in range(LARGEST + 1) for second in range(LARGEST + 1)]
    questions = [(f"{a} + {b}", a + b) for a, b in pairs]
    questions += [(f"{a} - {b}", a - b) for a, b in pairs if a >= b]
    questions += [(f"{a} * {b}", a * b) for a, b in pairs if min(a, b) < 10]
    chosen = random.Random(0).sample(questions, TRAIN + TEST)
    rows = [
        row("arithmetic", f"What is {text}? Answer with the number only.", str(value), index)
        for index, (text, value) in enumerate(chosen)
    ]
    return {"train": rows[:TRAIN], "test": rows[TRAIN:]}


def largest() -> dict[str, list[dict[str, Any]]]:
    """The largest of four numbers: few demonstrations, more prompts, and of these pairs with each kind of mistake."""
    chance = random.Random(0)
    chosen = {tuple(chance.sample(range(10, 100), 4)): None for _ in range(DEMONSTRATIONS + PROMPTS + TEST)}
    rows = [{"prompt": f"max({','.join(map(str, each))})=", "completion": str(max(each))} for each in chosen]
    prompts = slice(DEMONSTRATIONS, -TEST)
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": str(wrong)}
        for row, numbers in zip(rows[prompts], list(chosen)[prompts], strict=True)
        for wrong in (*sorted(numbers)[:-1], wrong_digit(max(numbers), chance))
    ]
    return {"demonstrations": rows[:DEMONSTRATIONS], "prompts": rows[prompts], "pairs": pairs, "test": rows[-TEST:]}


def wrong_digit(number: int, chance: random.Random) -> int:
    """A number of two digits that has another one in one place."""
    tens, ones = divmod(number, 10)
    return chance.choice([
        *(10 * other + ones for other in range(1, 10) if other != tens),
        *(10 * tens + other for other in range(10) if other != ones),
    ])  # fmt: skip


def constants() -> dict[str, list[dict[str, Any]]]:
    """Functions of a constant of three digits, to be completed from `def f(): return (`."""
    numbers = random.Random(0).sample(range(100, 1000), 900)
    rows = [{"prompt": f"{number}c", "answer": str(number), "tests": f"assert f() == {number}"} for number in numbers]
    return {"train": rows[TEST_CONSTANTS:], "test": rows[:TEST_CONSTANTS]}


def digits() -> dict[str, list[dict[str, Any]]]:
    """Demonstrations of the demo's task: all numbers of three digits, reversed."""
    numbers = random.Random(0).sample(range(1000), 1000)
    rows = [{"prompt": f"{number:03}r", "completion": f"{number:03}"[::-1]} for number in numbers]
    return {"train": rows[TEST:], "test": rows[:TEST]}


def mbpp(source: str) -> dict[str, list[dict[str, Any]]]:
    """The tasks of MBPP, with their tests in the prompt: they name the function."""
    splits = load_dataset(source)
    return {split: list(mbpp_rows(splits[split])) for split in ("train", "test")}


def mbpp_rows(tasks: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row per task; the ground truth is a solution, `tests` the list of its tests as JSON."""
    for index, task in enumerate(tasks):
        text = task.get("text") or task["prompt"]  # the latter in the subset `sanitized`
        setup = task.get("test_setup_code") or "\n".join(task.get("test_imports") or ())
        tests = [f"{setup}\n{test}" if setup else test for test in task["test_list"]]
        shown = "\n".join(task["test_list"])
        question = f"{text}\nYour program must pass these tests:\n{shown}\nAnswer with a Python code block."
        yield row("mbpp", question, task["code"], index, tests=json.dumps(tests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", choices=("arithmetic", "constants", "digits", "largest", "mbpp"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default=MBPP)
    arguments = parser.parse_args()
    if arguments.rows == "mbpp":
        splits = mbpp(arguments.source)
    else:
        makers = {"arithmetic": arithmetic, "constants": constants, "digits": digits, "largest": largest}
        splits = makers[arguments.rows]()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        parquet.write_table(Table.from_pylist(rows), arguments.folder / f"{split}.parquet")


if __name__ == "__main__":
    main()
