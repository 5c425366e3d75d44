"""Rows of actions: episodes of one and of several trajectories."""

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import action_mask
from slipstream.configs.schema.advantages import ADVANTAGES
from slipstream.learner.algorithms.advantages.base import AdvantageInputs, RewardTerms
from slipstream.learner.algorithms.advantages.groups import Groups as EpisodeGroups
from slipstream.learner.algorithms.aggregation import aggregate, totals_of
from slipstream.learner.algorithms.losses.base import LossInputs, LossTerms
from slipstream.learner.algorithms.losses.clipped import ppo, reinforce
from slipstream.learner.data.rows import ActionBatch, build_rows
from tests.learner.algorithms.advantages.batches import ARGUMENTS
from tests.learner.recorded import trajectory

Groups = list[list[list[m.Trajectory]]]
"""Trajectories by group and episode."""
LOSSES: dict[str, Callable[[LossInputs], LossTerms]] = {
    "ppo": partial(ppo, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    "reinforce": reinforce,
}


def split(whole: m.Trajectory, cut: int) -> list[m.Trajectory]:
    """The same actions in two trajectories: up to token `cut`, and, with these tokens as context, from there on."""
    mask = action_mask(whole)
    head = structs.replace(
        whole, token_ids=whole.token_ids[: 4 * cut], action_mask=whole.action_mask[:cut],
        behaviour_logprobs=whole.behaviour_logprobs[: 4 * cut],
        rewards=[turn for turn in whole.rewards if turn.end <= cut],
    )  # fmt: skip
    return [
        head,
        structs.replace(
            whole,
            action_mask=(mask * (np.arange(len(mask)) >= cut)).astype(m.MASK_DTYPE).tobytes(),
            rewards=[turn for turn in whole.rewards if turn.end > cut],
        ),
    ]


@st.composite
def step_and_split_step(draw: st.DrawFn) -> tuple[Groups, Groups]:
    """A step's episodes of one trajectory each, and the same step with some episodes in several."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole: Groups = [
        [
            [trajectory(rng, tokens=draw(st.integers(3, 12)), episode=episode)]
            for episode in range(draw(st.integers(1, 4)))
        ]
        for _ in range(draw(st.integers(1, 3)))
    ]
    if draw(st.booleans()):
        for (each,) in (episode for group in whole for episode in group):
            ends = sorted({int(end) for end in rng.integers(len(each.action_mask) // 3 + 1, len(each.action_mask), 2)})
            each.rewards.extend(m.RewardSpan(end=end, value=0.25) for end in ends)
    parts: Groups = []
    for group in whole:
        parts.append([])
        for (each,) in group:
            tail, done = each, list[m.Trajectory]()
            prompt, tokens = action_mask(each).argmax(), len(each.action_mask)
            cuts = st.lists(st.integers(int(prompt) + 1, tokens - 1), max_size=2, unique=True)
            for cut in sorted(draw(cuts)) if prompt + 1 < tokens else []:
                head, tail = split(tail, cut)
                done.append(head)
            parts[-1].append([*done, tail])
    return whole, parts


def rows_of(groups: Groups, **wanted: Any) -> ActionBatch:
    """The rows, with the trajectories of a group's episodes in turn."""
    built = []
    for number, episodes in enumerate(groups):
        trajectories = [each for turn in zip_longest(*episodes) for each in turn if each is not None]
        group = m.Group(
            id=str(number), kind=m.TRAIN, epoch=0, indices=[number], trajectories=trajectories, greedy_reward=0.5
        )
        built.append((group, 1.0))
    return build_rows(built, terms=("exact_match",), **wanted)


def inputs_of(rows: ActionBatch) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(0)
    scores_EL = torch.rand(rows.episodes, rows.longest_episode, generator=generator)
    mask_EL = rows.by_episode(rows.mask_BT)
    return AdvantageInputs(
        mask_BT=mask_EL, rewards_BT=rows.by_episode(rows.rewards_BT), groups=EpisodeGroups(rows.group_E, rows.groups),
        terms=RewardTerms(rows.terms_KE, torch.ones(1)), greedy_rewards_B=rows.greedy_reward_E,
        values_BT=scores_EL * mask_EL, logprobs_BT=(scores_EL + 1e-3).log() * mask_EL,
        collision_BT=scores_EL.square() * mask_EL, process_rewards_BT=(scores_EL - 0.5) * mask_EL,
        reference_logprobs_BT=(scores_EL.square() + 1e-3).log() * mask_EL,
        agent_BT=(scores_EL > 0.5).long(), own_rewards_BT=(scores_EL - 0.25) * mask_EL,
    )  # fmt: skip


def gradient(rows: ActionBatch, advantage: str, loss: str) -> Tensor:
    """Gradient of the token-mean loss with respect to the episodes' log-probs, shape [E, L]."""
    logprobs_EL = rows.by_episode(rows.behaviour_logprobs_BT).requires_grad_()
    inputs = LossInputs(
        logprobs_BT=rows.by_trajectory(logprobs_EL),
        proximal_logprobs_BT=rows.behaviour_logprobs_BT + 0.1 * rows.mask_BT,
        behaviour_logprobs_BT=rows.behaviour_logprobs_BT,
        advantages_BT=rows.by_trajectory(ADVANTAGES.load(advantage)(inputs_of(rows), **ARGUMENTS[advantage])),
        mask_BT=rows.mask_BT,
    )
    loss_BT = LOSSES[loss](inputs).loss_BT
    figure = aggregate(loss_BT, rows.mask_BT, "token-mean", totals_of(rows.mask_BT), horizon=1, constant=None)
    (gradient_EL,) = torch.autograd.grad(figure, logprobs_EL)
    return gradient_EL


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", sorted(set(ARGUMENTS) - {"gigpo"}))  # a trajectory's start is that of a turn
@given(steps=step_and_split_step())
@settings(max_examples=15)
def test_split_episodes_have_same_gradient(advantage: str, loss: str, steps: tuple[Groups, Groups]) -> None:
    whole, parts = (rows_of(groups) for groups in steps)
    expected_EL = gradient(whole, advantage, loss)
    torch.testing.assert_close(gradient(parts, advantage, loss), expected_EL, rtol=1e-5, atol=1e-7)


@given(steps=step_and_split_step())
def test_split_episodes_have_same_actions_and_rewards(steps: tuple[Groups, Groups]) -> None:
    whole, parts = (rows_of(groups) for groups in steps)
    assert parts.mask_BT.sum() == whole.mask_BT.sum()
    for name in ("mask_BT", "behaviour_logprobs_BT", "versions_BT", "rewards_BT"):
        values_BT = getattr(parts, name)
        assert torch.equal(parts.by_episode(values_BT), whole.by_episode(getattr(whole, name))), name
        masked_BT = values_BT.where(parts.mask_BT > 0, 0)
        assert torch.equal(parts.by_trajectory(parts.by_episode(values_BT)), masked_BT), name
    for name in ("reward_E", "terms_KE", "greedy_reward_E", "group_E"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    torch.testing.assert_close(parts.by_episode(parts.rewards_BT).sum(-1), whole.reward_E)


def test_rewards_of_turns_arrive_at_their_last_actions() -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], dtype=m.MASK_DTYPE)
    turns = [m.RewardSpan(end=1, value=0.25), m.RewardSpan(end=4, value=0.5), m.RewardSpan(end=6, value=1.0)]
    whole = trajectory(np.random.default_rng(0), tokens=8)
    rows = rows_of([[[structs.replace(whole, action_mask=mask.tobytes(), reward=4.0, rewards=turns)]]])
    assert rows.rewards_BT.tolist() == [[0.25, 0.5, 1.0, 0.0, 2.25]]


