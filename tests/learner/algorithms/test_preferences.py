"""Losses of preferences: by hand, gradients, and as TRL computes them."""

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.preferences import (
    Answers,
    PreferenceTerms,
    bradley_terry,
    dpo,
    ipo,
    kto,
    kto_baseline,
    simpo,
)

PairLoss = Callable[[Answers, Answers], PreferenceTerms]
DESIRABLE = torch.tensor([True, False, True, True, False])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def answers(logprobs: list[float], reference: list[float], tokens: list[int]) -> Answers:
    return Answers(
        torch.tensor(logprobs, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64), torch.tensor(tokens)
    )


def random_answers(seed: int, count: int = 5) -> Answers:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 12, (count,), generator=generator)
    per_token = -2 * torch.rand(2, count, generator=generator, dtype=torch.float64)
    return Answers((per_token[0] * tokens).requires_grad_(), per_token[1] * tokens, tokens)


CHOSEN, REJECTED = answers([-4.0], [-6.0], [4]), answers([-9.0], [-8.0], [2])
"""Log ratios 2 and -1, per token 0.5 and -0.5; log-probs per token -1 and -4.5."""


@pytest.mark.parametrize(
    ("loss", "value", "chosen_reward", "rejected_reward"),
    [
        (lambda c, r: dpo(c, r, beta=0.5, label_smoothing=0.0), -math.log(sigmoid(1.5)), 1.0, -0.5),
        (
            lambda c, r: dpo(c, r, beta=0.5, label_smoothing=0.2),
            -0.8 * math.log(sigmoid(1.5)) - 0.2 * math.log(sigmoid(-1.5)), 1.0, -0.5,
        ),
        (lambda c, r: ipo(c, r, beta=0.25), (1 - 2) ** 2, 0.125, -0.125),
        (lambda c, r: simpo(c, r, beta=2.0, margin=3.0), -math.log(sigmoid(7.0 - 3.0)), -2.0, -9.0),
    ],
    ids=["dpo", "cdpo", "ipo", "simpo"],
)  # fmt: skip
def test_loss_of_a_pair_by_hand(loss: PairLoss, value: float, chosen_reward: float, rejected_reward: float) -> None:
    terms = loss(CHOSEN, REJECTED)
    assert terms.loss_P.item() == pytest.approx(value)
    assert terms.chosen_reward_P.item() == pytest.approx(chosen_reward)
    assert terms.rejected_reward_P.item() == pytest.approx(rejected_reward)


def test_kto_by_hand() -> None:
    baseline = kto_baseline(torch.tensor(1.5), torch.tensor(3))
    assert baseline == 0.5
    given = answers([-4.0, -9.0], [-6.0, -8.0], [4, 2])
    options = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    terms = kto(given, torch.tensor([True, False]), baseline, **options)
    assert terms.loss_P.tolist() == pytest.approx([2 * (1 - sigmoid(0.75)), 3 * (1 - sigmoid(0.75))])
    assert kto_baseline(torch.tensor(-1.5), torch.tensor(3)) == 0, "it is an estimate of a divergence"
    assert kto_baseline(torch.tensor(0.0), torch.tensor(0)) == 0


def test_bradley_terry_by_hand() -> None:
    terms = bradley_terry(torch.tensor([2.0, 0.0]), torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.5]))
    assert terms.loss_P.tolist() == pytest.approx([-math.log(sigmoid(1.5)), -math.log(sigmoid(-1.5))])


PAIR_LOSSES: dict[str, PairLoss] = {
    "dpo": lambda c, r: dpo(c, r, beta=0.3, label_smoothing=0.0),
    "cdpo": lambda c, r: dpo(c, r, beta=0.3, label_smoothing=0.1),
    "ipo": lambda c, r: ipo(c, r, beta=0.3),
    "simpo": lambda c, r: simpo(c, r, beta=0.3, margin=0.2),
}


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_gradient_of_a_pair_loss(name: str) -> None:
    chosen, rejected = random_answers(1), random_answers(2)

    def total(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        pair = (
            Answers(of_policy, given.reference_logprobs_R, given.tokens_R)
            for of_policy, given in ((chosen_P, chosen), (rejected_P, rejected))
        )
        return PAIR_LOSSES[name](*pair).loss_P

    assert torch.autograd.gradcheck(total, (chosen.logprobs_R, rejected.logprobs_R))
    of_chosen, of_rejected = torch.autograd.grad(
        total(chosen.logprobs_R, rejected.logprobs_R).sum(), (chosen.logprobs_R, rejected.logprobs_R)
    )
    if name in ("dpo", "simpo"):
        assert bool((of_chosen < 0).all())
        assert bool((of_rejected > 0).all())


def test_gradients_of_kto_and_bradley_terry() -> None:
    given = random_answers(3)

    def total(logprobs_R: Tensor) -> Tensor:
        moved = Answers(logprobs_R, given.reference_logprobs_R, given.tokens_R)
        return kto(moved, DESIRABLE, torch.tensor(0.2), beta=0.3, desirable_weight=1.0, undesirable_weight=1.5).loss_P

    assert torch.autograd.gradcheck(total, (given.logprobs_R,))
    (gradient_R,) = torch.autograd.grad(total(given.logprobs_R).sum(), given.logprobs_R)
    assert (gradient_R < 0).equal(DESIRABLE)
    rewards = (random_answers(4).logprobs_R, random_answers(5).logprobs_R)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, torch.full((5,), 0.3)).loss_P, rewards)


