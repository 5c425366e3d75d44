"""`slipstream samples`: what the policy generated during a run, as text."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from slipstream.buffer.wire.codec import action_mask
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.metrics.samples import Kind, Sample, read_samples
from slipstream.models.folder import Decode
from slipstream.tools.cli import at_least
from slipstream.tools.ledger.open import RUN_HELP, find_run
from slipstream.tools.transcript import printable, run_decoder, stretches, text_of

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
    kind: Kind = "eval" if arguments.eval else "step"
    samples = _selected(read_samples(folder.samples, kind), step=arguments.step, order=arguments.order)
    if not samples:
        what = "evaluation" if arguments.eval else "step"
        raise SlipstreamError(f"{folder.samples} has no samples: they are kept from the run's first {what} on")
    decode = run_decoder(folder, config.model)
    shown = samples[: arguments.most]
    if arguments.json:
        print(json.dumps([_record(sample, decode) for sample in shown], indent=2, ensure_ascii=False))
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
    lines = [
        f"=== {what}: {sample.chosen}, reward {trajectory.reward:.4g}, ended by {printable(trajectory.finish_reason)}",
        f"scores: {scores}",
        *([f"rewards of turns: {turns}"] if turns else []),
        text_of(trajectory, decode),
    ]
    return "\n".join(lines)


def _record(sample: Sample, decode: Decode) -> dict[str, Any]:
    trajectory = sample.trajectory
    return {
        "kind": sample.kind,
        "number": sample.number,
        "chosen": sample.chosen,
        "reward": trajectory.reward,
        "scores": trajectory.scores,
        "finish_reason": trajectory.finish_reason,
        "rewards": [{"end": reward.end, "value": reward.value} for reward in trajectory.rewards],
        "stretches": [asdict(stretch) for stretch in stretches(trajectory, decode)],
    }
