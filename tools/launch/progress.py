"""The progress of a run: its state, updated by log and metrics records, and its views as a table or a line."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.tools.follow import MISSING, number

T = TypeVar("T")
BALANCED_WITHIN = 0.05
"""Idle fractions closer than this count as balanced."""
MIN_FILTERED_SHARE = 0.01
MAX_MESSAGE_CHARS = 300
"""The log of the process has the whole message."""
WARNING_SHOWN_S = 60.0
"""A warning is shown for at least this long, and until the next step."""
STALLED_S = 10.0
"""Without a step for this long, and for three times the duration of the last one, the run counts as stalled."""
FINISHING = "last evaluation, checkpoint and export"
ENDED = ("finished", "failed", "stopped")
"""Stages of a run that goes on no longer."""
ROLLOUT = "rollout"
"""Beginning of the names of the rollout servers that `slipstream up` started; the run may have others."""
STAGES = {"joined the buffer": "generating the first groups", "training the first step": "training the first step"}
"""The stage that begins with an event of a process's log, before the first step is done."""
OF_EVERY_TRAINER = {
    "kind", "time_s", "step", "steps", "loss", "lr", "grad_norm", "skipped_updates", "tokens", "flops", "wait_s",
    "train_s", "step_s", "learner_idle_fraction", "tokens_trained_per_s", "mfu", "power_w", "gpus", "tokens_per_gpu_s",
    "cost_per_million_tokens", "rows", "terms", "epoch", "validation_s", "eval_s",
}  # fmt: skip
"""Numbers of a training without a buffer that are shown in places of their own, or not at all; the others are those of
its kind, such as an accuracy."""
MOST_OTHERS = 6
DROPPED = "rows_dropped/"
"""Prefix of the numbers of rows that are left out."""
WARNING_LEVELS = ("warning", "error", "critical")
HIDDEN_FIELDS = ("event", "event_kind", "level", "timestamp", "exception")
"""Fields of a log record that are not shown with a warning."""


# --- state ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The settings of a run that its views show."""

    run: str
    steps: int
    max_staleness: int
    eval_name: str | None
    """The reward that is evaluated; None: the one that is trained on."""
    is_rl: bool = True
    """False for a learner alone, which has a loss on rows instead of rewards, groups and weight updates."""


@dataclass(frozen=True)
class Progress:
    """The state of a run. Updated without a clock or files."""

    plan: Plan
    elapsed_s: float = 0.0
    stage: str = "starting"
    """Shown before the first step."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """The latest log message of each process."""
    warnings: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """The latest warning or error of each process, and its arrival on the scale of `elapsed_s`."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Number of failed tasks by log event."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """The latest record of kind `step`, empty before the first."""
    step_at_s: float = 0.0
    """Arrival of `step`."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """The latest record of kind `eval`."""

    @property
    def steps_done(self) -> int:
        """Steps that the learner has reported."""
        return int(self.step.get("step", 0))


def apply_metrics(progress: Progress, record: Mapping[str, Any]) -> Progress:
    """The state after one more metrics record."""
    if record.get("kind") == "step":
        now_s = progress.elapsed_s
        recent_s = now_s - WARNING_SHOWN_S
        warnings = {name: warning for name, warning in progress.warnings.items() if warning[0] > recent_s}
        return replace(progress, step=_with_rate(record), step_at_s=now_s, warnings=warnings, stage="training")
    if record.get("kind") == "eval":
        return replace(progress, evaluation=record)
    return progress


def apply_log(progress: Progress, process: str, record: Mapping[str, Any]) -> Progress:
    """The state after one more log record of a process; failures and warnings keep their reasons."""
    event, is_warning = str(record.get("event", "")), record.get("level") in WARNING_LEVELS
    if event == "group failed":  # the buffer's record of a failure that the rollout server has logged already
        return progress
    if event in STAGES and not progress.step:
        progress = replace(progress, stage=STAGES[event])
    message = event
    if "detail" in record:
        count = progress.failures.get(event, 0) + 1
        progress = replace(progress, failures={**progress.failures, event: count})
        message += f", {count:,} so far; the last: {record.get('reason')}: {record['detail']}"
    elif is_warning:
        own_name = (
            "server" if process.startswith(ROLLOUT) else ""
        )  # in other processes the field names one of several servers
        message += _in_parentheses({key: v for key, v in record.items() if key not in (*HIDDEN_FIELDS, own_name)})
    # The message of a plug-in's exception may hold control characters, which a terminal would obey.
    message = "".join(letter if letter.isprintable() else " " for letter in message[:MAX_MESSAGE_CHARS])
    if is_warning:
        progress = replace(progress, warnings={**progress.warnings, process: (progress.elapsed_s, message)})
    return replace(progress, messages={**progress.messages, process: message})


def _with_rate(step: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with the rate of trained tokens, computed if it lacks one."""
    tokens, seconds = number(step, "tokens"), number(step, "step_s")
    return {"tokens_trained_per_s": tokens / seconds, **step} if tokens and seconds else step


