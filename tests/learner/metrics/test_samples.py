"""Samples in the run folder: which are chosen, and how many are kept."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from slipstream.buffer.wire import messages as m
from slipstream.learner.metrics import samples
from slipstream.learner.metrics.samples import ActionColumns, SampleStore, Source, choose, read_samples, sources_of


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


@pytest.mark.parametrize("damage", [{"token_ids": b""}, {"behaviour_logprobs": b"123"}, {"action_mask": b""}])
def test_sample_with_arrays_that_do_not_fit_is_left_out(tmp_path: Path, damage: dict[str, bytes]) -> None:
    damaged = msgspec.structs.replace(trajectory(1), **damage)
    SampleStore(tmp_path).keep("step", 1, [trajectory(0.5), damaged], chosen={"best": 1, "worst": 0})
    short = ActionColumns(*[b"1234"] * 4)
    SampleStore(tmp_path).keep("step", 2, [trajectory(1, tokens=3)], [Source("1", 1)], actions={0: short})
    assert [(sample.number, sample.chosen) for sample in read_samples(tmp_path, "step")] == [(1, "worst")]


def test_values_of_actions_are_read_by_token(tmp_path: Path) -> None:
    ratio, advantage, kept, entropy = ([1.5, 0.5], [-1, 2], [1, 0], [3, np.nan])
    columns = ActionColumns(*(np.array(each, dtype="<f4").tobytes() for each in (ratio, advantage, kept, entropy)))
    mixed = msgspec.structs.replace(trajectory(1, tokens=2), scores={"mix/sums": 1.0}, episode=3)
    store, sources = SampleStore(tmp_path, env="mix"), [Source("7", 4)] * 2
    store.keep("step", 1, [trajectory(0), mixed], sources, chosen={"best": 1}, actions={1: columns})
    (sample,) = read_samples(tmp_path, "step")
    assert (sample.group_id, sample.answer, sample.task, sample.env) == ("7", 3, 4, "sums")
    np.testing.assert_array_equal(sample.ratio, [np.nan, np.nan, 1.5, 0.5])
    np.testing.assert_array_equal(sample.advantage, [np.nan, np.nan, -1, 2])
    np.testing.assert_array_equal(sample.entropy, [np.nan, np.nan, 3, np.nan])
    np.testing.assert_array_equal(sample.trained, [False, False, True, False])


def test_sample_of_an_earlier_release_has_no_values(tmp_path: Path) -> None:
    earlier = {"kind": "step", "number": 2, "chosen": "best", "trajectory": trajectory(1)}
    (tmp_path / "step-000000002.msgpack").write_bytes(msgspec.msgpack.encode([earlier]))
    (sample,) = read_samples(tmp_path, "step")
    assert sample.trajectory == trajectory(1)
    assert (sample.group_id, sample.task, sample.ratio, sample.trained) == ("", None, None, None)


@pytest.mark.parametrize(("missing", "tasks"), [(0, [8, 8, 9, 9]), (1, [None] * 4)])
def test_tasks_of_an_evaluation(missing: int, tasks: list[int | None]) -> None:
    answers = [msgspec.structs.replace(trajectory(1), episode=episode) for episode in range(4)]
    group = m.Group(id="e1", kind="eval", epoch=0, indices=[8, 9], trajectories=answers, missing=missing)
    assert sources_of(group, samples=2) == [Source("e1", task) for task in tasks]
