"""Each vector of a golden file through the function that is registered under its name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from pydantic import TypeAdapter
from torch import Tensor

from slipstream.configs.schema.algorithms import (
    BUILT_IN_ADVANTAGES,
    BUILT_IN_LOSSES,
    AdvantageConfig,
    Aggregation,
    LossConfig,
)
from slipstream.configs.schema.learner import CorrectionConfig, KlEstimator
from slipstream.learner.algorithms.advantages.returns import value_returns
from slipstream.learner.algorithms.aggregation import aggregate, totals_of
from slipstream.learner.algorithms.correction.apply import correct
from slipstream.learner.algorithms.correction.mismatch import mismatch_figures, mismatch_sums
from slipstream.learner.algorithms.kl import kl_estimate
from slipstream.learner.algorithms.losses.clipped import value_loss
from slipstream.learner.algorithms.registry import build_advantage, build_loss
from slipstream.tools.conform.golden import SETTINGS, Golden

NOTES: Final = frozenset({"out", "returns", "loss", "grad", "std", "note"})
"""Entries of a vector that are no settings."""
METRICS: Final = {
    "rollout_corr/rollout_is_mean": "weight_mean",
    "rollout_corr/rollout_is_eff_sample_size": "ess",
    "rollout_corr/kl": "kl_k1",
    "rollout_corr/k3_kl": "kl_k3",
    "rollout_corr/chi2_token": "chi2_token",
    "rollout_corr/chi2_seq": "chi2_sequence",
}
LEVELS: Final = {"token": "token", "seq_mean": "sequence_mean", "seq_sum": "sequence_sum", "seq_max": "sequence_max"}


@dataclass(frozen=True)
class Comparison:
    """One vector: how far our figures are from the file's."""

    name: str
    values: float
    """Largest difference of the values."""
    gradients: float | None = None
    """Largest difference of the gradients, if the vector has any."""
    unknown: str | None = None
    """Why the vector could not be run."""

    def within(self, tolerance: float) -> bool:
        """Whether ours are the file's; a figure that is no number is not."""
        return self.unknown is None and self.values <= tolerance and (self.gradients or 0.0) <= tolerance


def compare(golden: Golden) -> Iterator[Comparison]:
    """All vectors of the file, one after the other."""
    runs: Sequence[tuple[str, Mapping[str, Any], Callable[[Golden, str], Comparison]]] = (
        ("advantages", golden.advantages, _advantage),
        ("losses", golden.losses, _loss),
        ("kl", golden.kl, _kl),
        ("aggregation", golden.aggregation, _aggregation),
        ("correction", golden.correction, _correction),
    )
    for section, vectors, run in runs:
        for name in vectors:
            try:
                found = run(golden, name)
            except ValueError as error:  # what it is called, or what it is set to, is not ours
                found = Comparison(name, float("nan"), unknown=" ".join(str(error).split()))
            yield replace(found, name=f"{section}/{name}")


def _advantage(golden: Golden, name: str) -> Comparison:
    vector, inputs = golden.advantages[name], golden.advantage_inputs()
    settings = _settings(vector, name, BUILT_IN_ADVANTAGES)
    if settings["name"] == "dr_grpo":
        settings.pop("epsilon", None)  # the reference has one function for both, but here it divides by nothing
    if settings["name"] == "gpg":
        settings["scale_up_for"] = "no_reward"  # the reference's count; the paper's is our default
    ours_BT = build_advantage(TypeAdapter(AdvantageConfig).validate_python(settings))(inputs)
    if "returns" not in vector:
        return Comparison(name, _largest(ours_BT, vector["out"]))
    returns_BT = value_returns(inputs, gamma=settings["gamma"], lam=settings["lam"])
    return Comparison(name, _largest(torch.stack([ours_BT, returns_BT]), [vector["out"], vector["returns"]]))


