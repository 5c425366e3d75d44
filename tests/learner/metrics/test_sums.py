"""Metrics of a training step, against their formulas."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from msgspec import structs

from slipstream.buffer.wire import messages as m
from slipstream.learner.algorithms.objective import ActionValues
from slipstream.learner.metrics.sums import StepSums, trajectory_metrics
from slipstream.learner.parallel.mesh import World

CPU = torch.device("cpu")


def sums_of(
    target: Sequence[float],
    own: Sequence[float],
    behaviour: Sequence[float],
    versions: Sequence[int] | None = None,
    own_version: int | None = 0,
    reasons: Sequence[str] = (),
) -> StepSums:
    """Sums of one answer: its first action clipped, its second truncated, its last masked."""
    sums, actions = StepSums(CPU, reasons), len(target)
    marks_AT = torch.eye(actions)
    figures = ActionValues(
        target_BT=torch.tensor([target]),
        behaviour_BT=torch.tensor([behaviour]),
        initial_BT=torch.tensor([own]),
        versions_BT=torch.tensor([versions or [0] * actions]),
        mask_BT=torch.ones(1, actions),
        kept_BT=1 - marks_AT[-1:],
        clipped_BT=marks_AT[:1],
        truncated_BT=marks_AT[1:2] if actions > 1 else torch.zeros(1, 1),
        entropy_BT=None,
        reference_kl_BT=None,
        streams={},
    )
    sums.add(episodes=1, sequence_tokens=actions + 2, input_tokens=actions + 1)
    sums.add_policy(figures, own_version)
    return sums


def figures_of(sums: StepSums) -> dict[str, float]:
    return sums.means(sums.vector())


@pytest.mark.parametrize(
    ("weights", "ess"),
    # (Σw)² / (n · Σw²), before the loss caps the weights.
    [((1.6,) * 4, 1.0), ((1.0, 3.0), 16 / (2 * 10)), ((1.0, 1.0, 1.0, 1e6), 0.25)],
    ids=["equal", "formula", "dominant"],
)
def test_effective_sample_size_follows_its_formula(weights: Sequence[float], ess: float) -> None:
    scores = [-1.0] * len(weights)
    behaviour = [-1 - math.log(weight) for weight in weights]
    assert figures_of(sums_of(scores, scores, behaviour))["ess"] == pytest.approx(ess, rel=1e-3)


def test_policy_lag_is_between_behaviour_and_target() -> None:
    figures = figures_of(sums_of([-1.0, -2.0], [-1.0, -1.0], [-1.5, -1.8], [3, 3]))
    lags = (0.5, -0.2)
    expected = {
        "kl_k1": -sum(lags) / 2,
        "kl_k3": sum(math.exp(lag) - 1 - lag for lag in lags) / 2,
        "weight_mean": sum(math.exp(lag) for lag in lags) / 2,
        "chi2_token": sum(math.exp(2 * lag) for lag in lags) / 2 - 1,
        "chi2_sequence": math.exp(2 * sum(lags)) - 1,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_engine_mismatch_is_of_own_version_only() -> None:
    figures = figures_of(sums_of([-9.0] * 3, [-1.0] * 3, [-1.1, -5.0, -0.7], [4, 3, 4], own_version=4))
    differences = (0.1, -0.3)  # proximal - behaviour; the target is of a later update
    assert figures["mismatch_tokens"] == 2
    assert figures["mismatch_k1"] == pytest.approx(-sum(differences) / 2)
    assert figures["mismatch_abs"] == pytest.approx(0.2)
    assert figures["mismatch_k3"] == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 2, rel=1e-5)


@pytest.mark.parametrize("own_version", [None, 7])
def test_no_mismatch_without_actions_of_own_version(own_version: int | None) -> None:
    figures = figures_of(sums_of([-1.0] * 2, [-1.0] * 2, [-2.0] * 2, [0, -1], own_version=own_version))
    assert not [name for name in figures if name.startswith("mismatch")]


@pytest.mark.parametrize("difference", [1e-4, -1e-4])
def test_k3_is_exact_at_rounding_level(difference: float) -> None:
    scores = [-difference * scale for scale in (1.0, 0.5, 0.25)]  # from 0, so that they are exact in fp32
    figures = figures_of(sums_of(scores, scores, [0.0] * 3))
    assert figures["kl_k3"] == pytest.approx(sum(score**2 / 2 for score in scores) / 3, rel=1e-3)
    assert figures["mismatch_k3"] == pytest.approx(figures["kl_k3"], rel=1e-3)


def test_extreme_log_ratios_leave_metrics_finite() -> None:
    figures = figures_of(sums_of([-1.0], [-1.0], [-500.0]))
    assert figures["mismatch_k3"] == figures["kl_k3"] == pytest.approx(math.exp(20), rel=1e-3)
    assert figures["mismatch_abs"] == 499.0


def test_clipped_truncated_and_masked_actions_are_fractions() -> None:
    sums = sums_of([-1.0] * 4, [-1.0] * 4, [-1.0] * 4, reasons=["veto", "token_k3", "second_moment"])
    sums.add_masked({"veto": torch.tensor([[1.0, 0, 0, 0]]), "token_k3": torch.tensor([[1.0, 1, 0, 0]])})
    expected = {"clip_fraction": 0.25, "truncated_fraction": 0.25, "masked_fraction": 0.25}
    expected |= {"masked/veto": 0.25, "masked/token_k3": 0.5, "masked/second_moment": 0.0}
    figures = figures_of(sums)
    assert {name: figures[name] for name in expected} == expected


def test_sums_of_two_ranks_give_means_over_all_actions() -> None:
    one, other = (sums_of([-1.0] * n, [-1.1] * n, [-1.2 - 0.1 * n] * n) for n in (2, 3))
    for lr in (0.25, 0.5):
        one.set("lr", lr)
    both = one.means(one.vector() + other.vector())
    assert (both["actions"], both["tokens"], both["lr"]) == (5, 4 + 5, 0.5)
    assert both["prefix_saving"] == pytest.approx(1 - (3 + 4) / (4 + 5))
    assert both["kl_k1"] == pytest.approx((2 * -0.4 + 3 * -0.5) / 5)


def test_step_without_actions_has_no_nan() -> None:
    assert all(math.isfinite(value) for value in figures_of(StepSums(CPU)).values())


def answer(
    versions: Sequence[tuple[int, int]], reward: float, scores: Mapping[str, float] | None = None
) -> m.Trajectory:
    """An answer of (version, tokens) spans after a prompt of two tokens."""
    spans, start = [], 2
    for version, tokens in versions:
        spans.append(m.VersionSpan(version=version, start=start, end=start + tokens))
        start += tokens
    return m.Trajectory(
        token_ids=bytes(4 * start),
        action_mask=bytes(start),
        behaviour_logprobs=bytes(4 * start),
        spans=spans,
        reward=reward,
        scores={"exact_match": reward, "digit_match": 2 * reward} if scores is None else dict(scores),
        finish_reason="stop",
    )


AGES = {0: 8, 3: 5, 4: 4, 5: 3, 6: 2}
"""By version, at version 8."""


def test_staleness_is_split_into_in_flight_and_in_queue(world: World) -> None:
    figures = trajectory_metrics([answer([(3, 2), (5, 1)], 1.0), answer([(6, 5)], 0.0)], [0, 1], [0, 0], AGES, world)
    assert figures == {
        "reward": 0.5,
        "reward_std": 0.5,
        "groups_without_spread": 0.0,
        "score/exact_match": 0.5,
        "score/digit_match": 1.0,
        "answer_tokens": 4.0,
        "answer_tokens_min": 3.0,
        "answer_tokens_max": 5.0,
        "answers_cut_off": 0.0,
        **dict.fromkeys([f"ended/{reason}" for reason in m.FINISH_REASONS], 0.0),
        "ended/stop": 1.0,
        "trajectories_per_episode": 1.0,
        "staleness_mean": 3.5,  # (5 + 2) / 2
        "staleness_max": 5.0,
        "staleness_in_flight": 1.0,  # (5 - 3 + 0) / 2
        "staleness_in_queue": 2.5,  # (3 + 2) / 2
    }


def test_score_is_mean_over_trajectories_that_have_it(world: World) -> None:
    scores: list[dict[str, float]] = [{"old": 1.0, "kept": 0.5}, {"kept": 0.0, "new": 0.2}, {"kept": 0.1, "new": 0.4}]
    figures = trajectory_metrics([answer([(0, 2)], 0.0, each) for each in scores], [0, 1, 2], [0, 0, 0], AGES, world)
    found = {name: value for name, value in figures.items() if name.startswith("score/")}
    assert found == pytest.approx({"score/old": 1.0, "score/kept": 0.2, "score/new": 0.3})


def test_groups_of_equal_rewards_have_no_spread(world: World) -> None:
    trajectories = [answer([(0, 2)], reward) for reward in (0.1, 0.1, 0.2, 0.3)]
    figures = trajectory_metrics(trajectories, [0, 1, 2, 3], [0, 0, 1, 1], AGES, world)
    assert figures["groups_without_spread"] == 0.5
    assert figures["reward_std"] == pytest.approx(0.0829156)  # of all episodes
    alike = trajectory_metrics(trajectories[:2], [0, 1], [0, 0], AGES, world)
    assert alike["reward_std"] == 0


def test_answers_at_token_limit_count_as_cut_off(world: World) -> None:
    ends = ["length", "stop", "stop", "stop"]
    trajectories = [structs.replace(answer([(0, 2)], 0.0), finish_reason=end) for end in ends]
    assert trajectory_metrics(trajectories, [0, 1, 2, 3], [0, 0, 1, 1], AGES, world)["answers_cut_off"] == 0.25


def test_episode_of_several_trajectories_counts_once(world: World) -> None:
    first = structs.replace(answer([(3, 2)], 1.0), finish_reason="length")
    trajectories = [first, answer([(4, 5)], 0.0), answer([(5, 4)], 1.0)]
    figures = trajectory_metrics(trajectories, [0, 1, 0], [0, 0], AGES, world)
    expected = {"reward": 0.5, "score/digit_match": 1.0, "answer_tokens": 5.5, "answers_cut_off": 0.0}
    assert {name: figures[name] for name in expected} == expected
    assert figures["staleness_mean"] == 4.0, "staleness is one of trajectories"
