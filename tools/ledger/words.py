"""How the ledger's facts are shown: times, and what peers wrote."""

from datetime import UTC, datetime

from rich.console import Group
from rich.table import Table
from rich.text import Text

from slipstream.buffer.wire.messages import LedgerCounts


def printable(text: str) -> str:
    """The text with control characters escaped: peers choose names and reasons, and terminals obey what they get."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def utc(at: float) -> str:
    """A time as `2026-01-31 23:59:59.123 UTC`."""
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")


def groups_by_state(counts: LedgerCounts) -> dict[str, int]:
    """The groups in each state; every one that was issued is in exactly one."""
    return {
        "issued": counts.in_flight,
        "ready": counts.ready,
        "leased": counts.leased,
        "trained": counts.trained - counts.durable,
        "durable": counts.durable,
        "filtered": counts.filtered,
        "expired": counts.expired,
        "reissued": counts.reissued,
    }


def titled(title: str, table: Table) -> Group:
    """A table below its title, which may be wider."""
    return Group(Text(printable(title), style="bold"), table)
