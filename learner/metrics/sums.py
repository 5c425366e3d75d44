"""Metrics of a training step: sums over actions, added up over all ranks once, and turned into means.

# B rows (answers) of a micro-batch, T actions of the longest
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from slipstream.buffer.wire.messages import CUT_OFF, FINISH_REASONS, Trajectory
from slipstream.learner.algorithms.divergence import SUMS as LAG
from slipstream.learner.algorithms.divergence import k3, mismatch_metrics, mismatch_sums
from slipstream.learner.algorithms.losses.base import bounded
from slipstream.learner.algorithms.objective import ActionValues, Distilled
from slipstream.learner.parallel.mesh import World

_SUMS = (
    *(f"lag/{name}" for name in LAG), "actions", "episodes", "kept", "loss", "clipped", "truncated", "entropy",
    "same_version", "mismatch_k1", "mismatch_k3", "mismatch_abs", "mismatch_probability", "reference_kl", "referenced",
    "distilled", "distill_kl", "distill_agreed", "distill_compared",
    "sequence_tokens", "input_tokens", "flops",
    "process_loss", "process_answers", "process_right", "process_reward",
    "value_loss", "value_clipped", "returns", "returns_squared", "value_error_squared", "valued",
)  # fmt: skip

_SQUARES = "reward_squared"


class StepSums:
    """Accumulates on the device; nothing is copied to the host before `means`."""

    def __init__(self, device: torch.device, reasons: Sequence[str] = (), streams: Sequence[str] = ()) -> None:
        """Both lists are the same on all ranks.

        Args:
            reasons: those for which the correction can mask actions.
            streams: those beside `rl`.
        """
        self._reasons, self._streams = reasons, streams
        of_streams = [f"{name}_{what}" for name in streams for what in ("loss", "tokens")]
        self._names = [*_SUMS, *(f"masked/{reason}" for reason in reasons), "rl_loss", *of_streams]
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in self._names}
        self._values: dict[str, float | Tensor] = {}

    def add(self, **values: Tensor | float) -> None:
        """Adds values to the sums of these names."""
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value

    def set(self, name: str, value: float | Tensor) -> None:
        """Sets a metric that is the same on all ranks; the last value counts."""
        self._values[name] = value

    def add_policy(self, values: ActionValues, own_version: int | None) -> None:
        """Adds values of a micro-batch's actions under the policy's objective.

        Policy lag is measured on all actions, between μ and π_θ: as KL(μ‖π_θ) by the estimators k1 and k3 (Schulman
        2020), as χ²(π_θ‖μ), and as the effective sample size of the ratios π_θ/μ. Engine mismatch is measured on those
        actions that the learner's own weights generated, where μ should equal the policy at the step's first weights.

        Args:
            own_version: the version of the step's first weights, None if they were not published.
        """
        mask_BT = values.mask_BT
        lag_BT = bounded((values.target_BT - values.behaviour_BT) * mask_BT)
        self.add(
            actions=mask_BT.sum(),
            kept=values.kept_BT.sum(),
            clipped=(values.clipped_BT * mask_BT).sum(),
            truncated=(values.truncated_BT * mask_BT).sum(),
        )
        lag_sums = mismatch_sums(lag_BT, lag_BT.exp() * mask_BT, mask_BT)
        self.add(**{f"lag/{name}": value for name, value in lag_sums.items()})
        if values.entropy_BT is not None:
            self.add(entropy=values.entropy_BT.sum())
        if values.reference_kl_BT is not None:
            self.add(reference_kl=values.reference_kl_BT.sum(), referenced=mask_BT.sum())
        if values.distilled is not None:
            self._add_distilled(values.distilled)
        if own_version is not None and values.initial_BT is not None:
            same_BT = mask_BT * (values.versions_BT == own_version)
            mismatch_BT = (values.initial_BT - values.behaviour_BT) * same_BT
            self.add(
                same_version=same_BT.sum(),
                mismatch_k1=-mismatch_BT.sum(),
                mismatch_k3=k3(mismatch_BT).sum(),
                mismatch_abs=mismatch_BT.abs().sum(),
                mismatch_probability=((values.initial_BT.exp() - values.behaviour_BT.exp()) * same_BT).abs().sum(),
            )

    def _add_distilled(self, distilled: Distilled) -> None:
        actions = distilled.mask_BT.sum()
        self.add(distilled=actions, distill_kl=distilled.kl_BT.sum())
        if distilled.agreed_BT is not None:
            self.add(distill_compared=actions, distill_agreed=distilled.agreed_BT.sum())

    def add_masked(self, masked: Mapping[str, Tensor]) -> None:
        """Adds the number of actions that each reason masks; reasons may overlap."""
        self.add(**{f"masked/{reason}": out_BT.sum() for reason, out_BT in masked.items()})

    def add_values(self, values_BT: Tensor, returns_BT: Tensor, clipped_BT: Tensor, mask_BT: Tensor) -> None:
        """Adds the critic's values and returns of a micro-batch."""
        self.add(
            valued=mask_BT.sum(),
            value_clipped=(clipped_BT * mask_BT).sum(),
            returns=(returns_BT * mask_BT).sum(),
            returns_squared=(returns_BT.square() * mask_BT).sum(),
            value_error_squared=((returns_BT - values_BT).square() * mask_BT).sum(),
        )

    def vector(self) -> Tensor:
        """The sums, for adding up over ranks."""
        return torch.stack([self._sums[name] for name in self._names])

    def means(self, totals: Tensor) -> dict[str, float]:
        """Metrics of the step, from the sums of all ranks."""
        total = dict(zip(self._names, totals.tolist(), strict=True))
        metrics = {
            "actions": total["actions"],
            "answers": total["episodes"],
            "tokens": total["sequence_tokens"],
            "prefix_saving": 1 - total["input_tokens"] / max(1, total["sequence_tokens"]),
            "flops": total["flops"],
        }
        if total["actions"]:
            metrics |= _policy_metrics(total)
            metrics |= {f"masked/{reason}": total[f"masked/{reason}"] / total["actions"] for reason in self._reasons}
        if self._streams:
            metrics["rl_loss"] = total["rl_loss"]
        metrics |= {f"{name}_{what}": total[f"{name}_{what}"] for name in self._streams for what in ("loss", "tokens")}
        if total["valued"]:
            metrics |= _critic_metrics(total)
        if total["process_answers"]:
            metrics |= {
                "process_reward_loss": total["process_loss"],
                "process_reward_accuracy": total["process_right"] / total["process_answers"],
                "process_reward": total["process_reward"] / total["process_answers"],
            }
        return metrics | {name: float(value) for name, value in self._values.items()}


