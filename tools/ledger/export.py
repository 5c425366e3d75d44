"""`slipstream ledger export`: a run's groups as a parquet file, one row for each answer."""

import argparse
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.store.reader import STORED, GroupRecord, LedgerReader
from slipstream.buffer.wire.codec import FrameError, action_mask, behaviour_logprobs, decode_group, token_ids
from slipstream.buffer.wire.messages import Group, Trajectory
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.models.folder import Decode
from slipstream.tools.cli import new_file
from slipstream.tools.ledger.open import RUN_HELP, OpenLedger, with_ledger
from slipstream.tools.transcript import decoder_or_reason

DURABLE = "durable"
GROUPS_PER_READ = 16
ROW_GROUP_TOKENS = 1 << 21
"""A row group is written at this size, about 20 MB in memory, so that any number of groups fits."""
ROW_GROUP_ROWS = 1 << 16

SCALAR_COLUMNS = {
    "group_id": "string",
    "task": "int64",
    "epoch": "int64",
    "steps": "list<int64>",
    "answer": "int64",
    "reward": "float64",
    "finish_reason": "string",
    "oldest_version": "int64",
    "newest_version": "int64",
}
"""Type by column; the columns of the scores follow."""
LIST_COLUMNS = {
    "prompt_token_ids": "int32",
    "answer_token_ids": "int32",
    "answer_logprobs": "float32",
    "answer_action_mask": "uint8",
}
"""Item type by column."""
TEXT_COLUMNS = ("prompt_text", "answer_text")
"""Decoded tokens, special ones included; only where the run's tokenizer is at hand."""


@dataclass(frozen=True)
class Selection:
    """The groups to write, and the file."""

    file: Path
    state: str
    new: bool
    """Only groups that were not exported before."""
    trim: bool
    """Delete them from the ledger afterwards."""


@dataclass
class Written:
    """Contents of the file."""

    ids: list[str] = field(default_factory=list)
    answers: int = 0
    gone: int = 0
    """Number of groups that left the state while the file was written."""
    unreadable: list[str] = field(default_factory=list)
    """Groups whose bytes can't be read from their spill files: an error each."""


