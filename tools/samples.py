"""`slipstream samples`: what the policy generated during a run, as text."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.wire.codec import action_mask, behaviour_logprobs, token_ids
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.metrics.samples import Kind, Sample, read_samples
from slipstream.models.folder import Decode
from slipstream.tools.cli import at_least, printable
from slipstream.tools.follow import json_text
from slipstream.tools.ledger.open import RUN_HELP, find_run
from slipstream.tools.transcript import run_decoder, stretches, text_of

ORDERS: Final[Mapping[str, Callable[[Sample], float]]] = {
    "best": lambda sample: -sample.trajectory.reward,
    "worst": lambda sample: sample.trajectory.reward,
    "longest": lambda sample: -int(np.count_nonzero(action_mask(sample.trajectory))),
}


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream samples`; returns 0.

    Raises: ConfigError when there is no such run, SlipstreamError when it has no such samples.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream samples",
        description="Show what the policy generated: of each step a few answers are kept (the best, the worst, the "
        "longest and a random one), of each evaluation too. Without an option: those of the latest step.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--step", type=at_least(0), metavar="N", help="of this step, or the nearest one that was kept")
    parser.add_argument("--eval", action="store_true", help="answers of evaluations; --step is a policy version then")
    order = parser.add_mutually_exclusive_group()
    for name in ORDERS:
        order.add_argument(f"--{name}", action="store_const", const=name, dest="order", help=f"the {name} ones first")
    parser.add_argument("--most", type=at_least(1), default=4, metavar="N", help="number of samples; default: 4")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args(argv)
    folder, config = find_run(arguments.run)
    # A training without a buffer generates for its measurements alone.
    kind: Kind = "eval" if arguments.eval or not config.uses_buffer else "step"
    samples = _selected(read_samples(folder.samples, kind), step=arguments.step, order=arguments.order)
    if not samples:
        what = "evaluation" if kind == "eval" else "step"
        raise SlipstreamError(f"{folder.samples} has no samples: they are kept from the run's first {what} on")
    decode = run_decoder(folder, config.model)
    shown = samples[: arguments.most]
    if arguments.json:
        print(json_text([_record(sample, decode) for sample in shown]))
    else:
        print("\n\n".join(_described(sample, decode) for sample in shown))
    return 0


def _selected(samples: Sequence[Sample], *, step: int | None, order: str | None) -> list[Sample]:
    """Samples of one step; with an order and no step, of all."""
    if not samples:
        return []
    if step is not None or order is None:
        numbers = {sample.number for sample in samples}
        nearest = max(numbers) if step is None else min(numbers, key=lambda number: (abs(number - step), number))
        samples = [sample for sample in samples if sample.number == nearest]
    return sorted(samples, key=ORDERS[order]) if order else list(samples)


def _described(sample: Sample, decode: Decode) -> str:
    trajectory = sample.trajectory
    what = f"step {sample.number}" if sample.kind == "step" else f"evaluation of version {sample.number}"
    scores = ", ".join(f"{printable(name)} {value:.4g}" for name, value in trajectory.scores.items())
    turns = ", ".join(f"{reward.value:.4g} up to token {reward.end}" for reward in trajectory.rewards)
    advantage = _range(sample.advantage)
    gain = f", advantage {advantage}" if advantage else ""
    ended = printable(trajectory.finish_reason)
    lines = [
        f"=== {what}: {sample.chosen}, reward {trajectory.reward:.4g}{gain}, ended by {ended}",
        *_origin(sample),
        f"scores: {scores}",
        *([f"rewards of turns: {turns}"] if turns else []),
        text_of(trajectory, decode),
    ]
    return "\n".join(lines)


def _origin(sample: Sample) -> list[str]:
    """Lines on where the sample comes from and how it was trained on, as far as that was kept."""
    lines = []
    if sample.group_id:
        task = "" if sample.task is None else f", task {sample.task}"
        lines.append(f"answer {sample.answer} of group {printable(sample.group_id)}{task} of {printable(sample.env)}")
    if sample.trained is not None:
        ratios = _range(sample.ratio)
        actions = int(np.count_nonzero(action_mask(sample.trajectory)))
        trained = f"trained on {int(sample.trained.sum()):,} of {actions:,} tokens"
        lines.append(trained + (f", ratio π_θ/μ {ratios}" if ratios else ""))
    return lines


def _range(values: NDArray[np.float32] | None) -> str:
    """Lowest and highest of the values that are known, or the only one."""
    known = np.zeros(0) if values is None else values[~np.isnan(values)]
    if not known.size:
        return ""
    low, high = (f"{bound:+.3g}" if known.min() < 0 else f"{bound:.3g}" for bound in (known.min(), known.max()))
    return low if low == high else f"{low} to {high}"


def _token_columns(sample: Sample) -> dict[str, list[Any]]:
    """Values of each token; null where there is none. Columns that were not kept are left out."""
    trajectory = sample.trajectory
    version = np.full(len(trajectory.action_mask), -1)
    for span in trajectory.spans:
        version[span.start : span.end] = span.version
    is_action = action_mask(trajectory).astype(bool)
    columns = {
        "id": token_ids(trajectory).tolist(),
        "version": [value if value >= 0 else None for value in version.tolist()],
        "logprob": _known(np.where(is_action, behaviour_logprobs(trajectory), np.nan)),
    }
    for name, values in (("ratio", sample.ratio), ("advantage", sample.advantage), ("entropy", sample.entropy)):
        if values is not None:
            columns[name] = _known(values)
    if sample.trained is not None:
        columns["trained"] = sample.trained.tolist()
    return columns


def _known(values: NDArray[np.float32]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.astype(float).tolist()]


def _record(sample: Sample, decode: Decode) -> dict[str, Any]:
    trajectory = sample.trajectory
    return {
        "kind": sample.kind,
        "number": sample.number,
        "chosen": sample.chosen,
        "group_id": sample.group_id,
        "answer": sample.answer,
        "task": sample.task,
        "env": sample.env,
        "reward": trajectory.reward,
        "scores": trajectory.scores,
        "finish_reason": trajectory.finish_reason,
        "rewards": [{"end": reward.end, "value": reward.value} for reward in trajectory.rewards],
        "stretches": [asdict(stretch) for stretch in stretches(trajectory, decode)],
        "tokens": _token_columns(sample),
    }
