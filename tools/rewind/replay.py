"""`slipstream replay`: recorded training steps done once more, with the same settings or with others."""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import torch
from rich.table import Table
from rich.text import Text

from slipstream.configs.load import override_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import configure_logging
from slipstream.learner.models.reproducibility import Surroundings
from slipstream.learner.parallel.mesh import join_world, leave_world
from slipstream.learner.trainers.rl.replay import Answer
from slipstream.tools.cli import at_least, new_file, printable, table_console
from slipstream.tools.follow import json_bytes
from slipstream.tools.ledger.open import RUN_HELP
from slipstream.tools.rewind.ranks import replay_on_ranks
from slipstream.tools.rewind.recording import Recording
from slipstream.tools.rewind.session import ReplayedStep, Request, Session

SHOWN: Final = (
    "reward", "loss", "grad_norm", "lr", "entropy", "kl_k3", "ess", "clip_fraction", "truncated_fraction",
    "masked_fraction", "reference_kl", "value_loss", "critic_grad_norm", "process_reward_loss",
    "process_reward_grad_norm",
)  # fmt: skip
"""Metrics that are printed, where a step has them."""
NOT_COMPARED: Final = {"skipped_updates"}
"""Metrics that depend on the steps before."""
RECORDED: Final = "the answers, their rewards and their staleness are those that were recorded"
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "learner.trainer": "steps of the trainer rl are done once more",
    "learner.groups_per_step": "each step has the groups that were recorded",
    "learner.throttle": "what the throttle had set is recorded",
    "learner.checkpoint": "no checkpoint is saved",
    "learner.wait_deadline_s": "nothing is waited for",
    "model.path": "the recorded steps are of this model",
    "model.build": "the recorded steps are of this model",
    "model.revision": "the recorded steps are of this model",
}
"""Keys of the sections `learner` and `model` that are refused, with the reason."""
OTHERS_WITH_EFFECT: Final = ("run.seed", "env.options.envs")
"""Keys of other sections that are not refused; of the envs of a mixture the algorithms."""


def replay(
    recording: Recording,
    first: int,
    last: int,
    *,
    overrides: Sequence[str] = (),
    leave_out: Set[Answer] = frozenset(),
    on_step: Callable[[ReplayedStep], None] | None = None,
) -> list[ReplayedStep]:
    """Does the steps from `first` to `last` once more.

    The steps between the checkpoint before `first` and `first` are done with their own settings, and are not returned.
    Of a run with one rank this process keeps the models, and the state before `first`, until the recording is closed;
    of others each call starts the ranks.

    Args:
        overrides: `key.path=value` texts, settings that differ from the recorded ones.
        leave_out: answers and groups that are not trained on, see `Answer`.
        on_step: called after each step.

    Raises: ConfigError when an override is wrong, SlipstreamError when a step can't be replayed.
    """
    done = []
    for step in _steps(recording, Request(first, last, tuple(overrides), frozenset(leave_out))):
        if step.step >= first:
            done.append(step)
            if on_step is not None:
                on_step(step)
    return done


def _steps(recording: Recording, request: Request) -> Iterator[ReplayedStep]:
    """The steps from the checkpoint on. Raises: as `replay`."""
    begin = recording.checkpoint_before(request.first, request.last)
    _require_effect(recording, request)
    ranks = {recording.steps[step].start.surroundings.ranks for step in range(begin + 1, request.last + 1)}
    if len(ranks) > 1:
        raise ConfigError(
            f"steps {begin + 1} to {request.last} were done by different numbers of learner ranks, {sorted(ranks)}: "
            "replay those of each number by themselves"
        )
    if ranks == {1}:
        return _session(recording).replay(request)
    return replay_on_ranks(recording, request, ranks.pop())


def _session(recording: Recording) -> Session:
    """The recording's session in this process, which lives until that is closed."""
    if recording.session is None:
        recording.cleanup.callback(torch.set_num_threads, torch.get_num_threads())
        world = join_world()
        recording.cleanup.callback(leave_world)
        states = recording.cleanup.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-replay-"))
        recording.session = Session(recording, world, Path(states))
    return recording.session


def _require_effect(recording: Recording, request: Request) -> None:
    """Raises: ConfigError when an override is wrong, or has no effect on a replay."""
    override_config(recording.config(request.first), request.overrides)
    problems = []
    for key in (override.partition("=")[0] for override in request.overrides):
        reason = next((why for name, why in WITHOUT_EFFECT.items() if f"{key}.".startswith(f"{name}.")), None)
        if reason is None and key.partition(".")[0] not in ("learner", "model") and key not in OTHERS_WITH_EFFECT:
            reason = RECORDED
        if reason is not None:
            problems.append(f"{key} has no effect on a replay: {reason}; leave it out")
    if problems:
        raise ConfigError(problems)