def bottleneck(step: Mapping[str, Any]) -> str:
    """The side of the pipeline that waits for the other; empty if unknown."""
    learner, generator = number(step, "learner_idle_fraction"), number(step, "generator_idle_fraction")
    if learner is None or generator is None:
        return ""
    if abs(learner - generator) < BALANCED_WITHIN:
        return "balanced"
    return "learner waits for groups" if learner > generator else "generator waits for tickets"


def _activity(progress: Progress) -> str:
    """The run's present activity."""
    if progress.stage in ENDED:
        return progress.stage
    if progress.steps_done >= progress.plan.steps:
        return FINISHING
    since_step_s = progress.elapsed_s - progress.step_at_s
    if since_step_s > max(STALLED_S, 3 * (number(progress.step, "step_s") or 0.0)):
        return f"no step for {since_step_s:.0f} s"
    return bottleneck(progress.step)


# --- views ------------------------------------------------------------------------------------------------------------


def table(progress: Progress) -> RenderableType:
    """The live view."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold cyan", no_wrap=True)
    rows.add_column()
    for name, content in _training_rows(progress) if progress.step else _starting_rows(progress):
        rows.add_row(name, content)
    title = f"[bold]slipstream[/] · {progress.plan.run} · {_duration(progress.elapsed_s)}"
    return Panel(rows, title=title, title_align="left", border_style="cyan", width=92)


def line(progress: Progress, shown: Progress | None = None) -> str:
    """The plain view: one line.

    Args:
        shown: the progress in the line before, whose messages and warnings are left out.
    """
    head = f"{progress.elapsed_s:7.1f} s  "
    if not progress.step:
        return head + progress.stage + _in_parentheses(_new(progress.messages, {} if shown is None else shown.messages))
    of_kind = _rl_parts(progress) if progress.plan.is_rl else _loss_parts(progress)
    parts = [f"step {progress.steps_done}/{progress.plan.steps}", *of_kind, _activity(progress)]
    return (
        head
        + "  ".join(part for part in parts if part)
        + _in_parentheses(
            _warnings(replace(progress, warnings=_new(progress.warnings, {} if shown is None else shown.warnings)))
        )
    )


def _rl_parts(progress: Progress) -> list[str]:
    step = progress.step
    return [
        f"reward {_show(step, 'reward', '.3f')}",
        _evaluated(progress),
        f"staleness {_show(step, 'staleness_mean', '.2f')} (max {_show(step, 'staleness_max', '.0f')})",
        f"{_show(step, 'step_s', '.3f')} s/step",
        f"idle: learner {_show(step, 'learner_idle_fraction', '.0%')}, "
        f"generator {_show(step, 'generator_idle_fraction', '.0%')}",
        _gpu_use(step),
        _filtered(step),
    ]


def _loss_parts(progress: Progress) -> list[str]:
    step = progress.step
    return [
        f"loss {_show(step, 'loss', '.4f')}",
        _validated(progress),
        _others(step),
        f"epoch {_show(step, 'epoch', '.2f')}",
        f"{_show(step, 'step_s', '.3f')} s/step",
        f"{_show(step, 'tokens_trained_per_s', ',.0f')} tokens/s",
        _gpu_use(step),
        _left_out(step),
    ]


def _validated(progress: Progress) -> str:
    """The last measurement on validation rows; empty without one."""
    if not progress.evaluation:
        return ""
    others = _others(progress.evaluation)
    return (
        f"validation {_show(progress.evaluation, 'loss', '.4f')} (step {_show(progress.evaluation, 'step', '.0f')}"
        f"{', ' if others else ''}{others})"
    )


def _others(record: Mapping[str, Any]) -> str:
    """The numbers that only this kind of training has."""
    names = [name for name in record if name not in OF_EVERY_TRAINER and not name.startswith(DROPPED)]
    return ", ".join(f"{name} {_show(record, name, '.3g')}" for name in names[:MOST_OTHERS])


def _left_out(step: Mapping[str, Any]) -> str:
    """The rows of the step that could not be used; empty if all could."""
    reasons = {name.removeprefix(DROPPED): step[name] for name in step if name.startswith(DROPPED)}
    return ", ".join(f"{rows:.0f} rows left out: {reason}" for reason, rows in reasons.items() if rows)


def _starting_rows(progress: Progress) -> list[tuple[str, RenderableType]]:
    # Text, because a log message or an address may hold square brackets, which rich would take for styles.
    messages = [(name, Text(message)) for name, message in progress.messages.items()]
    stage = progress.stage if progress.stage in ENDED else f"{progress.stage} …"
    return [("stage", Text(stage, style="yellow")), *messages]


def _training_rows(progress: Progress) -> list[tuple[str, RenderableType]]:
    rows = _rl_rows(progress) if progress.plan.is_rl else _loss_rows(progress)
    return [*rows, *((name, Text(message, style="yellow")) for name, message in _warnings(progress).items())]


def _bar(progress: Progress, note: str) -> RenderableType:
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=progress.plan.steps, completed=progress.steps_done, width=34),
        f"[bold]{progress.steps_done}[/] of {progress.plan.steps}   {note}",
    )
    return bar


def _loss_rows(progress: Progress) -> list[tuple[str, RenderableType]]:
    step = progress.step

    def show(key: str, spec: str) -> str:
        return _show(step, key, spec)

    others, left_out = _others(step), _left_out(step)
    return [
        ("step", _bar(progress, f"epoch {show('epoch', '.2f')}")),
        ("loss", f"[bold]{show('loss', '.4f')}[/]   {_validated(progress)}"),
        *([("others", Text(others))] if others else []),
        ("update", f"learning rate {show('lr', '.2e')}   norm of the gradient {show('grad_norm', '.3f')}"),
        ("rows", f"{show('rows', '.0f')}, {show('tokens', ',.0f')} tokens   [magenta]{left_out}[/]"),
        ("speed", f"{show('step_s', '.3f')} s per step   {show('tokens_trained_per_s', ',.0f')} tokens/s"),
        *_gpu_rows(step),
        ("idle", f"learner {show('learner_idle_fraction', '.0%')}   [magenta]{_activity(progress)}[/]"),
    ]


def _rl_rows(progress: Progress) -> list[tuple[str, RenderableType]]:
    step = progress.step

    def show(key: str, spec: str) -> str:
        return _show(step, key, spec)

    return [
        ("step", _bar(progress, f"policy version {show('policy_version', '.0f')}")),
        ("reward", f"[bold]{show('reward', '.3f')}[/] ± {show('reward_std', '.3f')}   {_evaluated(progress)}"),
        (
            "answers",
            f"{show('answer_tokens', '.0f')} tokens ({show('answer_tokens_min', '.0f')} to "
            f"{show('answer_tokens_max', '.0f')})   cut off {show('answers_cut_off', '.0%')}   "
            f"entropy {show('entropy', '.2f')}   without spread {show('groups_without_spread', '.0%')}",
        ),
        (
            "staleness",
            f"mean {show('staleness_mean', '.2f')}   max {show('staleness_max', '.0f')}"
            f"   (limit {progress.plan.max_staleness}{_throttled(progress)})",
        ),
        (
            "groups",
            f"in flight {show('buffer/in_flight', '.0f')}   ready {show('buffer/ready', '.0f')}   "
            f"leased {show('buffer/leased', '.0f')}   trained {show('buffer/trained', ',.0f')}   "
            f"[magenta]{_filtered(step)}[/]",
        ),
        (
            "speed",
            f"{show('step_s', '.3f')} s per step   tokens/s: {show('tokens_generated_per_s', ',.0f')} generated, "
            f"{show('tokens_trained_per_s', ',.0f')} trained",
        ),
        *_gpu_rows(step),
        (
            "idle",
            f"learner {show('learner_idle_fraction', '.0%')}   generator {show('generator_idle_fraction', '.0%')}   "
            f"[magenta]{_activity(progress)}[/]",
        ),
        (
            "weights",
            f"sync {_milliseconds(step, 'weight_sync_s')}   "
            f"generation stalled {_milliseconds(step, 'generation_stall_s')}",
        ),
    ]


def _gpu_rows(step: Mapping[str, Any]) -> list[tuple[str, RenderableType]]:
    use = _gpu_use(step)
    return [("GPUs", use)] if use else []


def _gpu_use(step: Mapping[str, Any]) -> str:
    """The use of the GPUs, as far as it is known; empty without one."""
    shown = (
        ("mfu", "MFU {:.0%}"),
        ("tokens_per_gpu_s", "{:,.0f} tokens/s per GPU"),
        ("power_w", "{:.0f} W"),
        ("cost_per_million_tokens", "{:.3g} per million tokens"),
    )
    values = ((template, number(step, key)) for key, template in shown)
    return ", ".join(template.format(value) for template, value in values if value is not None)


def _warnings(progress: Progress) -> dict[str, str]:
    return {name: message for name, (_, message) in progress.warnings.items()}


def _new(after: Mapping[str, T], before: Mapping[str, T]) -> dict[str, T]:
    """Entries of `after` that `before` does not have."""
    return {name: value for name, value in after.items() if before.get(name) != value}


def _evaluated(progress: Progress) -> str:
    """The evaluated score: of the training batch, if it is not the reward itself, and of the last evaluation."""
    parts, name = [], progress.plan.eval_name
    if name is not None and (trained := number(progress.step, f"score/{name}")) is not None:
        parts.append(f"{name.replace('_', '-')} {trained:.3f}")
    evaluation = progress.evaluation
    if evaluation:
        coverage = number(evaluation, "coverage")
        partly = ""
        if coverage is not None and coverage < 1:
            partly = f", {coverage:.0%} answered; failed ones as 0: {_show(evaluation, 'lower_bound', '.3f')}"
        name = "mean@k" if "pass_at_k" in evaluation else "greedy"
        best = f", pass@k {_show(evaluation, 'pass_at_k', '.3f')}" if "pass_at_k" in evaluation else ""
        parts.append(
            f"{name} {_show(evaluation, 'score', '.3f')}{best} "
            f"(version {_show(evaluation, 'policy_version', '.0f')}{partly})"
        )
    return ", ".join(parts)


def _filtered(step: Mapping[str, Any]) -> str:
    """The share of all groups that failed or were filtered; empty below `MIN_FILTERED_SHARE`."""
    issued, filtered = number(step, "buffer/issued"), number(step, "buffer/filtered")
    share = filtered / issued if issued and filtered else 0.0
    return f"filtered {share:.0%}" if share >= MIN_FILTERED_SHARE else ""


def _throttled(progress: Progress) -> str:
    bound = number(progress.step, "throttle/max_staleness")
    return "" if bound is None or bound >= progress.plan.max_staleness else f", throttled to {bound:.0f}"


def _in_parentheses(values: Mapping[str, Any]) -> str:
    joined = "; ".join(f"{name}: {value}" for name, value in values.items())
    return f" ({joined})" if joined else ""


def _show(record: Mapping[str, Any], key: str, spec: str) -> str:
    value = number(record, key)
    return MISSING if value is None else format(value, spec)


def _milliseconds(record: Mapping[str, Any], key: str) -> str:
    value = number(record, key)
    return MISSING if value is None else f"{1000 * value:.0f} ms"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
