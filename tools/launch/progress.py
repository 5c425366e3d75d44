"""What is known of a run, as a table for terminals and as a line for logs. Pure: no clock, no files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.configs import RunConfig
from slipstream.tools.follow import number

NEARLY_EQUAL = 0.05
"""Idle fractions closer than this count as balanced."""
HARDLY_ANY = 0.01
MISSING = "-"
LONGEST_WORD = 300
"""Characters; the process's log has all."""
TROUBLE_S = 60.0
"""So long a warning is shown, and longer until there is a step again."""
QUIET_S = 10.0
"""Without a step for so long, and for three times as long as the last one took, who waited in that one is old news."""
FINISHING = "last evaluation, checkpoint and export"
ROLLOUT = "rollout"
"""The rollout server that `slipstream up` started; there may be others."""
JOINED = "joined the buffer"
"""A rollout server says so once its engine runs."""
TROUBLE_LEVELS = ("warning", "error", "critical")
UNSAID = ("event", "level", "timestamp", "exception")
"""Fields of a log record that say nothing of what went wrong."""


@dataclass(frozen=True)
class Progress:
    """What is known of a run."""

    run: str
    steps: int
    max_staleness: int
    eval_name: str | None
    """The reward that is evaluated; None: the one that is trained on."""
    elapsed_s: float = 0.0
    stage: str = "starting"
    """What goes on before the first step."""
    words: Mapping[str, str] = field(default_factory=dict)
    """The latest log message of each process."""
    troubles: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """The latest warning or error of each process, and when it was heard, in seconds of `elapsed_s`."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """How often each message came that tells of a task that failed."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """The latest record of kind `step`, empty before the first."""
    step_at_s: float = 0.0
    """When that came."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """The latest record of kind `eval`."""

    @classmethod
    def of(cls, config: RunConfig) -> "Progress":
        """The state before anything happened."""
        return cls(config.run.name, config.learner.steps, config.buffer.max_staleness, config.eval.reward)

    @property
    def finishing(self) -> bool:
        """Whether all steps are done."""
        return self.steps_done >= self.steps

    @property
    def steps_done(self) -> int:
        """Steps that the learner has reported."""
        return int(self.step.get("step", 0))


def observe(progress: Progress, record: Mapping[str, Any]) -> Progress:
    """The state after one more metrics record."""
    if record.get("kind") == "step":
        now_s = progress.elapsed_s
        troubles = {name: (at_s, word) for name, (at_s, word) in progress.troubles.items() if now_s - at_s < TROUBLE_S}
        return replace(progress, step=_with_rate(record), step_at_s=now_s, troubles=troubles, stage="training")
    if record.get("kind") == "eval":
        return replace(progress, evaluation=record)
    return progress


def heard(progress: Progress, name: str, record: Mapping[str, Any]) -> Progress:
    """The state after one more log record of a process; of what went wrong it tells why."""
    if record.get("event") == JOINED and not progress.step:
        progress = replace(progress, stage="generating the first groups")
    word, is_trouble = str(record.get("event", "")), record.get("level") in TROUBLE_LEVELS
    if word == "group failed":  # the buffer repeats what the rollout server has said
        return progress
    if "detail" in record:
        progress = replace(progress, failed={**progress.failed, word: progress.failed.get(word, 0) + 1})
        word += f", {progress.failed[word]:,} so far; the last: {record.get('reason')}: {record['detail']}"
    elif is_trouble:
        itself = "server" if name == ROLLOUT else ""  # others name one of several
        word += _said({key: value for key, value in record.items() if key not in (*UNSAID, itself)})
    # What a plug-in raised may hold anything, and terminals obey what they get.
    word = "".join(letter if letter.isprintable() else " " for letter in word[:LONGEST_WORD])
    if is_trouble:
        progress = replace(progress, troubles={**progress.troubles, name: (progress.elapsed_s, word)})
    return replace(progress, words={**progress.words, name: word})


def _said(words: Mapping[str, Any]) -> str:
    said = "; ".join(f"{name}: {word}" for name, word in words.items())
    return f" ({said})" if said else ""


def _with_rate(step: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with the rate of trained tokens, which follows from the step's figures if it isn't told."""
    tokens, seconds = number(step, "tokens"), number(step, "step_s")
    return {"tokens_trained_per_s": tokens / seconds, **step} if tokens and seconds else step


def who_waits(step: Mapping[str, Any]) -> str:
    """In words, which side of the pipeline is the slower one."""
    learner, generator = number(step, "learner_idle_fraction"), number(step, "generator_idle_fraction")
    if learner is None or generator is None:
        return ""
    if abs(learner - generator) < NEARLY_EQUAL:
        return "balanced"
    return "learner waits for groups" if learner > generator else "generator waits for tickets"


