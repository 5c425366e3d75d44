"""`slipstream samples` on a run folder with kept trajectories."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.buffer.wire import messages as m
from slipstream.configs.load import create_run_folder
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.metrics.samples import ActionColumns, SampleStore, Source
from slipstream.models.folder import initial_model
from slipstream.tools.samples import command
from tests.tools.run_command import demo_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with two steps and an evaluation: 1 and 0 right digits at the first, 3 at the second."""
    config = demo_config(tmp_path_factory.mktemp("run"))
    create_run_folder(config.paths, config)
    initial_model(config)
    store = SampleStore(config.paths.samples, env=config.env.name)
    answers = [_trajectory([7, 7, 7], 0.0), _trajectory([3, 7, 7], 1.0)]
    ratio, advantage, trained = ([0.5, 1.25, 2], [-0.75] * 3, [1, 1, 0])
    columns = (np.array(values, dtype="<f4").tobytes() for values in (ratio, advantage, trained, [np.nan] * 3))
    store.keep("step", 1, answers, [Source("g1", 17)] * 2, actions={0: ActionColumns(*columns)})
    store.keep("step", 9, [_trajectory([3, 4, 5], 3.0)])
    store.keep("eval", 4, [_trajectory([5, 5], 0.5)])
    return config.paths.root


def _trajectory(answer: list[int], reward: float) -> m.Trajectory:
    ids = [5, 4, 3, 13, *answer]
    mask = [0] * 4 + [1] * len(answer)
    spans = [m.VersionSpan(version=0, start=4, end=5), m.VersionSpan(version=2, start=5, end=len(ids))]
    return m.Trajectory(
        token_ids=np.array(ids, dtype=m.TOKEN_DTYPE).tobytes(),
        action_mask=np.array(mask, dtype=m.MASK_DTYPE).tobytes(),
        behaviour_logprobs=np.zeros(len(ids), dtype=m.LOGPROB_DTYPE).tobytes(),
        spans=spans,
        reward=reward,
        scores={"exact\x1b_match": reward},
        finish_reason="length",
    )


def _listed(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> list[dict[str, Any]]:
    assert command([str(run), "--json", *options]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        ([], [3.0]), (["--step", "1"], [1.0, 0.0]), (["--step", "3", "--worst"], [0.0, 1.0]),
        (["--worst"], [0.0, 1.0, 3.0]), (["--best", "--most", "2"], [3.0, 1.0]), (["--eval"], [0.5]),
    ],
)  # fmt: skip
def test_samples_are_selected_by_step_and_reward(
    run: Path, options: list[str], rewards: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [sample["reward"] for sample in _listed(capsys, run, *options)] == rewards


def test_text_is_cut_into_prompt_and_action(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sample,) = _listed(capsys, run)
    prompt, action = sample["stretches"]
    assert (prompt["role"], prompt["versions"], prompt["end"]) == ("prompt", [], 4)
    assert (action["role"], action["versions"], len(action["text"])) == ("action", [0, 2], 3)
    assert command([str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"  | {action['text']}" in shown
    assert "version 0, 2" in shown
    assert "\x1b" not in shown


def test_values_of_tokens_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worst, best = _listed(capsys, run, "--step", "1", "--worst")
    assert [worst[key] for key in ("group_id", "answer", "task", "env")] == ["g1", 0, 17, "digits"]
    tokens = worst["tokens"]
    assert tokens["ratio"] == [None] * 4 + [0.5, 1.25, 2.0]
    assert tokens["advantage"] == [None] * 4 + [-0.75] * 3
    assert tokens["trained"] == [False] * 4 + [True, True, False]
    assert tokens["entropy"] == [None] * 7
    assert tokens["version"] == best["tokens"]["version"] == [None] * 4 + [0, 2, 2]
    assert best["tokens"].keys() == {"id", "version", "logprob"}
    assert command([str(run), "--step", "1", "--worst", "--most", "1"]) == 0
    shown = capsys.readouterr().out
    for part in ("advantage -0.75", "group g1", "task 17 of digits", "0.5 to 2", "2 of 3 tokens"):
        assert part in shown


def test_run_without_samples_is_an_error(tmp_path: Path) -> None:
    config = demo_config(tmp_path)
    create_run_folder(config.paths, config)
    with pytest.raises(SlipstreamError, match="samples"):
        command([str(config.paths.root)])
