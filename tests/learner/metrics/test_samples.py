"""Samples in the run folder: which are chosen, and how many are kept."""

from pathlib import Path

import numpy as np
import pytest

from slipstream.buffer.wire import messages as m
from slipstream.learner.metrics import samples
from slipstream.learner.metrics.samples import SampleStore, choose, read_samples


def trajectory(reward: float, *, tokens: int = 4) -> m.Trajectory:
    mask = np.array([0, 0, *[1] * tokens], dtype=m.MASK_DTYPE)
    return m.Trajectory(
        token_ids=np.arange(len(mask), dtype=m.TOKEN_DTYPE).tobytes(), action_mask=mask.tobytes(),
        behaviour_logprobs=np.zeros(len(mask), dtype=m.LOGPROB_DTYPE).tobytes(),
        spans=[m.VersionSpan(version=3, start=2, end=len(mask))], reward=reward, scores={"exact_match": reward},
        finish_reason="stop",
    )  # fmt: skip


def test_best_worst_longest_and_random_are_chosen_once() -> None:
    chosen = choose([trajectory(0.5, tokens=9), trajectory(-1), trajectory(2), trajectory(0)], seed=1)
    assert chosen["best"] == 2
    assert chosen["worst"] == 1
    assert chosen["longest"] == 0
    assert len(set(chosen.values())) == len(chosen)
    assert choose([trajectory(1.0)], seed=1) == {"best": 0}
    assert choose([], seed=1) == {}


def test_long_trajectories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_TOKENS", 14)
    assert choose([trajectory(1), trajectory(0), trajectory(0.5, tokens=90)], seed=1).keys() == {"best", "worst"}


def test_old_files_are_thinned_and_the_ends_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_FILES", 8)
    store = SampleStore(tmp_path / "samples")
    for step in range(1, 101):
        store.keep("step", step, [trajectory(step)])
    store.keep("eval", 0, [trajectory(0.25)])
    numbers = [sample.number for sample in read_samples(tmp_path / "samples", "step")]
    assert len(numbers) <= 8
    assert numbers[0] == 1
    assert numbers[-4:] == [97, 98, 99, 100]
    (evaluated,) = read_samples(tmp_path / "samples", "eval")
    assert (evaluated.number, evaluated.chosen, evaluated.trajectory) == (0, "best", trajectory(0.25))


def test_unwritable_folder_costs_the_samples_only(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file")
    store = SampleStore(tmp_path / "samples")
    for step in (1, 2):
        store.keep("step", step, [trajectory(1)])
    assert read_samples(tmp_path / "samples", "step") == []


def test_damaged_file_is_left_out(tmp_path: Path) -> None:
    SampleStore(tmp_path).keep("step", 1, [trajectory(1)])
    (tmp_path / "step-000000000.msgpack").write_bytes(b"\x00\x01")
    assert [sample.number for sample in read_samples(tmp_path, "step")] == [1]