def _goes_on(progress: Progress) -> str:
    """In words, what the run does at present."""
    if progress.finishing:
        return FINISHING
    quiet_s = progress.elapsed_s - progress.step_at_s
    if quiet_s > max(QUIET_S, 3 * (number(progress.step, "step_s") or 0.0)):
        return f"no step for {quiet_s:.0f} s"
    return who_waits(progress.step)


def table(progress: Progress) -> RenderableType:
    """The live view."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold cyan", no_wrap=True)
    rows.add_column()
    body = _training_rows(progress) if progress.step else _starting_rows(progress)
    for name, content in body:
        rows.add_row(name, content)
    title = f"[bold]slipstream[/] · {progress.run} · {_duration(progress.elapsed_s)}"
    return Panel(rows, title=title, title_align="left", border_style="cyan", width=92)


def line(progress: Progress) -> str:
    """The plain view: one line."""
    head = f"{progress.elapsed_s:7.1f} s  "
    if not progress.step:
        return head + progress.stage + _said(progress.words)
    step = progress.step
    parts = [
        f"step {progress.steps_done}/{progress.steps}",
        f"reward {_show(step, 'reward', '.3f')}",
        _evaluated(progress),
        f"staleness {_show(step, 'staleness_mean', '.2f')} (max {_show(step, 'staleness_max', '.0f')})",
        f"{_show(step, 'step_s', '.3f')} s/step",
        f"idle: learner {_show(step, 'learner_idle_fraction', '.0%')}, "
        f"generator {_show(step, 'generator_idle_fraction', '.0%')}",
        _filtered(step),
        _goes_on(progress),
    ]
    return head + "  ".join(part for part in parts if part) + _said(_troubles(progress))


def _troubles(progress: Progress) -> dict[str, str]:
    return {name: word for name, (_, word) in progress.troubles.items()}


def _starting_rows(progress: Progress) -> list[tuple[str, RenderableType]]:
    # Text, because a log message or an address may hold square brackets, which rich would take for styles.
    said = [(name, Text(word)) for name, word in progress.words.items()]
    return [("stage", Text(f"{progress.stage} …", style="yellow")), *said]


def _training_rows(progress: Progress) -> list[tuple[str, RenderableType]]:
    step = progress.step
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=progress.steps, completed=progress.steps_done, width=34),
        f"[bold]{progress.steps_done}[/] of {progress.steps}   policy version {_show(step, 'policy_version', '.0f')}",
    )
    return [
        ("step", bar),
        ("reward", f"[bold]{_show(step, 'reward', '.3f')}[/]   {_evaluated(progress)}"),
        (
            "staleness",
            f"mean {_show(step, 'staleness_mean', '.2f')}   max {_show(step, 'staleness_max', '.0f')}"
            f"   (limit {progress.max_staleness}{_throttled(progress)})",
        ),
        (
            "groups",
            f"in flight {_show(step, 'buffer/in_flight', '.0f')}   "
            f"ready {_show(step, 'buffer/ready', '.0f')}   "
            f"leased {_show(step, 'buffer/leased', '.0f')}   "
            f"trained {_show(step, 'buffer/trained', ',.0f')}   [magenta]{_filtered(step)}[/]",
        ),
        (
            "speed",
            f"{_show(step, 'step_s', '.3f')} s per step   tokens/s: "
            f"{_show(step, 'tokens_generated_per_s', ',.0f')} generated, "
            f"{_show(step, 'tokens_trained_per_s', ',.0f')} trained",
        ),
        (
            "idle",
            f"learner {_show(step, 'learner_idle_fraction', '.0%')}"
            f"   generator {_show(step, 'generator_idle_fraction', '.0%')}   [magenta]{_goes_on(progress)}[/]",
        ),
        (
            "weights",
            f"sync {_milliseconds(step, 'weight_sync_s')}   "
            f"generation stalled {_milliseconds(step, 'generation_stall_s')}",
        ),
        *((name, Text(word, style="yellow")) for name, word in _troubles(progress).items()),
    ]


def _evaluated(progress: Progress) -> str:
    """The evaluated score: of the training batch, if it is not the reward itself, and of the last evaluation."""
    parts, name = [], progress.eval_name
    if name is not None and (trained := number(progress.step, f"score/{name}")) is not None:
        parts.append(f"{name.replace('_', '-')} {trained:.3f}")
    score = number(progress.evaluation, "score")
    if score is not None:
        parts.append(f"greedy {score:.3f} (version {_show(progress.evaluation, 'policy_version', '.0f')})")
    return ", ".join(parts)


def _filtered(step: Mapping[str, Any]) -> str:
    """In words, the share of all groups so far that failed or that a filter dropped; empty if it is hardly one."""
    issued, filtered = number(step, "buffer/issued"), number(step, "buffer/filtered")
    return f"filtered {filtered / issued:.0%}" if issued and filtered and filtered / issued >= HARDLY_ANY else ""


def _throttled(progress: Progress) -> str:
    bound = number(progress.step, "throttle/max_staleness")
    return "" if bound is None or bound >= progress.max_staleness else f", throttled to {bound:.0f}"


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
