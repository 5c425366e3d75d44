"""Runs of the real thing: vLLM, Valkey, FSDP2, weights in flight."""

from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import Pipeline


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A shortened demo, run to its end."""
    pipeline = Pipeline(tmp_path_factory.mktemp("demo"))
    done = pipeline.run("learner.steps=120", "eval.every_steps=40")
    assert done.returncode == 0, done.stdout + done.stderr
    return pipeline


@pytest.mark.timeout(600)
def test_the_reward_climbs_while_generation_runs_ahead_by_at_most_max_staleness(finished: Pipeline) -> None:
    summary = finished.summary()
    assert summary["steps"] == 120
    assert summary["exact_eval_first"] < 0.05
    assert summary["reward_last"] > 5 * summary["reward_first"]
    assert 0 < summary["staleness_mean"] <= summary["staleness_max"] <= 1


def test_engine_and_learner_agree_on_log_probs_at_the_same_version(finished: Pipeline) -> None:
    summary = finished.summary()
    assert summary["engine_mismatch_tokens"] >= 256 * 3
    assert summary["engine_mismatch_abs"] < 1e-4
    assert summary["engine_mismatch_kl"] < 1e-6


def test_every_issued_group_is_accounted_for(finished: Pipeline) -> None:
    groups = finished.summary()["groups"]
    ended = sum(groups[state] for state in ("ready", "leased", "trained", "filtered", "expired", "reissued"))
    assert groups["issued"] == ended
    assert groups["trained"] == 120 * 32


def test_transformers_loads_the_exported_model_and_it_answers_like_the_last_evaluation(finished: Pipeline) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from slipstream.env.digits import Digits

    folder = finished.run_folder / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    env = Digits(operation="reverse", length=3)
    tasks = [env.task("eval", index) for index in range(env.size("eval"))]
    prompts = torch.tensor([tokenizer(task.prompt)["input_ids"] for task in tasks])
    answers = model.generate(prompts, max_new_tokens=3, min_new_tokens=3, do_sample=False)[:, prompts.shape[1] :]
    right = [text == task.reference for text, task in zip(tokenizer.batch_decode(answers), tasks, strict=True)]
    assert sum(right) / len(right) == pytest.approx(finished.summary()["exact_eval"], abs=1e-9)


def test_the_picture_and_the_logs_are_there(finished: Pipeline) -> None:
    assert (finished.run_folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    for process in ("buffer", "rollout", "learner"):
        assert (finished.run_folder / "logs" / f"{process}.jsonl").stat().st_size > 0


def test_the_initial_model_is_the_same_for_the_same_seed(finished: Pipeline, tmp_path: Path) -> None:
    from slipstream.configs.tiny_model import build_digits_model

    build_digits_model(tmp_path / "again", seed=0)
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert (finished.run_folder / "initial_model" / "model.safetensors").read_bytes() == again
