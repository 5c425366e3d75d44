"""The figures of a step, by hand."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from msgspec import structs

from slipstream.buffer.wire import messages as m
from slipstream.learner.algorithms.objective import ActionFigures
from slipstream.learner.metrics.sums import StepSums, trajectory_figures
from slipstream.learner.parallel.mesh import World

CPU = torch.device("cpu")


def sums_of(
    target: Sequence[float],
    own: Sequence[float],
    behaviour: Sequence[float],
    versions: Sequence[int],
    own_version: int | None = 0,
    reasons: Sequence[str] = (),
) -> StepSums:
    """Of one answer, whose first action was clipped and second truncated, and whose last was left out."""
    sums, actions = StepSums(CPU, reasons), len(versions)
    marks_AT = torch.eye(actions)
    figures = ActionFigures(
        target_BT=torch.tensor([target]),
        behaviour_BT=torch.tensor([behaviour]),
        initial_BT=torch.tensor([own]),
        versions_BT=torch.tensor([versions]),
        mask_BT=torch.ones(1, actions),
        kept_BT=1 - marks_AT[-1:],
        clipped_BT=marks_AT[:1],
        truncated_BT=marks_AT[1:2] if actions > 1 else torch.zeros(1, 1),
        entropy_BT=None,
        reference_kl_BT=None,
    )
    sums.add(episodes=1, input_tokens=actions + 2)
    sums.add_policy(figures, own_version)
    return sums


def figures_of(sums: StepSums) -> dict[str, float]:
    return sums.means(sums.vector())


def test_equal_weights_have_an_effective_sample_size_of_one() -> None:
    sums = sums_of([-1.0] * 4, [-1.0] * 4, [-1.5] * 4, [0] * 4)
    assert figures_of(sums)["ess"] == pytest.approx(1.0)


def test_effective_sample_size_follows_its_formula() -> None:
    behaviour = [-1 - math.log(weight) for weight in (1.0, 3.0)]
    # (1 + 3)² / (2 · (1 + 9)), whatever the loss cuts them down to.
    assert figures_of(sums_of([-1.0] * 2, [-1.0] * 2, behaviour, [0] * 2))["ess"] == pytest.approx(0.8)


def test_a_dominant_action_leaves_one_effective_sample() -> None:
    behaviour = [-1.0, -1.0, -1.0, -1 - math.log(1e6)]
    assert figures_of(sums_of([-1.0] * 4, [-1.0] * 4, behaviour, [0] * 4))["ess"] == pytest.approx(0.25, rel=1e-3)


def test_policy_lag_is_k1_and_k3_of_behaviour_and_target() -> None:
    figures = figures_of(sums_of([-1.0, -2.0], [-1.0, -1.0], [-1.5, -1.8], [3, 3]))
    lags = (0.5, -0.2)
    assert figures["kl_k1"] == pytest.approx(-sum(lags) / 2)
    assert figures["kl_k3"] == pytest.approx(sum(math.exp(lag) - 1 - lag for lag in lags) / 2)


def test_policy_lag_has_chi2_of_actions_and_answers() -> None:
    figures = figures_of(sums_of([-1.0, -2.0], [-1.0, -1.0], [-1.5, -1.8], [3, 3]))
    lags = (0.5, -0.2)
    assert figures["weight_mean"] == pytest.approx(sum(math.exp(lag) for lag in lags) / 2)
    assert figures["chi2_token"] == pytest.approx(sum(math.exp(2 * lag) for lag in lags) / 2 - 1)
    assert figures["chi2_sequence"] == pytest.approx(math.exp(2 * sum(lags)) - 1), "both are of one answer"


def test_engine_mismatch_is_of_own_version_only() -> None:
    figures = figures_of(sums_of([-9.0] * 3, [-1.0] * 3, [-1.1, -5.0, -0.7], [4, 3, 4], own_version=4))
    differences = (0.1, -0.3)  # proximal - behaviour; what the target has become meanwhile is no mismatch
    assert figures["mismatch_tokens"] == 2
    assert figures["mismatch_k1"] == pytest.approx(-sum(differences) / 2)
    assert figures["mismatch_abs"] == pytest.approx(0.2)
    assert figures["mismatch_k3"] == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 2, rel=1e-5)


@pytest.mark.parametrize("difference", [1e-4, -1e-4])
def test_k3_is_exact_at_rounding_level_and_never_negative(difference: float) -> None:
    scores = [-difference * scale for scale in (1.0, 0.5, 0.25)]  # minus so much from 0, so that it is exact in fp32
    figures = figures_of(sums_of(scores, scores, [0.0] * 3, [0] * 3))
    wanted = sum(score**2 / 2 for score in scores) / 3
    assert figures["kl_k3"] == pytest.approx(wanted, rel=1e-3)
    assert figures["mismatch_k3"] == pytest.approx(wanted, rel=1e-3)


def test_extreme_log_ratios_leave_metrics_finite() -> None:
    figures = figures_of(sums_of([-1.0], [-1.0], [-500.0], [0]))
    assert figures["mismatch_k3"] == figures["kl_k3"] == pytest.approx(math.exp(20), rel=1e-3)
    assert figures["mismatch_abs"] == 499.0


@pytest.mark.parametrize("own_version", [None, 7])
def test_no_mismatch_without_actions_of_own_version(own_version: int | None) -> None:
    figures = figures_of(sums_of([-1.0] * 2, [-1.0] * 2, [-2.0] * 2, [0, -1], own_version=own_version))
    assert not [name for name in figures if name.startswith("mismatch")]


def test_clipped_truncated_and_masked_actions_are_fractions() -> None:
    figures = figures_of(sums_of([-1.0] * 4, [-1.0] * 4, [-1.0] * 4, [0] * 4))
    names = ("clip_fraction", "truncated_fraction", "masked_fraction")
    assert [figures[name] for name in names] == [0.25, 0.25, 0.25]


def test_each_masking_reason_has_its_fraction() -> None:
    sums = sums_of([-1.0] * 4, [-1.0] * 4, [-1.0] * 4, [0] * 4, reasons=["veto", "token_k3", "second_moment"])
    sums.add_masked({"veto": torch.tensor([[1.0, 0, 0, 0]]), "token_k3": torch.tensor([[1.0, 1, 0, 0]])})
    figures = figures_of(sums)
    found = {name: value for name, value in figures.items() if name.startswith("masked/")}
    assert found == {"masked/veto": 0.25, "masked/token_k3": 0.5, "masked/second_moment": 0.0}


def test_sums_of_two_ranks_give_means_over_all_actions() -> None:
    one, other = (sums_of([-1.0] * n, [-1.1] * n, [-1.2 - 0.1 * n] * n, [0] * n) for n in (2, 3))
    both = one.means(one.vector() + other.vector())
    assert both["actions"] == 5
    assert both["tokens"] == 4 + 5
    assert both["kl_k1"] == pytest.approx((2 * -0.4 + 3 * -0.5) / 5)


def test_metric_shared_by_ranks_is_not_summed() -> None:
    sums = sums_of([-1.0], [-1.0], [-1.0], [0])
    sums.set("lr", 0.25)
    sums.set("lr", 0.5)
    assert sums.means(sums.vector() * 2)["lr"] == 0.5


def test_step_without_actions_has_no_nan() -> None:
    sums = StepSums(CPU)
    assert all(math.isfinite(value) for value in figures_of(sums).values())


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


def test_staleness_is_split_into_in_flight_and_in_queue(world: World) -> None:
    figures = trajectory_figures([answer([(3, 2), (5, 1)], 1.0), answer([(6, 5)], 0.0)], [0, 1], 8, world)
    assert figures == {
        "reward": 0.5,
        "score/exact_match": 0.5,
        "score/digit_match": 1.0,
        "answer_tokens": 4.0,
        "answers_cut_off": 0.0,
        "staleness_mean": 3.5,  # (8 - 3 + 8 - 6) / 2
        "staleness_max": 5.0,
        "staleness_in_flight": 1.0,  # (5 - 3 + 0) / 2
        "staleness_in_queue": 2.5,  # (8 - 5 + 8 - 6) / 2
    }
    assert figures["staleness_mean"] == figures["staleness_in_flight"] + figures["staleness_in_queue"]


def test_score_is_mean_over_trajectories_that_have_it(world: World) -> None:
    scores: list[dict[str, float]] = [{"old": 1.0, "kept": 0.5}, {"kept": 0.0, "new": 0.2}, {"kept": 0.1, "new": 0.4}]
    figures = trajectory_figures([answer([(0, 2)], 0.0, each) for each in scores], [0, 1, 2], 0, world)
    found = {name: value for name, value in figures.items() if name.startswith("score/")}
    assert found == pytest.approx({"score/old": 1.0, "score/kept": 0.2, "score/new": 0.3})


def test_answers_at_token_limit_count_as_cut_off(world: World) -> None:
    ends = ["length", "stop", "stop", "stop"]
    trajectories = [structs.replace(answer([(0, 2)], 0.0), finish_reason=end) for end in ends]
    assert trajectory_figures(trajectories, [0, 1, 2, 3], 0, world)["answers_cut_off"] == 0.25


def test_episode_of_several_trajectories_counts_once(world: World) -> None:
    first = structs.replace(answer([(3, 2)], 1.0), finish_reason="length")
    trajectories = [first, answer([(4, 5)], 0.0), answer([(5, 4)], 1.0)]
    figures = trajectory_figures(trajectories, [0, 1, 0], 6, world)
    expected = {"reward": 0.5, "score/digit_match": 1.0, "answer_tokens": 5.5, "answers_cut_off": 0.0}
    assert {name: figures[name] for name in expected} == expected
    assert figures["staleness_mean"] == 2.0, "staleness is one of trajectories"


def test_groups_of_consuming_version_have_no_staleness(world: World) -> None:
    figures = trajectory_figures([answer([(4, 3)], 1.0)], [0], 4, world)
    assert {name: value for name, value in figures.items() if "staleness" in name and value != 0} == {}
