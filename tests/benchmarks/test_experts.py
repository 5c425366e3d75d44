"""A small `slipstream bench experts`."""

import importlib.util
from pathlib import Path

import pytest

from tests.contract.engines import VLLM_WARNINGS
from tests.benchmarks.conftest import measured

SMALL = ["--layers", "2", "--experts", "8", "--per-token", "2", "--prompts", "2", "--tokens", "32"]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    VLLM_WARNINGS,
]


def test_replay_lowers_the_mismatch(tmp_path: Path) -> None:
    record = measured("experts", SMALL, tmp_path / "runs")
    values = {figure["name"]: figure["value"] for figure in record["figures"]}
    assert (values["actions"], values["experts of a token"]) == (2 * 8 * 32, 4)
    for dtype in ("float32", "bfloat16"):
        live, replayed = (values[f"|Δ log-prob|, {dtype}, {kind}: mean"] for kind in ("live", "replayed"))
        assert 0 < replayed < live
