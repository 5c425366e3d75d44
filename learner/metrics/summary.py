"""The content of `summary.json`, from the records of `metrics.jsonl`. Pure functions."""

import json
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from slipstream.buffer.wire.messages import LedgerCounts, State

KEYS = {
    "kind", "step", "policy_version", "reward", "staleness_mean", "staleness_max", "step_s", "wait_s", "tokens", "ess",
    "mismatch_tokens", "mismatch_k3", "mismatch_abs", "score", "score_interval", "pass_at_k", "maj_at_k", "lower_bound",
    "coverage", "eval_s", "mfu", "train_s", "tokens_trained_per_s", "tokens_per_gpu_s", "power_w",
    "cost_per_million_tokens",
}  # fmt: skip
"""Fields that the summary reads; whole records of a long run would fill the memory."""
EDGE_STEPS = 10
"""Most steps of the first and of the last reward; of a short run at most a third of its steps each."""
TARGET_SCORE = 0.9

Metrics = Mapping[str, Any]


def read_records(path: Path, keys: Set[str] | None = KEYS) -> list[dict[str, Any]]:
    """These fields of the records of a metrics file, or all; a damaged line is left out. Raises: OSError."""
    records = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                records.append(record if keys is None else {key: record[key] for key in keys & record.keys()})
    return records


def summarise(
    records: Sequence[Metrics],
    *,
    last_step: int,
    policy_version: int,
    state: State,
    published_s: Collection[float],
    stalls_s: Collection[float],
    wall_s: float,
    startup_s: float,
) -> dict[str, Any]:
    """Summary of a finished run; None where records are missing.

    Args:
        records: all of the run, also from before a restart; of a step trained twice, the last counts.
        last_step: last step of the run; later ones were undone by a restart and not repeated.
        policy_version: last version of the run.
        state: the ledger and the rollout servers' counters at the end.
        published_s: time of each publication until the last server applied it.
        stalls_s: pause of generation, per update and server.
        wall_s: from the start of the run to its end.
        startup_s: from the start of the run to the first training step.
    """
    all_steps = [record for record in records if record["kind"] == "step"]
    steps = list({record["step"]: record for record in all_steps if record["step"] <= last_step}.values())
    # Version 0 are the initial weights, which precede all steps.
    lost = _versions(all_steps) - _versions(steps) - {0}
    evals = [record for record in records if record["kind"] == "eval" and record["policy_version"] not in lost]
    last = evals[-1] if evals and evals[-1]["policy_version"] == policy_version else None
    edge = max(1, min(EDGE_STEPS, len(steps) // 3))
    loop_s = sum(step["step_s"] for step in steps)
    up_s, busy_s = sum(server.up_s for server in state.servers), sum(server.busy_s for server in state.servers)
    counts = state.counts
    return {
        "steps": len(steps),
        "policy_version": policy_version,
        "reward_first": mean(step["reward"] for step in steps[:edge]),
        "reward_last": mean(step["reward"] for step in steps[-edge:]),
        "eval_score": last and last["score"],
        "eval_score_interval": last and last.get("score_interval"),
        "eval_pass_at_k": last and last.get("pass_at_k"),
        "eval_maj_at_k": last and last.get("maj_at_k"),
        "eval_lower_bound": last and last["lower_bound"],
        "eval_coverage": last and last["coverage"],
        "eval_score_first": evals[0]["score"] if evals else None,
        "time_to_eval_0.9_s": _time_to_target(steps, evals),
        "staleness_mean": mean(step["staleness_mean"] for step in steps),
        "staleness_max": max((step["staleness_max"] for step in steps), default=None),
        "wall_s": wall_s,
        "startup_s": startup_s,
        "step_s_median": statistics.median(step["step_s"] for step in steps) if steps else None,
        "eval_s": sum(record["eval_s"] for record in evals),
        "tokens_generated": counts.tokens,
        "tokens_trained": round(sum(step["tokens"] for step in steps)),
        **efficiency(steps),
        "groups": _groups(counts),
        "learner_idle_fraction": sum(step["wait_s"] for step in steps) / loop_s if loop_s else None,
        "generator_idle_fraction": 1 - busy_s / up_s if up_s else None,
        "weight_sync_s": _mean_max(published_s),
        "generation_stall_s": _mean_max(stalls_s),
        "ess_mean": mean(step.get("ess") for step in steps),
        **_engine_mismatch([*steps, *evals]),
    }


def efficiency(steps: Sequence[Metrics]) -> Metrics:
    """Use of the GPUs over all steps; None where no step has it."""
    return {
        **{
            name: _weighted(steps, name, by="step_s")
            for name in ("tokens_trained_per_s", "tokens_per_gpu_s", "power_w")
        },
        "mfu": _weighted(steps, "mfu", by="train_s"),
        "cost_per_million_tokens": _weighted(steps, "cost_per_million_tokens", by="tokens"),
    }


def _weighted(steps: Sequence[Metrics], key: str, *, by: str) -> float | None:
    """Mean over the steps that have the metric, weighted by another."""
    pairs = [(step[key], step[by]) for step in steps if step.get(key) is not None]
    weight = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / weight if weight else None


def _groups(counts: LedgerCounts) -> dict[str, Any]:
    return {
        "issued": counts.issued,
        "ready": counts.ready,
        "leased": counts.leased,
        "trained": counts.trained,
        "filtered": counts.filtered,
        "expired": counts.expired,
        "reissued": counts.reissued,
        "reasons": counts.reasons,
    }


def _engine_mismatch(records: Iterable[Metrics]) -> Metrics:
    measured = [record for record in records if record.get("mismatch_tokens") and record["mismatch_k3"] is not None]
    return {
        "engine_mismatch_kl": _mean_over_tokens(measured, "mismatch_k3"),
        "engine_mismatch_abs": _mean_over_tokens(measured, "mismatch_abs"),
        "engine_mismatch_tokens": round(sum(record["mismatch_tokens"] for record in measured)),
    }


def _versions(steps: Iterable[Metrics]) -> set[int]:
    return {step["policy_version"] for step in steps}


def _time_to_target(steps: Sequence[Metrics], evals: Sequence[Metrics]) -> float | None:
    """Training time until the first evaluation whose lower bound reached the target, without start-up."""
    reached = next((record["step"] for record in evals if record["lower_bound"] >= TARGET_SCORE), None)
    return None if reached is None else sum(step["step_s"] for step in steps if step["step"] <= reached)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are not None: values that are not finite are null in the records."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _mean_over_tokens(records: Sequence[Metrics], key: str) -> float | None:
    tokens = sum(record["mismatch_tokens"] for record in records)
    return sum(record[key] * record["mismatch_tokens"] for record in records) / tokens if tokens else None


def _mean_max(values: Collection[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values) if values else None, "max": max(values, default=None)}
