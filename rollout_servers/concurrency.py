"""The limit of a rollout server's groups in flight, from the load of its engine.

More groups at once mean more tokens a second until the KV cache is full. From there on further requests wait, and
running ones lose their KV cache to older ones and are computed again: groups only get older. The limit follows the
engine both ways.

The KV cache of an answer grows as long as it is generated, so a reading is behind what is already in flight. Growth is
therefore clocked by the groups that finish, as TCP's slow start is by acknowledgements (RFC 5681, section 3.1). And as
in its section 3.2, one congestion lowers the limit once: while more groups are in flight than the limit, it stays.
Sources: Chiu & Jain 1989, doi:10.1016/0169-7552(89)90019-6; prime-rl, pull requests 2908 and 3285, which pace growth by
settled readings of the KV cache, and budget at admission.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout_servers.engines.base import Pressure

SMOOTHING: Final = 0.2
"""Weight of a reading in the averages."""
CACHE_FULL: Final = 0.8
"""Used share of the KV cache from which requests wait for it, and not for another limit of the engine."""
QUEUE_SHARE: Final = 0.1
"""Waiting requests that keep the engine busy when others end, as a share of the running ones; at least a group's."""
PREEMPTED: Final = 2.0
"""Preemptions per answer above which the limit falls; at half of that it no longer grows. A preempted request is the
youngest one, which costs little: the fastest fixed limits have one preemption per answer."""
LEAST_FACTOR: Final = 0.5
DECREASE: Final = 0.9
"""Factors of the limit: the least one for a queue, and that for preemptions."""
MOST_GROWTH: Final = 3.0
"""Groups that the limit gains with each finished group, at most: it can quadruple while all in flight finish once."""
LEAST_GROWTH: Final = 1.05
"""Factor of the limit below which there is no room to speak of."""


class Cause(StrEnum):
    """Reason of a move of the limit."""

    ROOM = "the KV cache has room"
    QUEUE = "requests wait for KV cache"
    PREEMPTED = "requests are preempted"


@dataclass(frozen=True)
class Move:
    """A change of the limit, from `before` groups to `limit`."""

    before: int
    limit: int
    cause: Cause


@dataclass(frozen=True)
class Load:
    """Averages of readings: used share of the KV cache, running and waiting requests, groups in flight."""

    cache: float
    running: float
    waiting: float
    groups: float

    def toward(self, reading: "Load") -> "Load":
        """The averages with a further reading."""
        return Load(
            *(
                getattr(self, name) + SMOOTHING * (getattr(reading, name) - getattr(self, name))
                for name in ("cache", "running", "waiting", "groups")
            )
        )


class ConcurrencyLimiter:
    """The limit, and the rule of its moves.

    An engine that reports no running requests leaves the limit where it started, but for preemptions.

    Attributes:
        limit: groups that may be in flight, from 1 to the most.
        move: the last change of the limit; None before the first.
    """

    def __init__(self, start: int, most: int, *, group_size: int, max_sequences: int) -> None:
        """Begins with `start` groups of `group_size` answers; the engine runs at most `max_sequences` at once."""
        self.limit = min(start, most)
        self.move: Move | None = None
        self._most = most
        self._group_size = group_size
        self._max_sequences = max_sequences
        self._finished = 0
        self._preemptions: int | None = None
        self._recently_finished = self._recently_preempted = 0
        self._load: Load | None = None

    @classmethod
    def of(cls, rollout: RolloutConfig) -> "ConcurrencyLimiter":
        """That of `rollout.groups_in_flight`.

        `auto` begins with as many groups as the engine runs whole; a group whose last answer is running needs one
        sequence, so the engine can use as many groups as sequences.
        """
        sequences, groups = rollout.engine.max_sequences, rollout.groups_in_flight
        start, most = (max(1, sequences // rollout.group_size), sequences) if groups == "auto" else (groups, groups)
        return cls(start, most, group_size=rollout.group_size, max_sequences=sequences)

    def observe(self, pressure: Pressure, *, groups: int, finished: int) -> Move | None:
        """The move after a reading, None if the limit stays.

        Args:
            pressure: of the engine.
            groups: in flight.
            finished: groups that have finished since the server's start.
        """
        self._recently_finished += finished - self._finished
        known = pressure.preemptions if self._preemptions is None else self._preemptions
        # A lower count is that of a new engine.
        self._recently_preempted += pressure.preemptions - (known if known <= pressure.preemptions else 0)
        self._finished, self._preemptions = finished, pressure.preemptions
        if groups > self.limit:
            self.pause()
            return None
        if pressure.running:
            reading = Load(pressure.kv_cache_usage, pressure.running, pressure.waiting, groups)
            self._load = reading if self._load is None else self._load.toward(reading)
        wanted, cause = self._wanted(saturated=groups == self.limit)
        if self._recently_finished > 2 * self.limit:
            self._recently_finished = self._recently_preempted = 0
        return None if wanted == self.limit else self._moved(wanted, cause)

    def pause(self) -> None:
        """Forgets earlier readings, because the load is not that of `limit` groups."""
        self._load = None
        self._recently_finished = self._recently_preempted = 0

    def _wanted(self, *, saturated: bool) -> tuple[int, Cause]:
        """The limit that the load asks for, and its cause; `saturated` if as many groups are in flight as may be."""
        limit, load = self.limit, self._load
        rate = self._recently_preempted / (max(1, self._recently_finished) * self._group_size)
        queue = max(self._group_size, QUEUE_SHARE * load.running) if load else 0.0
        if load and load.waiting > queue and load.cache > CACHE_FULL:
            fitting = load.groups * (load.running + queue) / (load.running + load.waiting)
            return max(1, min(limit - 1, max(int(limit * LEAST_FACTOR), int(fitting)))), Cause.QUEUE
        if rate > PREEMPTED and 2 * self._recently_finished >= limit:
            return max(1, min(limit - 1, int(limit * DECREASE))), Cause.PREEMPTED
        if not load or not saturated or rate > PREEMPTED / 2 or load.waiting > queue / 2:
            return limit, Cause.ROOM
        sequences = min(load.running / max(load.cache, 1e-9), self._max_sequences) + queue / 2
        factor = load.groups * sequences / (load.running + load.waiting) / limit
        if factor < LEAST_GROWTH:
            return limit, Cause.ROOM
        clock = min(self._recently_finished, limit)
        gain = int(clock * min(MOST_GROWTH, factor - 1)) or int(clock == limit)
        return min(self._most, limit + gain), Cause.ROOM

    def _moved(self, limit: int, cause: Cause) -> Move:
        self.move = Move(self.limit, limit, cause)
        if cause is Cause.ROOM:
            self._recently_finished = self._recently_preempted = 0
        else:
            self.pause()
        self.limit = limit
        return self.move