def test_episode_without_actions_has_no_reward_to_place() -> None:
    whole = trajectory(np.random.default_rng(0), tokens=4)
    silent = structs.replace(whole, action_mask=bytes(4), rewards=[m.RewardSpan(end=2, value=1.0)])
    assert rows_of([[[silent]]]).rewards_BT.tolist() == [[0.0]]


def test_labels_of_agents_are_those_of_their_answers() -> None:
    """An answer of two runs of actions has one label; one without any comes last."""
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 1], dtype=m.MASK_DTYPE)
    spans = [m.AgentSpan(end=5, agent="a", reward=0.5), m.AgentSpan(end=7, agent="b", reward=1.0)]
    whole = trajectory(np.random.default_rng(0), tokens=8)
    labelled = structs.replace(whole, action_mask=mask.tobytes(), agents=spans)
    other = structs.replace(labelled, agents=[m.AgentSpan(end=8, agent="b")])
    rows = rows_of([[[labelled, other]]], agents=True)
    assert rows.agent_BT is not None
    assert rows.own_rewards_BT is not None
    a, b = rows.agent_BT[0, 0].item(), rows.agent_BT[0, 3].item()
    assert rows.agent_BT.tolist() == [[a, a, a, b, 0], [b] * 5]
    assert len({a, b, 0}) == 3
    assert rows.own_rewards_BT.tolist() == [[0, 0, 0.5, 1.0, 0], [0] * 5]


def test_turns_are_told_apart_by_the_tokens_before_them() -> None:
    """Of two trajectories of an episode, after tokens 1 2, 1 2, 9 and 1 2; the first token of all is no action."""
    ids = [[1, 2, 5, 5, 1, 2, 5, 9, 5], [1, 2, 7]]
    masks = [[1, 0, 1, 1, 0, 0, 1, 0, 1], [0, 0, 1]]
    whole = trajectory(np.random.default_rng(0), tokens=4)
    parts = [
        structs.replace(
            whole, token_ids=np.array(each, dtype=m.TOKEN_DTYPE).tobytes(), action_mask=bytes(mask),
            behaviour_logprobs=bytes(4 * len(each)), spans=[],
        )
        for each, mask in zip(ids, masks, strict=True)
    ]  # fmt: skip
    rows = rows_of([[parts]], turns=True)
    assert rows.turn_BT is not None
    assert rows.state_BT is not None
    assert rows.turn_BT.tolist() == [[0, 0, 1, 2], [3, 0, 0, 0]]
    first, other = rows.state_BT[0, 0].item(), rows.state_BT[0, 3].item()
    assert rows.state_BT.tolist() == [[first, first, first, other], [first, 0, 0, 0]]
    assert other != first
