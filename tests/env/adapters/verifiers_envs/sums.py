"""A single-turn environment of verifiers; `fault` makes a part of it fail."""

import os
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = 40


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


def length(completion: Any) -> float:
    return len(completion[-1].content)


def broken(completion: Any) -> float:
    raise RuntimeError("the judge is down")


def ends(completion: Any) -> float:
    os._exit(7)


def of_group(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


FAULTS: dict[str, list[Any]] = {"reward": [broken], "process": [ends], "group": [of_group]}


def load_environment(fault: str = "", rows: int = ROWS) -> vf.Environment:
    """Sums of an index and 1."""
    if fault == "load":
        raise RuntimeError("no data")
    sys.stdout.write("what an environment prints is no answer of its process\n")
    dataset = Dataset.from_list([{"question": f"{index} + 1", "answer": str(index + 1)} for index in range(rows)])
    faulty = FAULTS.get(fault, [])
    rubric = vf.Rubric(funcs=[right, length, *faulty], weights=[1.0, 0.0, *(1.0 for _ in faulty)])
    return vf.SingleTurnEnv(dataset=dataset, system_prompt="Add.", rubric=rubric)
