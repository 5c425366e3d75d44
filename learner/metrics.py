"""The figures of a training step: sums over actions, added up over all ranks once, and turned into means.

# A actions
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.buffer.wire.messages import Trajectory
from slipstream.learner.losses import LossTerms
from slipstream.learner.packing import MicroBatch

_SUMS = (
    "actions", "loss", "weight", "weight_squared", "kl_k1", "kl_k3", "clipped", "truncated",
    "entropy", "same_version", "mismatch_k1", "mismatch_k3", "mismatch_abs", "input_tokens",
)  # fmt: skip


class StepSums:
    """Accumulates on the device; nothing is copied to the host before `means`."""

    def __init__(self, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), device=device) for name in _SUMS}
        self._values: dict[str, float | Tensor] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        """Adds to one sum."""
        self._sums[name] = self._sums[name] + value

    def set(self, name: str, value: float | Tensor) -> None:
        """Sets a figure that is the same on all ranks; the last one counts."""
        self._values[name] = value

    def add_actions(
        self,
        batch: MicroBatch,
        terms: LossTerms,
        target_A: Tensor,
        proximal_A: Tensor,
        own_version: int | None,
    ) -> None:
        """Adds a micro-batch.

        Policy lag is measured on all actions, as KL(μ‖π_θ) by the estimators k1 and k3 (Schulman 2020); engine mismatch
        on those that the learner's own weights generated, where μ and π_prox should be one.

        Args:
            own_version: the version that the step's first weights were published as, None if they were not.
        """
        behaviour_A = batch.behaviour_logprobs_A
        lag_A = target_A - behaviour_A
        same_A = (batch.versions_A == own_version).float() if own_version is not None else torch.zeros_like(lag_A)
        mismatch_A = (proximal_A - behaviour_A) * same_A
        figures: dict[str, float | Tensor] = {
            "actions": float(batch.actions),
            "input_tokens": float(batch.input_ids_1T.numel()),
            "weight": terms.behaviour_weight_A.sum(),
            "weight_squared": terms.behaviour_weight_A.square().sum(),
            "clipped": terms.clipped_A.sum(),
            "truncated": terms.truncated_A.sum(),
            "kl_k1": -lag_A.sum(),
            "kl_k3": (lag_A.exp() - 1 - lag_A).sum(),
            "same_version": same_A.sum(),
            "mismatch_k1": -mismatch_A.sum(),
            "mismatch_k3": (mismatch_A.exp() - 1 - mismatch_A).sum(),
            "mismatch_abs": mismatch_A.abs().sum(),
        }
        for name, value in figures.items():
            self.add(name, value)

    def vector(self) -> Tensor:
        """The sums, for adding up over ranks."""
        return torch.stack([self._sums[name] for name in _SUMS])

    def means(self, totals: Tensor) -> dict[str, float]:
        """The step's figures, from the sums of all ranks."""
        total = dict(zip(_SUMS, totals.tolist(), strict=True))
        actions, same = max(1.0, total["actions"]), total["same_version"]
        figures = {
            "loss": total["loss"],
            "ess": total["weight"] ** 2 / (actions * total["weight_squared"]) if total["weight_squared"] else 0.0,
            "kl_k1": total["kl_k1"] / actions,
            "kl_k3": total["kl_k3"] / actions,
            "clip_fraction": total["clipped"] / actions,
            "truncated_fraction": total["truncated"] / actions,
            "actions": total["actions"],
            "tokens": total["input_tokens"],
        }
        if total["entropy"]:
            figures["entropy"] = total["entropy"] / actions
        if same:
            figures |= {
                "mismatch_tokens": same,
                "mismatch_k1": total["mismatch_k1"] / same,
                "mismatch_k3": total["mismatch_k3"] / same,
                "mismatch_abs": total["mismatch_abs"] / same,
            }
        return figures | {name: float(value) for name, value in self._values.items()}


def trajectory_figures(trajectories: Sequence[Trajectory], consuming_version: int) -> dict[str, float]:
    """Reward, scores and staleness of a step's trajectories.

    Staleness is consuming version - oldest action-token version; its part in flight is newest - oldest version, its
    part in the queue consuming - newest version.
    """
    oldest = np.array([min(span.version for span in t.spans) for t in trajectories])
    newest = np.array([max(span.version for span in t.spans) for t in trajectories])
    figures = {
        "reward": float(np.mean([t.reward for t in trajectories])),
        "answer_tokens": float(np.mean([span_tokens(t) for t in trajectories])),
        "staleness_mean": float(np.mean(consuming_version - oldest)),
        "staleness_max": float(np.max(consuming_version - oldest)),
        "staleness_in_flight": float(np.mean(newest - oldest)),
        "staleness_in_queue": float(np.mean(consuming_version - newest)),
    }
    for name in trajectories[0].scores:
        figures[f"score/{name}"] = float(np.mean([t.scores[name] for t in trajectories]))
    return figures


def span_tokens(trajectory: Trajectory) -> int:
    """Number of action tokens."""
    return sum(span.end - span.start for span in trajectory.spans)