# --- command ----------------------------------------------------------------------------------------------------------


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream replay`; returns 1 when the same settings gave other weights, else 0.

    Raises: as `replay`.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream replay",
        description="Do recorded training steps once more, from the checkpoint before them and the groups that the run "
        "keeps: with the same settings, which gives the same weights bit for bit on a CPU, or with others. The run is "
        "only read.",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP.partition("; default")[0])
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help="settings that differ")
    parser.add_argument("--step", type=at_least(1), required=True, metavar="N", help="the step, as in metrics.jsonl")
    parser.add_argument("--to", type=at_least(1), metavar="M", help="the last of several steps from N on")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all metrics of both sides to this file")
    arguments = parser.parse_intermixed_args(argv)
    first, last = arguments.step, arguments.to or arguments.step
    if last < first:
        parser.error(f"--to {last} is before --step {first}")
    configure_logging("slipstream", level="warning", folder=None)
    with Recording.open(arguments.run) as recording:
        request = Request(first, last, tuple(arguments.overrides))
        return _report(recording, request, arguments.json)


def _report(recording: Recording, request: Request, file: Path | None) -> int:
    """Prints the steps as they are done, and a verdict."""
    steps: list[ReplayedStep] = []
    before: ReplayedStep | None = None
    for step in _steps(recording, request):
        if step.step < request.first:
            before = before or (None if step.equal else step)
            continue
        steps.append(step)
        _print_step(step)
    differing = before or next((step for step in steps if not step.equal), None)
    if file is not None:
        content = {
            "run": str(recording.folder.root),
            "overrides": request.overrides,
            "equal": differing is None,
            "first_difference": None if differing is None else differing.step,
            "steps": [asdict(step) for step in steps],
        }
        try:
            write_atomically(file, [json_bytes(content)])
        except OSError as error:
            raise ConfigError(f"--json {file} can't be written: {error.strerror}") from None
    if differing is None:
        print(f"weights equal after {'all steps' if len(steps) > 1 else 'the step'}")
        return 0
    print(f"weights differ from step {differing.step} on")
    if request.overrides and before is None:
        return 0
    for cause in _causes(recording, differing.step):
        print(f"  {printable(cause)}")
    return 1


def _print_step(step: ReplayedStep) -> None:
    """One line for a step that is equal in all metrics, else a table of the main ones."""
    weights = "weights equal" if step.equal else f"weights differ ({step.checksum}, recorded {step.recorded_checksum})"
    pairs = {name: (step.recorded.get(name), value) for name, value in step.metrics.items() if name not in NOT_COMPARED}
    differing = [name for name, (recorded, replayed) in pairs.items() if not _same(recorded, replayed)]
    print(f"step {step.step}: {weights}, {len(pairs) - len(differing)} of {len(pairs)} metrics equal")
    if not differing:
        return
    table = Table("", "recorded", "replayed", "difference")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in [*(name for name in SHOWN if name in pairs), *(name for name in differing if name not in SHOWN)]:
        recorded, replayed = pairs[name]
        known = math.nan if recorded is None else float(recorded)
        table.add_row(
            Text(printable(name)),
            f"{known:.6g}",
            f"{replayed:.6g}",
            "" if _same(recorded, replayed) else f"{replayed - known:+.2g}",
        )
    table_console(min_width=60).print(table)


def _same(recorded: float | None, replayed: float) -> bool:
    """True for equal numbers; JSON lines have null for what is not finite."""
    return recorded == replayed or (recorded is None and not math.isfinite(replayed))


def _causes(recording: Recording, step: int) -> list[str]:
    """Likely causes of other weights with the same settings."""
    then = recording.steps[step].start.surroundings
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = replace(Surroundings.here(ranks=then.ranks, device=device), threads=then.threads)
    causes = [
        f"{name}: {was} then, {now} here"
        for name, was, now in zip(
            ("device", "processor", *then.versions),
            (then.device, then.cpu, *then.versions.values()),
            (here.device, here.cpu, *(here.versions.get(name, "none") for name in then.versions)),
            strict=True,
        )
        if was != now
    ]
    if here.device != "cpu":
        causes.append("kernels of a GPU may add up in another order each time")
    return causes or [
        "device, processor, threads and versions are those of the run; is the code of the learner, or of a plug-in, "
        "another one?"
    ]