class NewScores(Exception):
    """An answer has scores without a column; `names` are the missing ones."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        super().__init__(", ".join(sorted(names)))


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger export`; returns 0.

    Raises: ConfigError when there is no such run or the file exists, SlipstreamError when there is nothing to write,
    pyarrow is missing, or the ledger can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream ledger export",
        description="Write a run's groups to a parquet file, one row for each answer. In a running run, durable "
        "groups are then marked as exported, which buffer.retention.keep_until_exported waits for.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--out", required=True, type=new_file, metavar="FILE", help="parquet file, which must not exist yet"
    )
    parser.add_argument("--state", choices=STORED, default=DURABLE, help=f"groups in this state; default: {DURABLE}")
    parser.add_argument("--new", action="store_true", help="only groups that were not exported before")
    parser.add_argument("--trim", action="store_true", help="forget the exported groups at once (durable ones only)")
    arguments = parser.parse_args(argv)
    if arguments.trim and arguments.state != DURABLE:
        parser.error(f"--trim forgets durable groups only, not {arguments.state} ones, which the run still needs")
    if arguments.out.suffix != ".parquet":
        parser.error(f"--out {arguments.out} must end in .parquet")
    _refuse_existing(arguments.out)
    _import_pyarrow()
    selection = Selection(arguments.out, arguments.state, arguments.new, arguments.trim)

    async def work(opened: OpenLedger) -> int:
        await _export(opened, selection)
        return 0

    return with_ledger(arguments.run, work)


async def _export(opened: OpenLedger, selection: Selection) -> None:
    if selection.trim and not opened.live:
        raise SlipstreamError(f"run {opened.name} is not running, so --trim has no effect; leave it out")
    columns = {reward.name for reward in opened.config.rewards}
    while True:
        try:
            written = await _write(opened, selection, sorted(columns))
            break
        except NewScores as found:  # of a reward that the configuration no longer names: retry with its column
            columns |= found.names
    gone = f", {written.gone:,} left out that changed meanwhile" if written.gone else ""
    print(f"wrote {selection.file}: {len(written.ids):,} groups, {written.answers:,} answers{gone}")
    if written.unreadable:
        print(f"{len(written.unreadable):,} groups left out: {written.unreadable[0]}", file=sys.stderr)
    if selection.state != DURABLE:
        return
    if not opened.live:
        print("the run is not running: nothing was marked as exported")
        return
    marked = await opened.ledger.exported(written.ids, forget=selection.trim)
    print(f"{marked:,} of these groups are now {'forgotten' if selection.trim else 'marked as exported'} in the ledger")


async def _write(opened: OpenLedger, selection: Selection, scores: Sequence[str]) -> Written:
    """Writes the file under another name, and renames it once it is complete and on disk.

    Raises: NewScores when an answer has a score without a column.
    """
    ids = await opened.reader.ids(selection.state)
    part, written = selection.file.with_name(f".{selection.file.name}.{os.getpid()}"), Written()
    try:
        with part.open("xb") as output:
            decode, _ = decoder_or_reason(opened.folder, opened.config.model)
            with GroupFile(output, scores, decode) as file:
                async for record in _records(opened.reader, ids, selection, written):
                    written.answers += file.add(record, _group(record))
                    written.ids.append(record.id)
            os.fsync(output.fileno())
        if not written.ids:
            raise SlipstreamError(_no_groups(opened, selection, written.unreadable))
        _refuse_existing(selection.file)
        part.rename(selection.file)
    except OSError as error:
        raise SlipstreamError(f"can't write {selection.file}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it may not exist
            part.unlink()
    return written


async def _records(
    reader: LedgerReader, ids: Sequence[str], selection: Selection, written: Written
) -> AsyncIterator[GroupRecord]:
    """The selected groups with their bytes."""
    for first in range(0, len(ids), GROUPS_PER_READ):
        for record in await reader.groups(ids[first : first + GROUPS_PER_READ]):
            if record is not None and record.spill_error:
                written.unreadable.append(record.spill_error)
            elif record is None or record.state != selection.state or record.blob is None:
                written.gone += 1
            elif not (selection.new and "exported" in record.fields):
                yield record


def _group(record: GroupRecord) -> Group:
    assert record.blob is not None, "_records yields no group without its bytes"
    try:
        return decode_group(record.blob)
    except FrameError as error:
        raise SlipstreamError(f"group {record.id} can't be decoded, so nothing was written: {error}") from error


def _no_groups(opened: OpenLedger, selection: Selection, unreadable: Sequence[str]) -> str:
    remedy = "--state takes others" if selection.state != DURABLE else "a checkpoint makes trained groups durable"
    if unreadable:
        return f"{unreadable[0]}; export on the host of the buffer, whose disk has the spill files"
    new = " that was not exported before" if selection.new else ""
    return f"run {opened.name} has no {selection.state} group{new}, so {selection.file} was not written; {remedy}"


def _refuse_existing(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"--out {file} exists already and is never overwritten; choose another name or remove it")


def _import_pyarrow() -> Any:
    """The module pyarrow. Raises: SlipstreamError that names the extra to install."""
    try:
        return import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise SlipstreamError("the export needs pyarrow: `pip install 'slipstream[export]'`") from error


class GroupFile:
    """A parquet file under construction; the end of its `with` block completes it."""

    def __init__(self, output: IO[bytes], scores: Sequence[str], decode: Decode | None = None) -> None:
        """Adds a column `score_<name>` for each of `scores`, and with `decode` those of texts."""
        self._arrow = _import_pyarrow()
        self._scores = list(scores)
        self._decode = decode
        self._schema = self._make_schema()
        self._writer = import_module("pyarrow.parquet").ParquetWriter(output, self._schema, compression="zstd")
        self._clear()

    def __enter__(self) -> "GroupFile":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._flush()
        finally:
            self._writer.close()

    def add(self, record: GroupRecord, group: Group) -> int:
        """Adds a group's answers; returns their number.

        Raises: NewScores; nothing is added then.
        """
        names = {name for trajectory in group.trajectories for name in trajectory.scores}
        if not names <= set(self._scores):
            raise NewScores(names - set(self._scores))
        for number, trajectory in enumerate(group.trajectories):
            self._add_answer(record, group, number, trajectory)
        if self._tokens >= ROW_GROUP_TOKENS or len(self._scalars["group_id"]) >= ROW_GROUP_ROWS:
            self._flush()
        return len(group.trajectories)

    def _add_answer(self, record: GroupRecord, group: Group, number: int, trajectory: Trajectory) -> None:
        versions = [span.version for span in trajectory.spans]
        values: dict[str, Any] = {
            "group_id": group.id,
            "task": group.indices[0],
            "epoch": group.epoch,
            "steps": record.steps,
            "answer": number,
            "reward": trajectory.reward,
            "finish_reason": trajectory.finish_reason,
            "oldest_version": min(versions),
            "newest_version": max(versions),
            **{f"score_{name}": trajectory.scores.get(name) for name in self._scores},
        }
        tokens, mask = token_ids(trajectory), action_mask(trajectory)
        start = int(np.argmax(mask))  # the prompt ends at the policy's first token
        if self._decode is not None:
            texts = self._decode(tokens[:start].tolist()), self._decode(tokens[start:].tolist())
            values |= dict(zip(TEXT_COLUMNS, texts, strict=True))
        for name, value in values.items():
            self._scalars[name].append(value)
        self._lists["prompt_token_ids"].append(tokens[:start])
        self._lists["answer_token_ids"].append(tokens[start:])
        self._lists["answer_logprobs"].append(behaviour_logprobs(trajectory)[start:])
        self._lists["answer_action_mask"].append(mask[start:])
        self._tokens += len(tokens)

    def _clear(self) -> None:
        self._scalars: dict[str, list[Any]] = {name: [] for name in self._schema.names if name not in LIST_COLUMNS}
        self._lists: dict[str, list[NDArray[Any]]] = {name: [] for name in LIST_COLUMNS}
        self._tokens = 0

    def _flush(self) -> None:
        if not self._scalars["group_id"]:
            return
        columns = [
            self._list_array(self._lists[column.name], LIST_COLUMNS[column.name])
            if column.name in LIST_COLUMNS
            else self._arrow.array(self._scalars[column.name], column.type)
            for column in self._schema
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
        self._clear()

    def _list_array(self, rows: Sequence[NDArray[Any]], item: str) -> Any:
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
        # Python lists would take ten times the memory.
        return self._arrow.ListArray.from_arrays(offsets, self._arrow.array(np.concatenate(rows), item))

    def _make_schema(self) -> Any:
        def type_of(name: str) -> Any:
            return self._arrow.list_(self._arrow.int64()) if name == "list<int64>" else self._arrow.type_for_alias(name)

        fields = [(name, type_of(kind)) for name, kind in SCALAR_COLUMNS.items()]
        fields += [(f"score_{name}", self._arrow.float64()) for name in self._scores]
        fields += [(name, self._arrow.string()) for name in TEXT_COLUMNS if self._decode is not None]
        fields += [(name, self._arrow.list_(type_of(item))) for name, item in LIST_COLUMNS.items()]
        return self._arrow.schema(fields)