# --- TRL's -----------------------------------------------------------------------------------------------------------


def trainer_of_trl(**settings: Any) -> Any:
    """Stands for a trainer of one process in calls of its loss."""
    trainer = MagicMock()
    for name, value in settings.items():
        setattr(trainer, name, value)
    trainer.accelerator = SimpleNamespace(
        device="cpu", gather=lambda values: values, gather_for_metrics=lambda values: values
    )
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._tp_size, trainer._total_train_tokens, trainer.aux_loss_enabled = 1, 0, False
    return trainer


def outputs_of_trl(*given: Answers) -> tuple[Any, Tensor]:
    """A model's outputs with these log-probs, all at an answer's first token, and the mask of the answers' tokens."""
    logprobs_R, tokens_R = (torch.cat([getattr(each, name) for each in given]) for name in ("logprobs_R", "tokens_R"))
    width = int(tokens_R.max())
    mask_RT = (torch.arange(width) < tokens_R[:, None]).long()
    per_token_RT = torch.zeros(len(tokens_R), width, dtype=torch.float64)
    per_token_RT[:, 0] = logprobs_R
    zeros_RT = torch.zeros_like(per_token_RT)
    outputs = SimpleNamespace(log_probs=per_token_RT, entropy=zeros_RT, mean_logits=zeros_RT, is_top1=zeros_RT.bool())
    return outputs, torch.cat([torch.zeros_like(mask_RT[:, :1]), mask_RT], dim=1)


def test_pair_losses_are_those_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", reason="TRL is not in the environment of the oldest versions")
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer

    of_dpo: Any = DPOTrainer._compute_loss
    of_cpo: Any = CPOTrainer.cpo_loss
    chosen, rejected = random_answers(6), random_answers(7)
    outputs, mask = outputs_of_trl(chosen, rejected)
    inputs = {
        "input_ids": mask, "attention_mask": mask, "completion_mask": mask,
        "ref_chosen_logps": chosen.reference_logprobs_R, "ref_rejected_logps": rejected.reference_logprobs_R,
    }  # fmt: skip
    for of_trl, name in (("sigmoid", "dpo"), ("ipo", "ipo")):
        trainer = trainer_of_trl(
            beta=0.3, loss_types=[of_trl], loss_weights=[1.0], f_divergence_type="reverse_kl", ld_alpha=None,
            precompute_ref_logps=True, use_weighting=False, label_smoothing=0.1,
        )  # fmt: skip
        loss = of_dpo(trainer, lambda **_: outputs, inputs, return_outputs=False)
        terms = PAIR_LOSSES[name](chosen, rejected)
        assert loss.item() == pytest.approx(terms.loss_P.mean().item(), rel=1e-9)
    assert trainer._metrics["train"]["rewards/accuracies"]
    per_token = [answers.logprobs_R / answers.tokens_R for answers in (chosen, rejected)]
    log_ratios = [answers.log_ratios_R for answers in (chosen, rejected)]
    for of_trl, name, pair, smoothing in (("simpo", "simpo", per_token, 0.0), ("sigmoid", "cdpo", log_ratios, 0.1)):
        trainer = trainer_of_trl(loss_type=of_trl, label_smoothing=smoothing, beta=0.3, simpo_gamma=0.2, alpha=0.0)
        losses, *_ = of_cpo(trainer, *pair)
        assert losses.tolist() == pytest.approx(PAIR_LOSSES[name](chosen, rejected).loss_P.tolist(), rel=1e-9)


def test_kto_is_that_of_trl() -> None:
    pytest.importorskip("trl", reason="TRL is not in the environment of the oldest versions")
    from trl.trainer.kto_trainer import KTOTrainer

    of_kto: Any = KTOTrainer._compute_loss
    given, mismatched = random_answers(8), random_answers(9)
    outputs, mask = outputs_of_trl(given)
    trainer = trainer_of_trl(
        beta=0.3, loss_type="kto", desirable_weight=1.0, undesirable_weight=1.5, calculate_KL=True,
        precompute_ref_logps=True,
    )  # fmt: skip
    trainer._compute_kl_logps.return_value = mismatched.logprobs_R
    batch = {
        "input_ids": mask, "attention_mask": mask, "completion_mask": mask, "label": DESIRABLE,
        "ref_logps": given.reference_logprobs_R, "ref_KL_logps": mismatched.reference_logprobs_R,
    }  # fmt: skip
    loss = of_kto(trainer, lambda **_: outputs, batch, return_outputs=False)
    baseline = kto_baseline(mismatched.log_ratios_R.sum(), torch.tensor(5))
    terms = kto(given, DESIRABLE, baseline, beta=0.3, desirable_weight=1.0, undesirable_weight=1.5)
    assert loss.item() == pytest.approx(terms.loss_P.mean().item(), rel=1e-9)
