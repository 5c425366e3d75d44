"""`slipstream conform`: compares the algorithms with reference values, computed by another implementation.

A golden file has the reference's inputs and, as vectors, its outputs: each is compared with the result of the function
that is registered under the vector's name.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import TypeAdapter
from torch import Tensor

from slipstream.configs.registry import Registry
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.advantages import ADVANTAGES, AdvantageConfig
from slipstream.configs.schema.learner import CorrectionConfig, KlEstimator
from slipstream.configs.schema.losses import LOSSES, Aggregation, LossConfig
from slipstream.learner.algorithms.advantages.base import AdvantageInputs, rewards_at_the_end
from slipstream.learner.algorithms.advantages.groups import Groups
from slipstream.learner.algorithms.advantages.returns import value_returns
from slipstream.learner.algorithms.aggregation import aggregate, totals_of
from slipstream.learner.algorithms.correction import correct
from slipstream.learner.algorithms.divergence import kl_estimate, mismatch_metrics, mismatch_sums
from slipstream.learner.algorithms.losses.base import LossInputs
from slipstream.learner.algorithms.losses.clipped import value_loss
from slipstream.learner.algorithms.registry import build_advantage, build_loss

TOLERANCE: Final = 1e-5
Vectors = Mapping[str, Mapping[str, Any]]

SECTIONS: Final = ("inputs", "shape", "advantages", "losses", "kl", "aggregation", "correction")
SETTINGS: Final = {
    "lambda": "lam",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_ratio_c": "dual_clip",
    "tau_pos": "tau_positive",
    "tau_neg": "tau_negative",
    "kl_cov_ratio": "ratio",
    "ppo_kl_coef": "coefficient",
    "dro_beta": "beta",
}
"""Our key by the reference's name of the setting."""
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


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream conform`: prints the largest difference of each vector; returns 1 if one exceeds 1e-5.

    Raises: ConfigError when the file can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream conform", description="Compare the algorithms with another implementation's values."
    )
    parser.add_argument("file", type=Path, help="golden file, such as tests/golden/algorithms.json")
    comparisons = list(compare(read_golden(parser.parse_args(argv).file)))
    width = max(len(comparison.name) for comparison in comparisons)
    for comparison in comparisons:
        print(f"{comparison.name:<{width}}  {comparison.result}")
    outside = [comparison for comparison in comparisons if not comparison.within(TOLERANCE)]
    verdict = f"{len(outside)} of {len(comparisons)} differ" if outside else f"all {len(comparisons)} agree"
    print(f"{verdict} (within {TOLERANCE:.0e})")
    return 1 if outside else 0


# --- the golden file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Golden:
    """The content of a golden file; tensors are float64."""

    tensors: Mapping[str, Tensor]
    group_size: int
    advantages: Vectors
    losses: Vectors
    kl: Mapping[str, Any]
    aggregation: Mapping[str, float]
    correction: Vectors

    @property
    def mask_BT(self) -> Tensor:
        """1.0 where there is an action."""
        return self.tensors["mask"]

    def advantage_inputs(self) -> AdvantageInputs:
        """The inputs of an advantage: each row's reward is at its last action."""
        rows = len(self.mask_BT)
        return AdvantageInputs(
            mask_BT=self.mask_BT,
            rewards_BT=rewards_at_the_end(self.tensors["reward"], self.mask_BT),
            groups=Groups(torch.arange(rows) // self.group_size, rows // self.group_size),
            greedy_rewards_B=self.tensors["greedy_reward"],
            values_BT=self.tensors["values"],
        )

    def loss_inputs(self) -> LossInputs:
        """The inputs of a loss; the target's log-probs require a gradient."""
        return LossInputs(
            logprobs_BT=self.tensors["target_logprobs"].clone().requires_grad_(),
            proximal_logprobs_BT=self.tensors["proximal_logprobs"],
            behaviour_logprobs_BT=self.tensors["behaviour_logprobs"],
            advantages_BT=self.tensors["advantages_for_losses"],
            mask_BT=self.mask_BT,
        )


def read_golden(path: Path) -> Golden:
    """Reads a golden file. Raises: ConfigError when it can't be read or lacks a section."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as a golden file: {error}") from None
    missing = [section for section in SECTIONS if section not in found]
    if missing:
        raise ConfigError(f"{path} is no golden file: it lacks {', '.join(missing)}")
    return Golden(
        tensors={name: torch.tensor(value, dtype=torch.float64) for name, value in found["inputs"].items()},
        group_size=found["shape"]["group_size"],
        **{section: found[section] for section in SECTIONS[2:]},
    )


# --- comparisons ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The differences from one vector."""

    name: str
    values: float
    """Largest difference of the values."""
    gradients: float | None = None
    """Largest difference of the gradients; None: the vector has none."""
    unknown: str | None = None
    """The reason why the vector could not be run."""

    def within(self, tolerance: float) -> bool:
        """True if no difference exceeds the tolerance or is NaN."""
        return self.unknown is None and self.values <= tolerance and (self.gradients or 0.0) <= tolerance

    @property
    def result(self) -> str:
        """The differences as text."""
        if self.unknown is not None:
            return f"NOT RUN: {self.unknown}"
        gradients = "" if self.gradients is None else f"  gradients {self.gradients:.1e}"
        return f"values {self.values:.1e}{gradients}" + ("" if self.within(TOLERANCE) else "  DIFFERS")


def compare(golden: Golden) -> Iterator[Comparison]:
    """Compares all vectors of the file, in their order."""
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
                comparison = run(golden, name)
            except ValueError as error:  # its name or one of its settings is unknown here
                comparison = Comparison(name, float("nan"), unknown=" ".join(str(error).split()))
            yield replace(comparison, name=f"{section}/{name}")


def _advantage(golden: Golden, name: str) -> Comparison:
    vector, inputs = golden.advantages[name], golden.advantage_inputs()
    settings = _settings(vector, name, ADVANTAGES)
    settings.pop("epsilon", None)  # a constant here
    if settings["name"] == "gpg":
        settings["scale_up_for"] = "no_reward"  # the reference's count; the default is the paper's
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
    settings = _settings(vector, name, LOSSES)
    if settings["name"] == "gmpo":
        settings.pop("aggregation")  # ignored by the reference, which always takes the mean over answers
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
        # The reference computes these before it normalises.
        plain = CorrectionConfig.model_validate(_correction_settings(vector["args"]) | {"normalise": False})
        weights_BT = correct(log_ratio_BT, mask_BT, plain).importance_weights_BT
        metrics = mismatch_metrics(mismatch_sums(log_ratio_BT, weights_BT, mask_BT))
        differences += [abs(metrics[METRICS[metric]] - value) for metric, value in vector["metrics"].items()]
    return Comparison(name, float(torch.tensor(differences).max()))  # unlike max(), torch's does not lose a NaN


def _settings(vector: Mapping[str, Any], name: str, registry: Registry) -> dict[str, Any]:
    """The vector as a section of the configuration; its function is the longest built-in name that it begins with."""
    known = [known_name for known_name in registry.built_in if name == known_name or name.startswith(f"{known_name}_")]
    if not known:
        raise ValueError(f"nothing is registered under {name!r}")
    settings = {SETTINGS.get(key, key): value for key, value in vector.items() if key not in NOTES}
    return settings | {"name": max(known, key=len)}


def _correction_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As `learner.correction`. The reference bounds μ/π_prox, by [low, high]; π_prox/μ is then in [1/high, 1/low]."""
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