def _policy_metrics(total: Mapping[str, float]) -> dict[str, float]:
    actions, same = total["actions"], total["same_version"]
    metrics = {
        "loss": total["loss"],
        **mismatch_metrics({name: total[f"lag/{name}"] for name in LAG}),
        "clip_fraction": total["clipped"] / actions,
        "truncated_fraction": total["truncated"] / actions,
        "masked_fraction": 1 - total["kept"] / actions,
    }
    if total["entropy"]:
        metrics["entropy"] = total["entropy"] / actions
    if total["referenced"]:
        metrics["reference_kl"] = total["reference_kl"] / total["referenced"]
    if total["distilled"]:
        metrics |= {
            "distill/kl": total["distill_kl"] / total["distilled"],
            "distill/share": total["distilled"] / actions,
        }
    if total["distill_compared"]:
        metrics["distill/agreement"] = total["distill_agreed"] / total["distill_compared"]
    if same:
        metrics |= {"mismatch_tokens": same}
        of_same_version = ("mismatch_k1", "mismatch_k3", "mismatch_abs", "mismatch_probability")
        metrics |= {name: total[name] / same for name in of_same_version}
    return metrics


def _critic_metrics(total: Mapping[str, float]) -> dict[str, float]:
    valued = total["valued"]
    variance = total["returns_squared"] / valued - (total["returns"] / valued) ** 2
    return {
        "value_loss": total["value_loss"],
        "value_clip_fraction": total["value_clipped"] / valued,
        # 1: every return was predicted; 0: no better than their mean.
        "value_explained": 1 - total["value_error_squared"] / valued / variance if variance > 0 else 0.0,
    }


def trajectory_metrics(
    trajectories: Sequence[Trajectory],
    episodes: Sequence[int],
    groups: Sequence[int],
    staleness: Mapping[int, int],
    world: World,
) -> dict[str, float]:
    """Rewards, scores and lengths of a step's episodes, staleness of their trajectories, on all ranks; a collective.

    An episode's length is that of all its trajectories; it is cut off if its last one is. Staleness is that
    of the stalest action token; its part in the queue is that of the least stale one, the rest arose in flight.

    Args:
        staleness: of action tokens, by their policy version.
        episodes: index of each trajectory's episode, from 0 in the order in which they begin.
        groups: index of each episode's group.
    """
    # The trajectories of an episode share reward and scores; the last one shows how it ended.
    ends = list(dict(zip(episodes, trajectories, strict=True)).values())
    tokens, trajectories_of = dict.fromkeys(episodes, 0), Counter(episodes)
    for episode, trajectory in zip(episodes, trajectories, strict=True):
        tokens[episode] += sum(span.end - span.start for span in trajectory.spans)
    stalest = np.array([max(staleness[span.version] for span in t.spans) for t in trajectories])
    freshest = np.array([min(staleness[span.version] for span in t.spans) for t in trajectories])
    of_group = defaultdict[int, set[float]](set)
    for group, trajectory in zip(groups, ends, strict=True):
        of_group[group].add(trajectory.reward)
    values_of: dict[str, ArrayLike] = {
        "reward": [t.reward for t in ends],
        _SQUARES: [t.reward**2 for t in ends],
        "groups_without_spread": [len(rewards) == 1 for rewards in of_group.values()],
        **{name: list(tokens.values()) for name in ("answer_tokens", "answer_tokens_min", "answer_tokens_max")},
        "answers_cut_off": [t.finish_reason in CUT_OFF for t in ends],
        **{f"ended/{reason}": [t.finish_reason == reason for t in ends] for reason in FINISH_REASONS},
        "trajectories_per_episode": [trajectories_of[episode] for episode in tokens],
        "staleness_mean": stalest,
        "staleness_max": stalest,
        "staleness_in_flight": stalest - freshest,
        "staleness_in_queue": freshest,
    }
    # Groups from before a change of the rewards have other scores.
    for name in dict.fromkeys(name for t in ends for name in t.scores):
        values_of[f"score/{name}"] = [t.scores[name] for t in ends if name in t.scores]
    of_ranks = world.gather(
        {name: (float(np.sum(v)), float(np.min(v)), float(np.max(v)), np.size(v)) for name, v in values_of.items()}
    )
    metrics = {}
    for name in dict.fromkeys(name for rank_sums in of_ranks for name in rank_sums):
        sums, least, largest, counts = zip(
            *(rank_sums[name] for rank_sums in of_ranks if name in rank_sums), strict=True
        )
        mean = sum(sums) / sum(counts)
        metrics[name] = max(largest) if name.endswith("_max") else min(least) if name.endswith("_min") else mean
    # Rounding may leave a little less than 0 where all are equal.
    metrics["reward_std"] = math.sqrt(max(0.0, metrics.pop(_SQUARES) - metrics["reward"] ** 2))
    return metrics
