"""Tasks of reasoning-gym and the reward that scores them, in this process and in others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.configs.schema.run import RewardConfig
from slipstream.env.adapters.reasoning_gym import EVAL_SHARE, HASH_DEPENDENT, ReasoningGym
from slipstream.env.base import Split
from slipstream.rewards.functions.reasoning_gym import reasoning_gym
from slipstream.rewards.registry import find_reward

SPLITS: tuple[Split, ...] = ("train", "eval")


def test_reward_is_the_score_of_the_package() -> None:
    env = ReasoningGym("countdown", eval_size=4, size=4)
    task = env.task("train", 1)
    assert reasoning_gym(f"<think>4</think><answer> {task.reference} </answer>", task.reference, task.info).value == 1
    assert reasoning_gym(task.reference, task.reference, task.info).value == 1
    wrong = reasoning_gym("<answer>1+1</answer>", task.reference, task.info)
    assert 0 < wrong.value < 0.1  # countdown rewards a well-formed answer
    assert wrong.parts == {"parsed": 1.0}
    assert find_reward(RewardConfig(name="reasoning_gym")).takes == "answer"


def test_answer_that_the_package_fails_at_scores_0_and_is_counted() -> None:
    task = ReasoningGym("prime_factorization").task("train", 0)
    score = reasoning_gym("no number", task.reference, task.info)
    assert (score.value, score.parts) == (0.0, {"parsed": 0.0})


def test_task_of_another_env_or_another_package_is_no_score() -> None:
    task = ReasoningGym("chain_sum").task("train", 0)
    with pytest.raises(ValueError, match="reasoning_gym"):
        reasoning_gym("1", "1", {})
    with pytest.raises(ValueError, match="chain_sum"):
        reasoning_gym("1", "1", {"reasoning_gym": {**task.info["reasoning_gym"], "digest": "0"}})


def test_question_is_held_out_or_trained_on_never_both() -> None:
    env = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 300, 60)
    train, held_out = ({str(env.task(split, index).prompt) for index in range(env.size(split))} for split in SPLITS)
    assert not train & held_out
    assert len(train) < 300  # the space is small: without the hash, most of the held-out questions would recur
    assert 1 / EVAL_SHARE - 0.15 < len(held_out) / (len(train) + len(held_out)) < 1 / EVAL_SHARE + 0.15


def test_several_datasets_are_mixed_by_weight() -> None:
    env = ReasoningGym({"chain_sum": {"weight": 3, "max_terms": 2}, "leg_counting": None}, size=400)
    names = [env.task("train", index).info["reasoning_gym"]["dataset"] for index in range(400)]
    assert 0.65 < names.count("chain_sum") / 400 < 0.85


def test_system_prompt_comes_first() -> None:
    with_name = ReasoningGym("chain_sum", system_prompt="default").task("train", 0).prompt
    assert [message["role"] for message in with_name] == ["system", "user"]  # type: ignore[index]
    assert "<answer>" in with_name[0]["content"]  # type: ignore[index]
    plain = ReasoningGym("chain_sum", chat=False, system_prompt="Sum up.").task("train", 0).prompt
    assert str(plain).startswith("Sum up.\n\n")


_ENTRIES = """
import json, pathlib, sys, reasoning_gym
from reasoning_gym.factory import DATASETS
entries = {}
for name in sorted(DATASETS)[int(sys.argv[2]) :: 4]:
    if name != "composite":
        dataset = reasoning_gym.create_dataset(name, seed=3, size=40)
        entries[name] = [repr((dataset[i]["question"], dataset[i]["answer"])) for i in (0, 7)]
        answer = dataset[0]["answer"]
        assert dataset.score_answer(answer, dataset[0]) == 1 or answer is None, name
pathlib.Path(sys.argv[1]).write_text(json.dumps(entries))
"""


@pytest.mark.parametrize("part", ["0", *(pytest.param(part, marks=pytest.mark.soak) for part in "123")])
def test_every_dataset_scores_its_answers_and_is_the_same_in_every_process(tmp_path: Path, part: str) -> None:
    found = []
    for seed in ("1", "2"):
        # A file: some datasets print.
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _ENTRIES, tmp_path / seed, part],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=200,
        )
        found.append(json.loads((tmp_path / seed).read_text()))
    assert len(found[0]) > 20
    assert {name for name in found[0] if found[0][name] != found[1][name]} <= HASH_DEPENDENT
