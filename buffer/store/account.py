"""The account of a run: every generated token is trained, lost for a reason, an answer to an evaluation, or on its way.

Two counts must meet in each row, a server's work on an env. *Generated* are the tokens that the engine sampled, as the
server reports them with heartbeats and with the end of each ticket. They are *accounted for* by the transitions of the
groups, from the tokens that the groups contain (lua/counts.lua).
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.buffer.store.redis import Scripts
from slipstream.buffer.store.types import Origin
from slipstream.buffer.wire.messages import Sampled

EVALUATION = "evaluation"
"""Name of the rows of evaluations, whatever their tasks' envs."""
OTHERS = "(others)"
"""Name of the servers beyond the largest number of rows."""
_LOST = "lost:"


def origin_of(group_id: str, server: str, sampled: Sampled) -> Origin:
    """The origin of a ticket that `server` settles."""
    for env, tickets in sampled.items():
        if group_id in tickets:
            return Origin(server, env, tickets[group_id])
    return Origin(server)


@dataclass(frozen=True)
class Tokens:
    """Generated tokens, and what has become of them."""

    generated: int = 0
    trained: int = 0
    """Each once, however often its group was used."""
    ready: int = 0
    leased: int = 0
    in_flight: int = 0
    """Reported for tickets that their server has not settled."""
    evaluation: int = 0
    """Of recorded answers to held-out tasks."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """By reason."""
    uses: int = 0
    """Trained tokens, as often as they were used."""

    @property
    def difference(self) -> int:
        """Generated tokens that are not accounted for."""
        known = self.trained + self.ready + self.leased + self.in_flight + self.evaluation
        return self.generated - known - sum(self.lost.values())

    @property
    def closes(self) -> bool:
        """True if every token is accounted for."""
        return not self.difference

    @classmethod
    def sum_of(cls, parts: Iterable["Tokens"]) -> "Tokens":
        """The sum of several rows."""
        rows = list(parts)
        lost = Counter[str]()
        for row in rows:
            lost.update(row.lost)
        return cls(lost=dict(lost), **{name: sum(getattr(row, name) for row in rows) for name in _NUMBERS})

    def as_json(self) -> dict[str, Any]:
        """All numbers, with the difference."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return numbers | {"lost": dict(self.lost), "closes": self.closes, "difference": self.difference}


_NUMBERS = ("generated", "trained", "ready", "leased", "in_flight", "evaluation", "uses")


@dataclass(frozen=True)
class Row(Tokens):
    """The tokens of one server for one env, or for evaluations."""

    env: str = ""
    """Its label; EVALUATION for evaluations."""
    server: str = ""
    kind: str = "train"
    """`train` or `eval`."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups of which other tokens arrived than were sampled, with the difference."""

    def as_json(self) -> dict[str, Any]:
        """The row."""
        name = {"env": self.env, "server": self.server, "kind": self.kind}
        return name | super().as_json() | {"groups": list(self.groups)}


@dataclass(frozen=True)
class Account:
    """The account of a run, at one moment."""

    rows: list[Row]

    @property
    def total(self) -> Tokens:
        """The sum of all rows."""
        return Tokens.sum_of(self.rows)

    def problems(self) -> list[str]:
        """One sentence for each row that does not close."""
        return [
            f"the account of server {row.server}, {row.env} does not close: of {row.generated} generated tokens "
            f"{row.difference} are not accounted for; groups: "
            + (", ".join(f"{name} ({tokens:+d})" for name, tokens in row.groups.items()) or "none that reported it")
            for row in self.rows
            if not row.closes or row.groups
        ]

    def as_json(self) -> dict[str, Any]:
        """Rows, their sum, and the groups that differ."""
        groups = {name: tokens for row in self.rows for name, tokens in row.groups.items()}
        return {"rows": [row.as_json() for row in self.rows], "total": self.total.as_json(), "groups": groups}


async def account(scripts: Scripts) -> Account:
    """The account of the scripts' run. Raises: RedisError."""
    raw_rows, flat = await scripts.call("account")
    open_groups: dict[str, dict[str, int]] = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        row, _, tokens = value.decode().partition(":")
        open_groups.setdefault(row, {})[name.decode()] = int(tokens)
    rows = [_row(raw, open_groups.get(raw[1].decode(), {})) for raw in raw_rows]
    return Account(sorted(rows, key=lambda row: (row.kind != "train", row.env, row.server)))


def _row(raw: list[Any], groups: Mapping[str, int]) -> Row:
    name, _, flat, ready, leased, in_flight = raw
    server, env = json.loads(name)
    counts = {key.decode(): int(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}
    return Row(
        env=env or EVALUATION,
        server=server or OTHERS,
        kind="train" if env else "eval",
        generated=counts.get("generated", 0),
        trained=counts.get("trained", 0),
        uses=counts.get("uses", 0),
        evaluation=counts.get("evaluated", 0),
        ready=ready,
        leased=leased,
        in_flight=in_flight,
        lost={key.removeprefix(_LOST): n for key, n in counts.items() if n and key.startswith(_LOST)},
        groups=groups,
    )
