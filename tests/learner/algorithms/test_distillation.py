"""Divergences from a teacher: by hand, their limits and gradients, chunks, top-k."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.distillation import (
    Comparison,
    Divergence,
    HeadStates,
    Lesson,
    TopTokens,
    distillation_advantage,
    divergence,
    policy_divergence,
)
from slipstream.learner.models.fused_head import LogitRule

KINDS: tuple[Divergence, ...] = ("reverse_kl", "forward_kl", "jsd")
TEACHER, POLICY = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)
LOG2 = math.log(2)
MIXTURE = (0.3125, 0.25, 0.4375)  # a quarter of the teacher
ACTIONS, VOCABULARY = 40, 12


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        ("forward_kl", 0.5 * LOG2 - 0.25 * LOG2),
        ("reverse_kl", -0.25 * LOG2 + 0.5 * LOG2),
        (
            "jsd",
            0.25 * sum(p * math.log(p / m) for p, m in zip(TEACHER, MIXTURE, strict=True))
            + 0.75 * sum(q * math.log(q / m) for q, m in zip(POLICY, MIXTURE, strict=True)),
        ),
    ],
)
def test_divergence_by_hand(kind: Divergence, by_hand: float) -> None:
    assert divergence(logs(*TEACHER), logs(*POLICY), kind, beta=0.25).item() == pytest.approx(by_hand)


@pytest.mark.parametrize(("beta", "limit"), [(1e-6, "forward_kl"), (1 - 1e-6, "reverse_kl")])
def test_jsd_has_both_kl_as_limits(beta: float, limit: Divergence) -> None:
    scale = min(beta, 1 - beta)
    found = divergence(logs(*TEACHER), logs(*POLICY), "jsd", beta) / scale
    assert found.item() == pytest.approx(divergence(logs(*TEACHER), logs(0.25, 0.25, 0.5), limit).item(), rel=1e-5)


def test_top_k_by_hand() -> None:
    teacher, policy = logs(0.5, 0.3, 0.15, 0.05), logs(0.2, 0.4, 0.1, 0.3)
    with_tail = 0.2 * math.log(0.2 / 0.5) + 0.4 * math.log(0.4 / 0.3) + 0.4 * math.log(0.4 / 0.2)
    found, agreed = Comparison("reverse_kl", top_k=2).of_logits(teacher, policy)
    assert found.item() == pytest.approx(with_tail)
    assert agreed.item() == 0
    alone = 1 / 3 * math.log(1 / 3 / (5 / 8)) + 2 / 3 * math.log(2 / 3 / (3 / 8))
    found, _ = Comparison("reverse_kl", top_k=2, tail=False).of_logits(teacher, policy)
    assert found.item() == pytest.approx(alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", [True, False])
def test_tokens_of_an_engine_give_what_logits_do(kind: Divergence, tail: bool) -> None:
    torch.manual_seed(0)
    teacher, policy = torch.randn(5, VOCABULARY, dtype=torch.float64), torch.randn(5, VOCABULARY, dtype=torch.float64)
    comparison = Comparison(kind, top_k=4, tail=tail)
    top = teacher.log_softmax(-1).topk(4)
    for found, expected in zip(
        comparison.of_top(TopTokens(top.indices, top.values), policy),
        comparison.of_logits(teacher, policy),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_tail_of_a_certain_teacher_is_finite() -> None:
    top = TopTokens(torch.tensor([[1, 0]]), torch.tensor([[0.0, -200.0]]))
    policy = torch.zeros(1, 4, requires_grad=True)
    found, _ = Comparison("reverse_kl", top_k=2).of_top(top, policy)
    found.sum().backward()
    assert torch.isfinite(found).all() and policy.grad is not None and torch.isfinite(policy.grad).all()


def test_advantage_has_the_gradient_of_reverse_kl() -> None:
    torch.manual_seed(1)
    teacher = torch.randn(VOCABULARY, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    # The expectation over actions of the policy gradient, exactly.
    expected_gain = (policy.detach().exp() * distillation_advantage(teacher, policy) * policy).sum()
    (of_gain,) = torch.autograd.grad(expected_gain, logits, retain_graph=True)
    (of_kl,) = torch.autograd.grad(divergence(teacher[None], policy[None], "reverse_kl").sum(), logits)
    torch.testing.assert_close(of_gain, -of_kl)


def states(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, HeadStates]:
    """Hidden states and head of a policy, and those of a wider teacher with a vocabulary padded by 3."""
    torch.manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    given = HeadStates(drawn(ACTIONS, 7), drawn(VOCABULARY + 3, 7), None, LogitRule(temperature=0.7))
    return drawn(ACTIONS, 5), drawn(VOCABULARY, 5), drawn(VOCABULARY), given


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_k": 3, "tail": False}])
@pytest.mark.parametrize("rule", [LogitRule(temperature=0.7), LogitRule(cap=3.0, impossible=(2, 5))])
def test_gradients(kind: Divergence, more: dict[str, Any], rule: LogitRule) -> None:
    own, weight, bias, given = states()
    lesson = Lesson(torch.tensor([0, 3, 4]), replace(given, states_AE=given.states_AE[:3], rule=rule))
    comparison = Comparison(kind, **more)

    def compare(own: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return policy_divergence(own, weight, bias, lesson, rule, comparison, kept_bytes=1 << 20)[0]

    inputs = [tensor.requires_grad_() for tensor in (own[:5].clone(), weight, bias)]
    assert torch.autograd.gradcheck(compare, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind: Divergence) -> None:
    own, weight, bias, given = states()
    lesson = Lesson(torch.arange(0, ACTIONS, 2), replace(given, states_AE=given.states_AE[::2]))
    results = list[list[Tensor]]()
    for kept_bytes in (1 << 20, 0):
        inputs = [tensor.clone().requires_grad_() for tensor in (own, weight, bias)]
        found, agreed = policy_divergence(
            inputs[0], inputs[1], inputs[2], lesson, LogitRule(), Comparison(kind), kept_bytes=kept_bytes
        )
        gradients = torch.autograd.grad((found * torch.arange(1, len(found) + 1)).sum(), inputs)
        results.append([found.detach(), agreed, *gradients])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)
    assert results[0][0].min() > 0


def test_a_teacher_with_the_same_distributions_has_no_divergence() -> None:
    own, weight, bias, _ = states(torch.float32)
    given = HeadStates(own, weight, bias, LogitRule())
    for kind in KINDS:
        found, agreed = policy_divergence(
            own, weight, bias, Lesson(torch.arange(ACTIONS), given), LogitRule(), Comparison(kind), kept_bytes=0
        )
        torch.testing.assert_close(found, torch.zeros(ACTIONS), atol=1e-6, rtol=0)
        assert agreed.all()
