"""`slipstream bisect`: the groups and answers whose removal restores a metric, found by replays of the steps before."""

import argparse
import math
import signal
import statistics
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.logging import configure_logging
from slipstream.learner.models.optim import DivergedError
from slipstream.learner.trainers.rl.replay import Answer, NothingLeftError
from slipstream.tools.cli import at_least, printable
from slipstream.tools.follow import json_text
from slipstream.tools.ledger.open import RUN_HELP
from slipstream.tools.rewind.recording import Recording
from slipstream.tools.rewind.replay import replay
from slipstream.tools.rewind.search import most_tests, smallest
from slipstream.tools.rewind.series import Condition, Jump, RunMetrics, Series, crossing, jump, read_metrics
from slipstream.tools.rewind.suspects import Suspect, print_suspects, suspect_json

POLICY_METRICS: Final = ("grad_norm", "kl_k3", "kl_k1", "entropy", "ess", "loss", "clip_fraction", "value_loss")
"""Metrics that a replay changes, besides which groups a step has."""
OF_ANSWERS: Final = (
    "reward", "score/", "answer_tokens", "answers_cut_off", "ended/", "groups_without_spread", "staleness_",
    "trajectories_per_episode",
)  # fmt: skip
"""Beginnings of the names of metrics that the recorded answers alone determine."""
REMEMBERED: Final = 20
"""Steps before the crossing that show the metric's usual value."""
RESTORED: Final = 0.5
"""Share of the way back to the usual value from which a metric counts as restored."""
MOST_GROUPS: Final = 4
"""Larger sets of groups are not called a cause."""
CONTROLS: Final = 5
"""Other groups that are left out alone, to show that the cause is no other group as well."""
SUFFICE: Final = 0.9
"""Share of their group's effect from which some answers count as its cause."""
SURROUNDINGS: Final = ("staleness_mean", "staleness_max", "mismatch_abs", "truncated_fraction", "masked_fraction", "lr")
"""Metrics whose jumps are printed beside the verdict."""
JUMP: Final = 6.0
"""Standard deviations from which a metric's value is called a jump."""


@dataclass(frozen=True)
class Question:
    """A metric that broke, and the steps that are replayed to find out why."""

    metric: str
    condition: Condition
    step: int
    """First step of the broken metric."""
    confirm: int
    """Steps from there over which it is measured."""
    first: int
    """First step whose groups are candidates."""
    usual: float
    """Median of the metric in the steps before."""
    instead_of: str = ""
    """The metric that was asked for, if it is one that replays can't change."""

    @property
    def last(self) -> int:
        """Last step of the replays."""
        return self.step + self.confirm - 1


