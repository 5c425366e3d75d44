"""Use of the GPUs: share of their peak, tokens per second, power, cost."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

TOKENS_OF_COST = 1e6
HOUR_S = 3600.0


@dataclass(frozen=True)
class Efficiency:
    """Metrics of a step on the GPUs of a run; without a GPU there are few."""

    ranks: int
    """Of the learner; each has one device."""
    gpus: Collection[str]
    """Identities of the learner's GPUs; empty on CPUs."""
    peak_flops_per_s: float | None
    """Of one of them; None where it is unknown."""
    price_per_gpu_hour: float | None
    mean_power_w: Callable[[], float | None]
    """Mean power of rank 0's GPU since the call before; None where it is unknown."""

    def of_step(
        self, metrics: Mapping[str, float], *, train_s: float, step_s: float, rollout_gpus: Collection[str]
    ) -> dict[str, float]:
        """Metrics of a step.

        Args:
            metrics: `tokens` trained on and `flops`, of all ranks.
            rollout_gpus: identities of the rollout servers' GPUs; those of the learner may be among them.
        """
        tokens, flops = metrics.get("tokens", 0.0), metrics.get("flops", 0.0)
        found = {"tokens_trained_per_s": tokens / step_s}
        if self.peak_flops_per_s is not None and flops:
            found["mfu"] = flops / train_s / self.ranks / self.peak_flops_per_s
        power_w = self.mean_power_w()
        if power_w is not None:
            found["power_w"] = power_w
        gpus = len({*self.gpus, *rollout_gpus})
        if gpus:
            found |= {"gpus": gpus, "tokens_per_gpu_s": tokens / step_s / gpus}
        if self.price_per_gpu_hour is not None and gpus and tokens:
            cost = self.price_per_gpu_hour * gpus * step_s / HOUR_S
            found["cost_per_million_tokens"] = cost / tokens * TOKENS_OF_COST
        return found
