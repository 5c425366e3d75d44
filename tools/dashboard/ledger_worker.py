"""The worker of the dashboard that reads one run's ledger: `python -P -m slipstream.tools.dashboard.ledger_worker RUN`.

A process of its own, because opening a ledger may start a server and load gigabytes, and because the server must be
started by a process with one thread. It reads one request a line from stdin, `{"call": NAME, ...arguments}`, writes
one answer a line to stdout, `{"answer": ...}` or `{"error": TEXT}`, and ends with its stdin.
"""

import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from slipstream.buffer.store.account import account
from slipstream.buffer.store.reader import STATES, GroupRecord
from slipstream.buffer.wire.codec import FrameError, decode_group
from slipstream.configs.arguments import exit_code
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.threads import run_in_thread
from slipstream.tools.dashboard.samples import facts_of, ids_as_text, stretches_of
from slipstream.tools.follow import Record, json_bytes
from slipstream.tools.ledger.inspect import facts
from slipstream.tools.ledger.open import OpenLedger, with_ledger
from slipstream.tools.transcript import decoder_or_reason

MOST_GROUPS: Final = 20_000
"""Groups that are searched: the latest of each state."""
_ORDERS: Final[Mapping[str, Callable[[Record], float]]] = {
    "id": lambda group: int(group["id"]),
    "tokens": lambda group: group["tokens"],
    "version": lambda group: group["version"],
}


async def serve(opened: OpenLedger) -> int:
    """Answers requests until stdin ends."""
    calls: dict[str, Callable[..., Awaitable[Any]]] = {"groups": groups, "group": group, "account": tokens}
    while line := await run_in_thread(sys.stdin.buffer.readline):
        request = msgspec.json.decode(line)
        try:
            answer = {"answer": await calls[request.pop("call")](opened, **request)}
        except SlipstreamError as error:
            answer = {"error": str(error)}
        sys.stdout.buffer.write(json_bytes(answer) + b"\n")
        sys.stdout.buffer.flush()
    return 0


async def groups(
    opened: OpenLedger, *, state: str = "", query: str = "", sort: str = "", offset: int = 0, limit: int = 50
) -> Record:
    """A page of the groups in a state (empty: any), `{"total", "counts", "groups"}`, the latest first.

    Args:
        query: a text in the group's id or server.
        sort: `id`, `tokens` or `version`, with `-` descending.
    """
    counts = {name: await opened.reader.ids(name) for name in STATES}
    ids = [group_id for name in STATES if state in ("", name) for group_id in counts[name][-MOST_GROUPS:]]
    found = [
        listed
        for group_id, fields in zip(ids, await opened.reader.fields(ids), strict=True)
        if query in group_id or query in fields.get("server", "")
        if (listed := _listed(GroupRecord(group_id, fields, [], [], None)))
    ]
    order = _ORDERS.get(sort.removeprefix("-"), _ORDERS["id"])
    found.sort(key=order, reverse=sort.startswith("-") or not sort)
    shown = found[offset : offset + limit]
    records = await opened.reader.groups([listed["id"] for listed in shown], with_history=True)
    for listed, record in zip(shown, records, strict=True):
        if record is not None:
            listed.update({"steps": record.steps, "detail": record.history[-1].detail if record.history else ""})
            listed.update(_rewards(record))
    return {"total": len(found), "counts": {name: len(ids) for name, ids in counts.items()}, "groups": shown}


async def group(opened: OpenLedger, *, group_id: str) -> Record:
    """All that the ledger has of a group. Raises: SlipstreamError when it has nothing."""
    record = await opened.reader.group(group_id)
    if record is None:
        forgotten = ": it is forgotten, see buffer.retention" if await opened.reader.was_issued(group_id) else ""
        raise SlipstreamError(f"the ledger of run {opened.name} has no group {group_id!r}{forgotten}")
    tasks = opened.identity.get("train_tasks")
    train_tasks = None if tasks is None else int(tasks)
    return {
        **_listed(record),
        "facts": {
            name: value
            for name, value in facts(record, seed=opened.config.run.seed, train_tasks=train_tasks).items()
            if value
        },
        "steps": record.steps,
        "history": [{"time_s": event.at, "state": event.state, "detail": event.detail} for event in record.history],
        **_answers(opened, record),
    }


async def tokens(opened: OpenLedger) -> Record:
    """The account of the run's tokens."""
    return (await account(opened.ledger.scripts)).as_json()


def _listed(record: GroupRecord) -> Record:
    return {
        "id": record.id,
        "state": record.state or "evaluation",
        "server": record.fields.get("server", ""),
        "version": record.number("version") or 0,
        "oldest": record.number("oldest"),
        "answers": sum(record.lengths.values()),
        "tokens": sum(bucket * answers for bucket, answers in record.lengths.items()),
    }


def _rewards(record: GroupRecord) -> Record:
    """The rewards of the answers, where their bytes are stored."""
    try:
        rewards = [] if record.blob is None else [one.reward for one in decode_group(record.blob).trajectories]
    except FrameError:  # of another release
        rewards = []
    return {"rewards": rewards, "reward": sum(rewards) / len(rewards) if rewards else None}


def _answers(opened: OpenLedger, record: GroupRecord) -> Record:
    """The answers with their tokens, as of a sample, where their bytes are stored."""
    if record.blob is None:
        return {
            "samples": [],
            "note": record.spill_error or f"the ledger keeps no bytes of groups that are {record.state}",
        }
    try:
        stored = decode_group(record.blob)
    except FrameError as error:
        return {"samples": [], "note": str(error)}
    decode, reason = decoder_or_reason(opened.folder, opened.config.model)
    samples = [
        {
            "answer": number,
            "group_id": record.id,
            "task": stored.indices[0] if stored.indices else None,
            **facts_of(trajectory),
            "stretches": stretches_of(trajectory, decode or ids_as_text),
        }
        for number, trajectory in enumerate(stored.trajectories)
    ]
    return {"samples": samples, "missing": stored.missing, "note": reason}


if __name__ == "__main__":
    sys.exit(exit_code(lambda: with_ledger(sys.argv[1], serve)))
