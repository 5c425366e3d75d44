"""One group as tables: its facts, its history, its answers."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.reader import GroupRecord
from slipstream.buffer.wire.codec import decode_group
from slipstream.buffer.wire.messages import Group, Trajectory
from slipstream.tools.ledger.words import printable, titled, utc


def group_tables(record: GroupRecord, *, seed: int, train_tasks: int | None) -> list[RenderableType]:
    """All that the ledger remembers of the group.

    Raises: FrameError when its bytes are no group.
    """
    state = record.state or "an evaluation, of which only the answers are kept"
    facts = _facts(record, seed=seed, train_tasks=train_tasks)
    tables: list[RenderableType] = [titled(f"group {record.id}: {state}", facts)]
    if record.history:
        tables.append(titled("history", _history(record)))
    if record.blob is not None:
        group = decode_group(record.blob)
        missing = f", {group.missing} were not finished in time" if group.missing else ""
        title = f"{len(group.trajectories)} answers to task {' '.join(map(str, group.indices))}{missing}"
        tables.append(titled(title, _answers(group)))
    return tables


def _facts(record: GroupRecord, *, seed: int, train_tasks: int | None) -> Table:
    table = Table(show_header=False, border_style="cyan")
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in _rows(record, seed=seed, train_tasks=train_tasks).items():
        if words:
            table.add_row(name, Text(printable(words)))
    return table


def _rows(record: GroupRecord, *, seed: int, train_tasks: int | None) -> dict[str, str]:
    """What there is to say, by name; empty where there is nothing."""
    oldest, version, failures = record.number("oldest"), record.number("version"), record.number("failures")
    # From 64 on the ledger keeps the shortest length of a bucket (lengths.py).
    lengths = ", ".join(f"{n} of {tokens}{'+' if tokens >= 64 else ''}" for tokens, n in sorted(record.lengths.items()))
    steps = ", ".join(map(str, record.steps))
    return {
        "task": _task(record, seed=seed, train_tasks=train_tasks),
        "server": record.about.get("server", ""),
        "policy version": ""
        if version is None
        else f"{version} when it was issued" + ("" if oldest is None else f", {oldest} the oldest of its tokens"),
        "answers": f"{lengths} tokens" if lengths else "",
        "trained in": f"step {steps}" if len(record.steps) == 1 else f"steps {steps}" if steps else "",
        "delivered in vain": f"{failures} times" if failures else "",
        "exported": "yes" if "exported" in record.about else "",
    }


def _task(record: GroupRecord, *, seed: int, train_tasks: int | None) -> str:
    epoch, position = record.number("epoch"), record.number("position")
    if epoch is None or position is None:
        return ""
    words = f"epoch {epoch}, position {position}"
    if train_tasks is None or not 0 <= position < train_tasks:
        return words
    return f"{words}: index {task_order(train_tasks, seed=seed, epoch=epoch)[position]}"


def _history(record: GroupRecord) -> Table:
    table = Table(border_style="cyan")
    table.add_column("time", no_wrap=True)
    table.add_column("since issue", justify="right", no_wrap=True)
    table.add_column("state", style="bold cyan", no_wrap=True)
    table.add_column("", overflow="fold")  # a server is named for its host, whose name may be long
    start = record.history[0].at
    for event in record.history:
        table.add_row(utc(event.at), f"{event.at - start:+.3f} s", event.state, Text(printable(event.detail)))
    return table


def _answers(group: Group) -> Table:
    table = Table(border_style="cyan")
    for name in ("reward", "tokens", "finished by", "versions of its tokens", "scores"):
        table.add_column(name, justify="right" if name in ("reward", "tokens") else "left")
    for trajectory in group.trajectories:
        table.add_row(
            f"{trajectory.reward:.4g}",
            f"{sum(span.end - span.start for span in trajectory.spans):,}",
            Text(printable(trajectory.finish_reason)),
            _spans(trajectory),
            Text(printable(", ".join(f"{name} {score:.4g}" for name, score in trajectory.scores.items()))),
        )
    return table


def _spans(trajectory: Trajectory) -> str:
    return ", ".join(f"{span.version}: {span.start} to {span.end - 1}" for span in trajectory.spans)