def _loss(golden: Golden, name: str) -> Comparison:
    vector, inputs = golden.losses[name], golden.loss_inputs()
    if name.startswith("value"):
        returns_BT = golden.advantage_inputs().rewards_BT.flip(-1).cumsum(-1).flip(-1) * golden.mask_BT
        tensors = golden.tensors
        terms = value_loss(tensors["new_values"], tensors["values"], returns_BT, clip_range=vector["clip_range"])
        return Comparison(name, _largest(_total(terms.loss_BT, golden.mask_BT, "token-mean"), vector["loss"]))
    settings = _settings(vector, name, BUILT_IN_LOSSES)
    if settings["name"] == "gmpo":
        settings.pop("aggregation")  # the reference ignores it there: it always takes the mean over answers
    if settings["name"] != "ppo":
        settings.pop("dual_clip", None)
    config = TypeAdapter(LossConfig).validate_python(settings)
    loss_BT = build_loss(config)(inputs).loss_BT
    if "decoupled" in name:
        log_ratio_BT = inputs.proximal_logprobs_BT - inputs.behaviour_logprobs_BT
        loss_BT = loss_BT * correct(log_ratio_BT, golden.mask_BT, CorrectionConfig(cap=2.0)).importance_weights_BT
    loss = _total(loss_BT, golden.mask_BT, config.aggregation)
    (gradient_BT,) = torch.autograd.grad(loss, inputs.logprobs_BT)
    return Comparison(name, _largest(loss, vector["loss"]), _largest(gradient_BT, vector["grad"]))


def _kl(golden: Golden, name: str) -> Comparison:
    estimator = TypeAdapter(KlEstimator).validate_python(name)
    target_BT, reference_BT = golden.tensors["target_logprobs"], golden.tensors["reference_logprobs"]
    return Comparison(name, _largest(kl_estimate(target_BT, reference_BT, estimator) * golden.mask_BT, golden.kl[name]))


def _aggregation(golden: Golden, name: str) -> Comparison:
    mode = TypeAdapter(Aggregation).validate_python(name)
    total = _total(golden.tensors["loss_matrix"], golden.mask_BT, mode)
    return Comparison(name, _largest(total, golden.aggregation[name]))


def _correction(golden: Golden, name: str) -> Comparison:
    vector, mask_BT = golden.correction[name], golden.mask_BT
    log_ratio_BT = (golden.tensors["proximal_logprobs"] - golden.tensors["behaviour_logprobs"]) * mask_BT
    ours = correct(log_ratio_BT, mask_BT, CorrectionConfig.model_validate(_correction_settings(vector["args"])))
    differences = [_largest(ours.mask_BT, vector["mask"])]
    if "weights" in vector:
        differences.append(_largest(ours.importance_weights_BT, vector["weights"]))
        # The reference takes these before it normalises.
        plain = CorrectionConfig.model_validate(_correction_settings(vector["args"]) | {"normalise": False})
        weights_BT = correct(log_ratio_BT, mask_BT, plain).importance_weights_BT
        figures = mismatch_figures(mismatch_sums(log_ratio_BT, weights_BT, mask_BT))
        differences += [abs(figures[METRICS[each]] - value) for each, value in vector["metrics"].items()]
    return Comparison(name, float(torch.tensor(differences).max()))  # unlike max(), torch's does not lose a NaN


def _settings(vector: Mapping[str, Any], name: str, built_in: Sequence[str]) -> dict[str, Any]:
    """The vector's section of the configuration: its name is the longest built-in's that it begins with."""
    known = [each for each in built_in if name == each or name.startswith(f"{each}_")]
    if not known:
        raise ValueError(f"nothing is registered under {name!r}")
    settings = {SETTINGS.get(key, key): value for key, value in vector.items() if key not in NOTES}
    return settings | {"name": max(known, key=len)}


def _correction_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """In our words. The reference bounds μ/π_prox where we bound π_prox/μ: its [low, high] is our [1/high, 1/low]."""
    settings: dict[str, Any] = {
        "weight": arguments.get("rollout_is", "none"),
        "normalise": arguments.get("rollout_is_batch_normalize", False),
    }
    if "rollout_is_threshold" in arguments:
        bounds = [float(bound) for bound in str(arguments["rollout_is_threshold"]).split("_")]
        settings |= {"band": bounds} if len(bounds) == 2 else {"cap": bounds[0]}
    if "rollout_rs" in arguments:
        level, _, estimator = arguments["rollout_rs"].rpartition("_")
        bounds = [float(bound) for bound in arguments["rollout_rs_threshold"].split("_")]
        limits = {"low": 1 / bounds[1], "high": 1 / bounds[0]} if estimator == "k1" else {"high": bounds[0]}
        settings["rejections"] = [{"level": LEVELS[level], "estimator": estimator, **limits}]
    return settings


def _total(values_BT: Tensor, mask_BT: Tensor, mode: Aggregation) -> Tensor:
    return aggregate(values_BT, mask_BT, mode, totals_of(mask_BT), horizon=mask_BT.shape[1], constant=None)


def _largest(ours: Tensor, theirs: Any) -> float:
    return float((ours.detach() - torch.tensor(theirs, dtype=torch.float64)).abs().max())
