"""Tiny measurements of a learner's step."""

import importlib.util
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import command
from benchmarks.figures import Figure
from benchmarks.learner import ALONE, LEAN, OURS, PLAIN, SHARED, TRL, answer_lengths, figures_of, sharing_figures
from benchmarks.loops import packed, padded
from slipstream.configs.runtime.errors import ConfigError
from tests.benchmarks.conftest import Measure, with_goals
from tests.contract.engines import VLLM_WARNINGS


@pytest.mark.usefixtures("forked_workers")
def test_learner_in_turns_with_a_plain_loop(measured: Measure) -> None:
    record = measured("learner", "--answers 4 --tokens 64 --token-budget 32 --threads 1 --rounds 1 --group 1")
    assert with_goals(record) == {"speed by that of the plain loop", "peak memory of the process"}
    assert all(value > 0 for value in record["value"].values())
    assert record["value"].keys() > {OURS, LEAN, PLAIN}


def test_shared_prompt_is_compared_by_cpu_time() -> None:
    results = {
        SHARED: [{"step_s": 1.0, "cpu_s": 2.0, "process_bytes": 1e9}],
        ALONE: [{"step_s": 4.0, "cpu_s": 6.0, "process_bytes": 2e9}],
    }
    computed = {SHARED: {"prefix_saving": 0.75, "flops": 1.0}, ALONE: {"prefix_saving": 0.0, "flops": 3.0}}
    values = {figure.name.strip(): figure.value for figure in sharing_figures(results, 1000, computed)}
    assert (values[SHARED], values[ALONE]) == (1000.0, 250.0)
    assert values["speed by that of each answer alone"] == 3.0
    assert values["share of the ratio of computed tokens"] == 0.75
    assert values["share of the ratio of computed operations"] == 1.0


def test_length_of_two_ranks_draws(measured: Measure, tmp_path: Path) -> None:
    plots = [tmp_path / "length.png", tmp_path / "ranks.png"]
    drawn = ["--plot", str(plots[0]), "--plot-ranks", str(plots[1])]
    record = measured("length", "--lengths 64 --tokens 256 --ranks 2", *drawn)
    assert record["value"]["2 ranks, answers of 64"] > 0
    assert record["details"]["steps"][0]["figures"]["actions"] == 4 * 63
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_fit_computes_memory_near_the_measured_peak(measured: Measure) -> None:
    record = measured("fit", "--cases none --tokens 512")
    value = record["value"]
    assert value["peak memory"] > 300  # MB: weights, gradients and AdamW's averages of 26 million parameters are 420
    assert value["computed"] == pytest.approx(value["peak memory"], rel=0.3)
    assert value["error"] == pytest.approx(abs(value["computed"] / value["peak memory"] - 1))
    assert 0 < value["utilisation (MFU)"] < 1.5
    assert record["details"]["none"]["measured"]["tokens"] == 1024


def test_fit_of_a_published_shape_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--cases Qwen3-8B .*CUDA"):
        command(["fit", "--cases", "none", "Qwen3-8B"])


def test_head(measured: Measure) -> None:
    record = measured("head", "--actions 64 --vocabulary 512 --hidden 32 --rounds 1")
    assert with_goals(record) == {"time by that of all logits"}
    assert record["value"].keys() > {"all logits", "kept", "computed again"}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
@VLLM_WARNINGS
def test_replay_lowers_the_mismatch_of_experts(measured: Measure) -> None:
    record = measured("experts", "--layers 2 --experts 8 --per-token 2 --prompts 2 --tokens 32")
    value = record["value"]
    assert value["actions"] == 2 * 8 * 32
    for dtype in ("float32", "bfloat16"):
        live, replayed = (value[f"|Δ log-prob|, {dtype}, {kind}: mean"] for kind in ("live", "replayed"))
        assert 0 < replayed < live


@pytest.mark.parametrize(("answers", "tokens"), [(64, 16_414), (16, 3000), (3, 3)])
def test_answers_are_ragged_and_have_the_sum(answers: int, tokens: int) -> None:
    lengths = answer_lengths(answers, tokens)
    assert len(lengths) == answers
    assert sum(length - 1 for length in lengths) == tokens
    assert min(lengths) >= 2
    assert tokens == answers or max(lengths) > 2 * tokens / answers


def test_each_loop_trains_on_all_tokens_within_the_budget() -> None:
    lengths = answer_lengths(64, 16_414)
    sequences = [[number] * length for number, length in enumerate(lengths, start=1)]
    bins = packed(sequences, 4096)
    assert sorted(row for rows in bins for row in rows) == list(range(64))
    assert all(sum(lengths[row] - 1 for row in rows) <= 4096 for rows in bins)
    batches = padded({"sequences": sequences, "advantages": [1.0] * 64, "token_budget": 4096})
    assert sum(int(batch["completion_mask"].sum()) for batch in batches) == 16_414
    assert all(bool((batch["completion_ids"][batch["completion_mask"] == 0] == 1).all()) for batch in batches)
    assert {len(batch["prompt_ids"]) for batch in batches[:-1]} == {15}
    assert torch.cat([batch["advantages"] for batch in batches]).sum() == 64


def test_speeds_are_compared_with_the_plain_loop() -> None:
    durations = {OURS: 1.0, LEAN: 2.0, PLAIN: 1.8, TRL: 9.0}
    results = {loop: [{"step_s": step_s, "process_bytes": 2e9}] * 2 for loop, step_s in durations.items()}
    figures: dict[str, list[Figure]] = {}
    loop = ""
    for figure in figures_of(results, 900):
        loop = loop if figure.name.startswith(" ") else figure.name
        figures.setdefault(loop, []).append(figure)
    assert [figure.value for figure in figures[OURS]] == pytest.approx([900, 1.8, 2.0])
    assert [figure.met for figure in figures[OURS]] == [None, True, True]
    assert [figure.met for figure in figures[LEAN]] == [None, False, False]
    assert [figure.value for figure in figures[PLAIN]] == pytest.approx([500, 2.0])
    assert [figure.met for figure in figures[TRL]] == [None, None, None]
