"""Whole runs on answers of log-normal length beside TRL, and the model that gives the lengths."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import pipeline_trl
from benchmarks.countdown import VARIANTS, build_countdown_model, length_probabilities, most_tokens, write_prompts
from benchmarks.loops import favoured_share
from benchmarks.pipeline_trl import Case, Result, Step, figures_of
from benchmarks.step import qwen3
from tests.benchmarks.conftest import Measure, with_goals

TINY = qwen3(vocabulary=16 * VARIANTS, hidden=192, layers=1, heads=1, kv_heads=1)


def test_lengths_have_mean_64_and_are_at_most_512() -> None:
    probabilities = length_probabilities(512)
    lengths = np.arange(2, 513)
    assert len(probabilities) == len(lengths)
    assert probabilities.sum() == pytest.approx(1)
    assert (probabilities * lengths).sum() == pytest.approx(64, abs=0.1)
    assert lengths[probabilities.cumsum().searchsorted(0.5)] in (39, 40)


@torch.no_grad()
def test_model_counts_down_from_numbers_of_these_probabilities(tmp_path: Path) -> None:
    folder = build_countdown_model(TINY, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    (prompt,) = write_prompts(tmp_path / "rows.jsonl", 1)
    longest = most_tokens(TINY)
    first = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].softmax(-1).view(-1, VARIANTS).sum(-1)
    assert first[1:].numpy() == pytest.approx(length_probabilities(longest), abs=0.02)
    # A token of each number, the largest first: the next is one of the number below, or the stop token.
    count = torch.arange(longest - 1, 0, -1) * VARIANTS + 7
    following = model(count[None]).logits[0].softmax(-1)
    expected = [*(following[at, token - 7 - VARIANTS : token - 7].sum() for at, token in enumerate(count[:-1]))]
    assert min([*expected, following[-1, tokenizer.eos_token_id]]) > 0.99
    text = tokenizer.decode([*count, tokenizer.eos_token_id], skip_special_tokens=True)
    assert favoured_share(text, "", {}) == (count % 2 == 0).float().mean()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed here")
@pytest.mark.usefixtures("forked_workers")
def test_pipeline_beside_trl(measured: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_trl, "MODEL", TINY)
    options = "--trl --engines hf --staleness 1 --groups-per-step 2 --seconds 1"
    record = measured("pipeline", options)
    assert with_goals(record) == {"by that of TRL"}
    assert record["failed"] == {}
    probabilities, tokens = length_probabilities(most_tokens(TINY)), np.arange(2, most_tokens(TINY) + 1)
    mean = (probabilities * tokens).sum()
    deviation = np.sqrt((probabilities * (tokens - mean) ** 2).sum())
    runs = {name: found[0] for name, found in record["details"].items()}
    assert runs.keys() == {"max_staleness 1, hf", "TRL, hf"}
    for run in runs.values():
        assert len(run["steps"]) > run["warm_up_steps"]
        lengths = [step["tokens"] / 16 for step in run["steps"]]
        assert np.mean(lengths) == pytest.approx(mean, abs=6 * deviation / np.sqrt(16 * len(lengths)))
        assert all(0 < step["reward"] < 1 for step in run["steps"])
        assert min(run["cpu_s"].values()) >= 0


def test_speed_is_compared_with_trl_and_the_same_engine() -> None:
    def run(tokens: float, rewards: list[float], warm_up_steps: int) -> Result:
        steps = [Step(step_s=2, wait_s=0.5, tokens=tokens, reward=reward) for reward in rewards]
        return Result(steps, {"rollout": 1.0, "learner": 2.0}, warm_up_steps)

    results = {
        Case("hf", 4): [run(300, [0.1, 0.3, 0.5, 0.7, 0.9], 2)],
        Case("hf", None): [run(100, [0.1, 0.2, 0.4], 1)],
        Case("vllm", 4): [run(300, [0.1, 0.3, 0.5], 2)],
    }
    rows: dict[str, dict[str, float]] = {}
    for figure in figures_of(results, answers=10):
        if not figure.name.startswith(" "):
            row = rows.setdefault(figure.name.partition(":")[0], {})
        row[figure.name.strip()] = figure.value
    assert [*rows] == ["TRL, hf", "max_staleness 4, hf", "max_staleness 4, vllm"]
    ours = rows["max_staleness 4, hf"]
    assert ours["max_staleness 4, hf: tokens trained"] == 150
    assert ours["by that of TRL"] == 3
    assert ours["learner waits"] == 0.25
    assert ours["tokens of an answer"] == 30
    assert ours["CPU, learner"] == pytest.approx(2000 / 900)
    assert ours["score after 3"] == pytest.approx(0.4)
    assert ours["score at the end"] == pytest.approx(0.8)
    assert "by that of TRL" not in rows["max_staleness 4, vllm"]
