"""Scores from hidden states and head, compared with those from all logits in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.learner.models import fused_head
from slipstream.learner.models.fused_head import IMPOSSIBLE, ActionScores, Entropy, LogitRule, score_states

ACTIONS, VOCABULARY, HIDDEN = 37, 501, 24
RULES = {
    "plain": LogitRule(), "temperature": LogitRule(temperature=0.7), "cap": LogitRule(cap=3.0, temperature=0.7),
    "factor": LogitRule(factor=0.3), "cap and factor": LogitRule(cap=3.0, factor=1.5),
    "never sampled": LogitRule(impossible=(0, 130, 500), temperature=0.7),
    "cap, never sampled": LogitRule(impossible=(7, 8), cap=3.0),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 columns, the last one narrower."""
    monkeypatch.setitem(fused_head.TILE, "cpu", ACTIONS * 128)
    monkeypatch.setattr(fused_head, "FEWEST_COLUMNS", 16)


def inputs(dtype: torch.dtype = torch.float32, *, actions: int = ACTIONS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and actions; logits of some tens."""
    generator = torch.Generator().manual_seed(1)
    states_AD = torch.randn(actions, HIDDEN, generator=generator) * 2
    weight_VD, bias_V = (torch.randn(*shape, generator=generator) for shape in ((VOCABULARY, HIDDEN), (VOCABULARY,)))
    actions_A = torch.randint(9, 130, (actions,), generator=generator)
    actions_A[:3] = torch.tensor([127, 128, 499])[: len(actions_A[:3])]  # at the edges of tiles
    leaves = [each.to(dtype).requires_grad_() for each in (states_AD, weight_VD, bias_V)]
    return leaves[0], leaves[1], leaves[2], actions_A


def exact(states_AD: Tensor, weight_VD: Tensor, bias_V: Tensor, actions_A: Tensor, rule: LogitRule) -> ActionScores:
    logits_AV = (states_AD.double() @ weight_VD.double().T + bias_V.double()) * rule.factor
    if rule.cap is not None:
        logits_AV = rule.cap * (logits_AV / rule.cap).tanh()
    logits_AV = logits_AV / rule.temperature
    if rule.impossible:
        logits_AV = logits_AV.index_fill(1, torch.tensor(rule.impossible), IMPOSSIBLE)
    logprobs_AV = logits_AV.log_softmax(-1)
    probs_AV = logprobs_AV.exp()
    return ActionScores(
        logprobs_AV.gather(1, actions_A[:, None])[:, 0],
        -(probs_AV * logprobs_AV).sum(-1),
        probs_AV.square().sum(-1).detach(),
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())


def gradients(scores: ActionScores, leaves: tuple[Tensor, ...], *, with_entropy: bool) -> tuple[Tensor, ...]:
    weights_A = torch.linspace(-1, 2, len(scores.logprobs_A), dtype=scores.logprobs_A.dtype)
    figure = (weights_A * scores.logprobs_A).sum()
    if with_entropy:
        assert scores.entropy_A is not None
        figure = figure + (weights_A.flip(0) * scores.entropy_A).sum()
    return torch.autograd.grad(figure, leaves)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("entropy", ["value", "gradient"])
@pytest.mark.parametrize("kept_bytes", [0, 2**30], ids=["computed again", "kept"])
def test_scores_and_gradients_equal_those_of_all_logits(rule: LogitRule, entropy: Entropy, kept_bytes: int) -> None:
    *leaves, actions_A = inputs()
    states_AD, weight_VD, bias_V = leaves
    found = score_states(
        states_AD, weight_VD, bias_V, actions_A, rule, entropy=entropy, collision=True, kept_bytes=kept_bytes
    )
    expected = exact(states_AD, weight_VD, bias_V, actions_A, rule)
    for own, reference in zip(found[:3], expected[:3], strict=True):
        assert own is not None and reference is not None
        assert own.dtype == torch.float32
        assert relative_error(own, reference) < 1e-5
    with_entropy = entropy == "gradient"
    own_gradients = gradients(found, tuple(leaves), with_entropy=with_entropy)
    for own, reference in zip(
        own_gradients, gradients(expected, tuple(leaves), with_entropy=with_entropy), strict=True
    ):
        assert relative_error(own, reference.double()) < 1e-5


@pytest.mark.parametrize("kept_bytes", [0, 2**30], ids=["computed again", "kept"])
def test_bfloat16_is_rounded_no_further_than_inputs(kept_bytes: int) -> None:
    *leaves, actions_A = inputs(torch.bfloat16)
    states_AD, weight_VD, bias_V = leaves
    found = score_states(states_AD, weight_VD, bias_V, actions_A, LogitRule(), entropy="value", kept_bytes=kept_bytes)
    expected = exact(states_AD, weight_VD, bias_V, actions_A, LogitRule())
    assert relative_error(found.logprobs_A, expected.logprobs_A) < 0.01
    found_gradients = gradients(found, tuple(leaves), with_entropy=False)
    for own, reference in zip(found_gradients, gradients(expected, tuple(leaves), with_entropy=False), strict=True):
        assert own.dtype == torch.bfloat16
        assert relative_error(own, reference.double()) < 0.03


def test_gradient_of_a_sure_action_keeps_its_precision_in_bfloat16() -> None:
    """1 - p is 0.0007 here, which bfloat16 can't hold beside 1."""
    states_AD = torch.tensor([[8.0]], dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.tensor([[1.0], [0.09375]], dtype=torch.bfloat16)
    scores = score_states(states_AD, weight_VD, None, torch.tensor([0]), LogitRule())
    (found,) = torch.autograd.grad(scores.logprobs_A.sum(), states_AD)
    other = torch.sigmoid(torch.tensor(-8.0 * (1 - 0.09375), dtype=torch.float64))
    assert float(found) == pytest.approx(float(other) * (1 - 0.09375), rel=0.01)


def test_frozen_head_gets_no_gradient() -> None:
    states_AD, weight_VD, bias_V, actions_A = inputs()
    frozen = weight_VD.detach()
    score_states(states_AD, frozen, None, actions_A, LogitRule()).logprobs_A.sum().backward()
    assert states_AD.grad is not None and frozen.grad is None and bias_V.grad is None


def test_no_actions_give_gradients_of_zero() -> None:
    states_AD, weight_VD, bias_V, actions_A = inputs(actions=0)
    scores = score_states(states_AD, weight_VD, bias_V, actions_A, LogitRule(), entropy="gradient")
    assert scores.logprobs_A.shape == (0,)
    scores.logprobs_A.sum().backward()
    for leaf in (weight_VD, bias_V):
        assert leaf.grad is not None and not leaf.grad.any()


@pytest.mark.parametrize(("kept_bytes", "kept"), [(ACTIONS * VOCABULARY * 4 - 1, 0), (ACTIONS * VOCABULARY * 4, 1)])
def test_logits_are_kept_up_to_a_limit(kept_bytes: int, kept: int) -> None:
    states_AD, weight_VD, bias_V, actions_A = inputs()
    products = 0
    original = fused_head._product

    def count(*arguments: object) -> Tensor:
        nonlocal products
        products += 1
        return original(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "_product", count)
        scores = score_states(states_AD, weight_VD, bias_V, actions_A, LogitRule(), kept_bytes=kept_bytes)
        forward, products = products, 0
        scores.logprobs_A.sum().backward()
    assert forward == 4
    assert products == (0 if kept else forward)


def test_rule_follows_the_family() -> None:
    base = LogitRule()
    for settings, expected in (
        ({"final_logit_softcapping": 30.0}, replace(base, cap=30.0)),
        ({"logits_scaling": 8.0}, replace(base, factor=1 / 8)),
        ({"logit_scale": 0.25}, replace(base, factor=0.25)),
        ({"lm_head_multiplier": 0.5}, replace(base, factor=0.5)),
    ):
        model = torch.nn.Module()
        model.config = type("Config", (), settings)()
        assert LogitRule.of(model) == expected


@pytest.mark.soak
def test_operations_compiled_once_for_all_sizes_equal_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs; on a CPU torch takes some seconds to compile each."""
    operations = fused_head.compiled_operations()
    graphs = torch._dynamo.utils.counters["stats"]
    for name in ("temperature", "cap and factor", "cap, never sampled"):
        rule, before = RULES[name], graphs["unique_graphs"]
        for actions in (ACTIONS, 50, 12):
            *leaves, actions_A = inputs(actions=actions)
            results = []
            for chosen in (fused_head._operations("cpu"), operations):
                with monkeypatch.context() as patched:
                    patched.setattr(fused_head, "_operations", lambda _, chosen=chosen: chosen)
                    scores = score_states(leaves[0], leaves[1], leaves[2], actions_A, rule, entropy="gradient")
                    results.append((*scores[:2], *gradients(scores, tuple(leaves), with_entropy=True)))
            for expected, found in zip(*results, strict=True):
                assert expected is not None and found is not None
                assert relative_error(found, expected.double()) < 1e-5
        of_impossible = 2 if rule.impossible else 1
        assert graphs["unique_graphs"] - before <= 2 * of_impossible, name
