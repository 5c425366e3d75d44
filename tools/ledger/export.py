"""`slipstream ledger export`: a run's groups as a parquet file, one row for each answer."""

import argparse
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.buffer.store.reader import STORED, GroupRecord, LedgerReader
from slipstream.buffer.wire.codec import FrameError, decode_group
from slipstream.buffer.wire.messages import Group
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.tools.arguments import new_file
from slipstream.tools.ledger.opening import RUN_HELP, OpenLedger, with_ledger
from slipstream.tools.ledger.parquet import GroupFile, NewScores, import_pyarrow

DURABLE = "durable"
GROUPS_AT_ONCE = 16


@dataclass(frozen=True)
class Selection:
    """Which groups are written where."""

    file: Path
    state: str
    new: bool
    """Leave out those that were exported before."""
    trim: bool
    """Forget them afterwards."""


@dataclass
class Written:
    """What has gone into the file."""

    ids: list[str] = field(default_factory=list)
    answers: int = 0
    gone: int = 0
    """Groups that left the state while the file was written."""


def command(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises: ConfigError when there is no such run or the file is there, SlipstreamError when there is nothing to write,
    pyarrow is missing, or the ledger can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream ledger export",
        description="Write a run's groups to a parquet file, one row for each answer. In a run that goes on, durable "
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
        parser.error(f"--out {arguments.out} must end in .parquet: what is written is such a file")
    _refuse_existing(arguments.out)
    import_pyarrow()
    selection = Selection(arguments.out, arguments.state, arguments.new, arguments.trim)

    async def work(opened: OpenLedger) -> int:
        await _export(opened, selection)
        return 0

    return with_ledger(arguments.run, work)


async def _export(opened: OpenLedger, selection: Selection) -> None:
    if selection.trim and not opened.live:
        raise SlipstreamError(f"run {opened.name} is not going on, so --trim has nothing to act on; leave it out")
    columns = {reward.name for reward in opened.config.rewards}
    while True:
        try:
            written = await _write(opened, selection, sorted(columns))
            break
        except NewScores as found:  # of a reward that the configuration no longer names: once more, with its column
            columns |= found.names
    gone = f", {written.gone:,} left out that changed meanwhile" if written.gone else ""
    print(f"wrote {selection.file}: {len(written.ids):,} groups, {written.answers:,} answers{gone}")
    if selection.state != DURABLE:
        return
    if not opened.live:
        print("the run is not going on: nothing was marked as exported")
        return
    marked = await opened.ledger.exported(written.ids, forget=selection.trim)
    print(f"{marked:,} of these groups are now {'forgotten' if selection.trim else 'marked as exported'} in the ledger")


async def _write(opened: OpenLedger, selection: Selection, scores: Sequence[str]) -> Written:
    """Writes the file, which has its name only once it is complete and on disk.

    Raises: NewScores when an answer has a score without a column.
    """
    ids = await opened.reader.ids(selection.state)
    part, written = selection.file.with_name(f".{selection.file.name}.{os.getpid()}"), Written()
    try:
        with part.open("xb") as output:
            with GroupFile(output, scores) as file:
                async for record in _records(opened.reader, ids, selection, written):
                    written.answers += file.add(record, _group(record))
                    written.ids.append(record.id)
            os.fsync(output.fileno())
        if not written.ids:
            raise SlipstreamError(_nothing(opened, selection))
        _refuse_existing(selection.file)
        part.rename(selection.file)
    except OSError as error:
        raise SlipstreamError(f"can't write {selection.file}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # where it could not be made, it can't be removed
            part.unlink()
    return written


async def _records(
    reader: LedgerReader, ids: Sequence[str], selection: Selection, written: Written
) -> AsyncIterator[GroupRecord]:
    """The selected groups with their bytes, a few at a time."""
    for first in range(0, len(ids), GROUPS_AT_ONCE):
        for record in await reader.groups(ids[first : first + GROUPS_AT_ONCE]):
            if record is None or record.state != selection.state or record.blob is None:
                written.gone += 1
            elif not (selection.new and "exported" in record.about):
                yield record


def _group(record: GroupRecord) -> Group:
    assert record.blob is not None, "_records gives none without its bytes"
    try:
        return decode_group(record.blob)
    except FrameError as error:
        raise SlipstreamError(f"group {record.id} can't be read, so nothing was written: {error}") from error


def _nothing(opened: OpenLedger, selection: Selection) -> str:
    remedy = "--state takes others" if selection.state != DURABLE else "a checkpoint makes trained groups durable"
    new = " that was not exported before" if selection.new else ""
    return f"run {opened.name} has no {selection.state} group{new}, so {selection.file} was not written; {remedy}"


def _refuse_existing(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"--out {file} is there already and is never overwritten; choose another name or remove it")