@dataclass(frozen=True)
class Verdict:
    """The result, also of an interrupted search.

    Attributes:
        suspects: groups of the smallest set whose removal restores the metric, that with the largest effect first.
        controls: other groups of the same steps, each left out alone.
        lr_effect: share that a tenth of the learning rate restores; None where it was not tried.
        remarks: what else was unusual in these steps.
    """

    suspects: Sequence[Suspect]
    controls: Sequence[Suspect]
    lr_effect: float | None
    remarks: Sequence[str]
    text: str


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream bisect`; returns 0, and 130 if it was interrupted.

    Raises: ConfigError when there is no such run or metric, SlipstreamError when its steps can't be replayed.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream bisect",
        description="Find the groups, and answers in them, that broke a metric: the steps before are replayed without "
        "a half of the groups, a half of that half, and so on. Nothing is generated, the run's folder is not changed.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--metric", required=True, metavar="NAME", help="a metric of metrics.jsonl, such as entropy")
    bound = parser.add_mutually_exclusive_group(required=True)
    bound.add_argument("--below", type=float, metavar="X", help="it is broken below X")
    bound.add_argument("--above", type=float, metavar="X", help="it is broken above X")
    bound.add_argument("--nan", action="store_true", help="it is broken where it is not finite")
    parser.add_argument(
        "--confirm", type=at_least(1), default=3, metavar="N", help="steps in a row that must be broken; default: 3"
    )
    parser.add_argument(
        "--step", type=at_least(1), metavar="N", help="the first broken step, instead of a search for it"
    )
    parser.add_argument(
        "--window", type=at_least(1), default=10, metavar="N",
        help="steps up to the broken one whose groups are candidates; default: 10",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON object, and the progress to stderr")
    arguments = parser.parse_args(argv)
    configure_logging("slipstream", level="warning", folder=None)
    with Recording.open(arguments.run) as recording:
        metrics = read_metrics(recording.folder)
        question = ask(recording, metrics, arguments)
        search = Search(recording, metrics, question, quiet=arguments.json)
        try:
            code, verdict = 0, search.run()
        except KeyboardInterrupt:
            code, verdict = 128 + signal.SIGINT, search.interrupted()
        if arguments.json:
            print(json_text(_as_json(question, verdict, search)))
        else:
            print_suspects(recording, verdict.suspects, verdict.controls)
            for line in (*verdict.remarks, verdict.text):
                print(printable(line))
    return code


def ask(recording: Recording, metrics: RunMetrics, arguments: argparse.Namespace) -> Question:
    """The question of a command line.

    Raises: ConfigError when there is no such metric, SlipstreamError when it is not broken.
    """
    condition = Condition(below=arguments.below, above=arguments.above)
    name: str = arguments.metric
    series = metrics.series(name)
    if not series:
        known = ", ".join(metrics.names())
        raise ConfigError(f"--metric {name}: no step of {recording.folder.root} has it; known: {known}")
    step, confirm = arguments.step, arguments.confirm
    if step is None:
        step = crossing(series, condition, confirm=confirm)
        if step is None:
            raise SlipstreamError(_never(series, condition, name, confirm))
    elif step not in recording.steps:
        raise SlipstreamError(f"--step {step} is not recorded: {min(recording.steps)} to {max(recording.steps)} are")
    last = min(step + confirm - 1, max(recording.steps))
    first = max(step - arguments.window + 1, min(recording.steps))
    if name.startswith(OF_ANSWERS):
        return _of_policy(metrics, name, first, step)
    return Question(name, condition, step, last - step + 1, first, _usual(series, condition, step, name))


def _never(series: Series, condition: Condition, name: str, confirm: int) -> str:
    broken = [step for step in sorted(series) if condition.holds(series[step])]
    if not broken:
        finite = [value for value in series.values() if math.isfinite(value)]
        return f"{name} is never {condition}: it goes from {min(finite):.4g} to {max(finite):.4g}"
    shown = ", ".join(map(str, broken[:5]))
    return (
        f"{name} is {condition} at {len(broken)} steps ({shown}, …), never at {confirm} in a row; see --confirm, --step"
    )


def _usual(series: Series, condition: Condition, step: int, name: str) -> float:
    """The median of the unbroken values before a step. Raises: SlipstreamError when there are none."""
    before = [series[one] for one in sorted(series) if one < step and not condition.holds(series[one])][-REMEMBERED:]
    if not before:
        raise SlipstreamError(f"{name} has no unbroken value before step {step}: there is nothing to restore it to")
    return statistics.median(before)


def _of_policy(metrics: RunMetrics, name: str, first: int, step: int) -> Question:
    """The question of the policy's metric that jumped most, in place of one that the answers determine.

    Raises: SlipstreamError when none jumped.
    """
    jumps = _jumps(metrics, POLICY_METRICS, first, step)
    if not jumps:
        raise SlipstreamError(
            f"{name} depends on the recorded answers, which a replay does not generate anew, and no metric of the "
            f"policy ({', '.join(POLICY_METRICS)}) jumped in the steps {first} to {step}; --window looks further back"
        )
    own, found = max(jumps, key=lambda one: one[1].deviations)
    middle = (found.usual + found.value) / 2
    down = found.value < found.usual
    condition = Condition(below=middle) if down else Condition(above=middle if math.isfinite(middle) else None)
    return Question(own, condition, found.step, 1, min(first, found.step), found.usual, instead_of=name)


def _jumps(metrics: RunMetrics, names: Sequence[str], first: int, last: int) -> list[tuple[str, Jump]]:
    jumps = [(name, jump(metrics.series(name), first, last)) for name in names]
    return [(name, found) for name, found in jumps if found is not None and found.deviations >= JUMP]


@dataclass
class Search:
    """Replays of a question, each done once."""

    recording: Recording
    metrics: RunMetrics
    question: Question
    quiet: bool
    """The progress goes to stderr."""
    replays: int = 0
    _values: dict[frozenset[Answer], float] = field(default_factory=dict)
    """The metric by what was left out."""

    def run(self) -> Verdict:
        """Searches groups, then answers in the one that is found."""
        question = self.question
        self._say(self._plan())
        if not question.condition.holds(self._broken):
            return Verdict(
                [], [], None, (), f"the replay does not reproduce it: {self._named} is {self._broken:.4g} there"
            )
        if len(self._candidates) == len(set(self._step_of.values())):
            return self._without_group(
                (),
                "bisect can't look for a group: each step has only one (learner.groups_per_step), and a step without "
                "any can't be replayed",
            )
        steps = f"no single group of the steps {question.first} to {question.step} is the cause"
        found = smallest(self._candidates, self._restores, most=MOST_GROUPS)
        if found is None:
            return self._without_group((), f"{steps}: no {MOST_GROUPS} groups restore it")
        suspects = sorted(map(self._suspect, found), key=lambda suspect: -suspect.effect)
        controls = [self._suspect(one) for one in self._controls(found)]
        others = [one for one in self._candidates if one not in found]
        halves = (frozenset(others[: len(others) // 2]), frozenset(others[len(others) // 2 :]))
        # Where training is unstable, any change restores some of it: a group then is no cause.
        if any(control.effect >= RESTORED / 2 for control in controls) or any(
            self._effect(half) >= RESTORED / 2 for half in halves if half
        ):
            return self._without_group(controls, f"{steps}: leaving out others restores it as well")
        if len(suspects) == 1:
            suspects = [self._narrowed(suspects[0])]
        suspects = [replace(one, ratio=self._ratio(one)) for one in suspects]
        names = ", ".join(f"{one.group_id} (step {one.step})" for one in suspects)
        what = f"group {names} is" if len(suspects) == 1 else f"groups {names} together are"
        share = f"without {'it' if len(suspects) == 1 else 'them'} {self._percent(self._effect(found))} of the way back"
        most = f"; without any of {len(controls)} others at most {max(control.effect for control in controls):.0%}"
        text = f"{what} the cause: {share}" + (most if controls else "")
        return Verdict(suspects, controls, None, self._remarks(), text)

    def interrupted(self) -> Verdict:
        """The verdict so far: the smallest set whose removal restored the metric."""
        restoring = [left_out for left_out, value in self._values.items() if self._is_restored(value)]
        text = f"interrupted after {self.replays} replays: "
        if not restoring:
            return Verdict([], [], None, (), text + "nothing is known yet")
        best = sorted({group_id for group_id, _ in min(restoring, key=len)})
        shown = ", ".join(best[:20]) + (", …" if len(best) > 20 else "")
        return Verdict([], [], None, (), f"{text}without these {len(best)} groups it is restored: {shown}")

    def _narrowed(self, suspect: Suspect) -> Suspect:
        """The group with those of its answers that suffice, if fewer than all do."""
        answers: list[Answer] = [(suspect.group_id, index) for index in range(suspect.size)]

        def suffices(left_out: frozenset[Answer]) -> bool:
            return self._restores(left_out) and self._effect(left_out) >= SUFFICE * suspect.effect

        found = smallest(answers, suffices, most=max(1, suspect.size // 2)) if suspect.size > 1 else None
        if found is None:
            return suspect
        chosen = tuple(sorted(index for _, index in found if index is not None))
        return replace(suspect, answers=chosen, effect=self._effect(found))

    def _without_group(self, controls: Sequence[Suspect], why: str) -> Verdict:
        """The verdict where no small set of groups is named, with a replay at a lower learning rate."""
        lr = self.recording.config(self.question.first).learner.optimizer.lr
        value = self._value(frozenset(), (f"learner.optimizer.lr={lr / 10!r}",))
        effect = self._share(value)
        does = "restores it" if self._is_restored(value) else "does not restore it"
        text = f"{why}. A tenth of the learning rate ({lr / 10:g}) {does}, {self._percent(effect)} of the way back"
        if self._is_restored(value):
            text += ": the likely cause"
        return Verdict([], controls, effect, self._remarks(), text)

    def _remarks(self) -> list[str]:
        """Metrics of staleness and mismatch that jumped in these steps."""
        question = self.question
        return [
            f"{name} jumped at step {found.step}: {found.usual:.4g} before, {found.value:.4g} there"
            for name, found in _jumps(self.metrics, SURROUNDINGS, question.first, question.step)
            if not abs(found.value - found.usual) < abs(found.usual)
        ]

    # --- candidates ---------------------------------------------------------------------------------------------------

    @cached_property
    def _step_of(self) -> dict[str, int]:
        steps = range(self.question.first, self.question.step + 1)
        return {group_id: step for step in steps for group_id in self.recording.steps[step].record.groups}

    @cached_property
    def _candidates(self) -> list[Answer]:
        """Groups ordered by their place in their step: each half of them leaves something in every step."""
        steps = range(self.question.first, self.question.step + 1)
        places = zip_longest(*(self.recording.steps[step].record.groups for step in steps))
        return [(group_id, None) for place in places for group_id in place if group_id is not None]

    def _controls(self, found: Set[Answer]) -> list[Answer]:
        """Other groups, of the same steps first."""
        steps = {self._step_of[group_id] for group_id, _ in found}
        others = [one for one in self._candidates if one not in found]
        return sorted(others, key=lambda one: self._step_of[one[0]] not in steps)[:CONTROLS]

    def _suspect(self, one: Answer) -> Suspect:
        step, effect = self._step_of[one[0]], self._effect(frozenset({one}))
        staleness = self.recording.steps[step].record.lease.staleness_of
        return Suspect(one[0], step, (), effect, self.recording.group(one[0]), staleness)

    # --- replays ------------------------------------------------------------------------------------------------------

    @cached_property
    def _broken(self) -> float:
        """The metric in a replay that leaves nothing out."""
        return self._value(frozenset())

    def _restores(self, left_out: frozenset[Answer]) -> bool:
        return self._is_restored(self._value_without(left_out))

    def _is_restored(self, value: float) -> bool:
        return self._share(value) >= RESTORED and not self.question.condition.holds(value)

    def _effect(self, left_out: frozenset[Answer]) -> float:
        """Share of the way back to the usual value without these."""
        return self._share(self._value_without(left_out))

    def _value_without(self, left_out: frozenset[Answer]) -> float:
        if left_out not in self._values:
            self._values[left_out] = self._value(left_out)
        return self._values[left_out]

    def _share(self, value: float) -> float:
        question, broken = self.question, self._broken
        if not math.isfinite(value):
            return 0.0
        if not math.isfinite(broken):
            return 0.0 if question.condition.holds(value) else 1.0
        return (value - broken) / (question.usual - broken)

    def _value(self, left_out: frozenset[Answer], overrides: Sequence[str] = ()) -> float:
        """Mean of the metric over the steps that are measured; NaN where training diverges, or a step has no groups."""
        question = self.question
        try:
            done = replay(self.recording, question.first, question.last, overrides=overrides, leave_out=left_out)
        except (DivergedError, NothingLeftError):
            done = []
        values = [step.metrics.get(question.metric, math.nan) for step in done if step.step >= question.step]
        value = statistics.fmean(values) if len(values) == question.confirm else math.nan
        self.replays += 1
        what = f"without {_counted(left_out)}" if left_out else " ".join(overrides) or "as recorded"
        share = f", {self._percent(self._share(value))} of the way back" if left_out or overrides else ""
        self._say(f"replay {self.replays}: {what}: {question.metric} {value:.4g}{share}")
        return value

    def _ratio(self, suspect: Suspect) -> float:
        """Mean π_θ/μ of the group's actions, by a replay of its step without the others; NaN where that diverges."""
        groups = self.recording.steps[suspect.step].record.groups
        others = frozenset((group_id, None) for group_id in groups if group_id != suspect.group_id)
        self.replays += 1
        try:
            (step,) = replay(self.recording, suspect.step, suspect.step, leave_out=others)
        except DivergedError:
            return math.nan
        return step.metrics.get("weight_mean", math.nan)

    # --- text ---------------------------------------------------------------------------------------------------------

    def _plan(self) -> str:
        question = self.question
        steps, size = question.last - question.first + 1, self.recording.config(question.first).rollout.group_size
        each_s = statistics.fmean(self.metrics.series("train_s").values() or [0.0]) * steps
        span = f"step {question.step}" if question.confirm == 1 else f"the steps {question.step} to {question.last}"
        lines = [
            f"{question.instead_of} depends on the recorded answers, which a replay does not generate anew: "
            f"{question.metric}, which jumped most before it, is looked at instead"
            if question.instead_of
            else "",
            f"{self._named} at {span}; in the steps before it was {question.usual:.4g}",
            f"candidates: {len(self._candidates)} groups of the steps {question.first} to {question.step}; about "
            f"{most_tests(len(self._candidates)) + CONTROLS + most_tests(size)} replays of {steps} steps at most"
            + (f", of about {each_s:.1f} s each" if each_s else ""),
        ]
        return "\n".join(line for line in lines if line)

    @property
    def _named(self) -> str:
        return f"{self.question.metric} is {self.question.condition}"

    @staticmethod
    def _percent(share: float) -> str:
        return f"{max(-9.99, min(share, 9.99)):.0%}"

    def _say(self, text: str) -> None:
        for line in text.split("\n"):
            print(printable(line), file=sys.stderr if self.quiet else sys.stdout, flush=True)


def _counted(left_out: Set[Answer]) -> str:
    groups, answers = {name for name, _ in left_out}, sum(index is not None for _, index in left_out)
    if answers:
        return f"{answers} answers of group {', '.join(sorted(groups))}"
    return f"{len(groups)} groups" if len(groups) > 1 else f"group {', '.join(groups)}"


def _as_json(question: Question, verdict: Verdict, search: Search) -> dict[str, Any]:
    return {
        "metric": question.metric,
        "instead_of": question.instead_of or None,
        "condition": str(question.condition),
        "step": question.step,
        "confirm": question.confirm,
        "first": question.first,
        "usual": question.usual,
        "replays": search.replays,
        "groups": [suspect_json(suspect) for suspect in verdict.suspects],
        "others": [suspect_json(control) for control in verdict.controls],
        "lr_effect": verdict.lr_effect,
        "remarks": list(verdict.remarks),
        "verdict": verdict.text,
    }
