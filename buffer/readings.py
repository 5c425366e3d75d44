"""The buffer's metrics for Prometheus: groups by state, drops by reason, its servers, and the time of its work."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from slipstream.buffer.store.types import LedgerSnapshot, of_kind
from slipstream.buffer.wire.messages import Credits
from slipstream.configs.runtime.exposition import Reading


@dataclass
class Timer:
    """Calls of the service's work, and the time that they took together."""

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, work: str) -> Iterator[None]:
        """Around one call, which counts if it succeeds."""
        started = time.perf_counter()
        yield
        self.calls[work] = self.calls.get(work, 0) + 1
        self.seconds[work] = self.seconds.get(work, 0.0) + time.perf_counter() - started


def readings(
    standing: LedgerSnapshot, credits: Mapping[str, Credits], *, length_bias: Mapping[str, float], timer: Timer
) -> Iterator[Reading]:
    """All metrics of a buffer.

    Args:
        standing: of the ledger.
        credits: latest heartbeat of each server.
        length_bias: see `LearnerHandler`.
    """
    counts = standing.counts
    now = {"in_flight": counts.in_flight, "ready": counts.ready, "leased": counts.leased}
    yield Reading("buffer_groups", "groups at the moment", {name: float(n) for name, n in now.items()}, "state")
    # No counters: a learner that restarts from a checkpoint undoes steps.
    done = {"trained": counts.trained, "durable": counts.durable, "uses": counts.uses}
    for name, number in done.items():
        yield Reading(f"buffer_{name}", f"groups so far: {name}", number)
    sums = {"issued": counts.issued, "reissued": counts.reissued, "skipped_tasks": counts.skipped_tasks}
    for name, number in sums.items():
        yield Reading(f"buffer_{name}", f"so far: {name.replace('_', ' ')}", number, counts=True)
    yield Reading("buffer_tokens", "action tokens of all groups that were delivered", counts.tokens, counts=True)
    for state in ("filtered", "expired"):
        dropped = {name: float(n) for name, n in of_kind(state, counts.reasons).items()}
        yield Reading(f"buffer_{state}", f"groups so far: {state}", dropped, "reason", counts=True)
    answers = {reason: float(n) for reason, n in counts.answers_dropped.items()}
    yield Reading("buffer_answers_dropped", "answers that are never trained on", answers, "reason", counts=True)
    yield Reading("buffer_length_bias", "KS distance of lengths from those of all delivered answers", length_bias, "of")
    yield Reading("buffer_spilled_groups", "groups whose bytes are in spill files", counts.spilled)
    yield Reading("buffer_spilled_bytes", "bytes of these groups", counts.spilled_bytes)
    yield Reading("buffer_policy_version", "latest published version", standing.version)
    yield Reading("buffer_servers", "rollout servers that are connected", len(credits))
    capacity = {server: float(each.capacity) for server, each in credits.items()}
    yield Reading("buffer_server_capacity", "groups that a server can hold", capacity, "server")
    held = {server: float(len(each.held)) for server, each in credits.items()}
    yield Reading("buffer_server_tickets", "tickets that a server holds", held, "server")
    calls = {work: float(n) for work, n in dict(timer.calls).items()}
    yield Reading("buffer_calls", "calls of the ledger by kind of work", calls, "work", counts=True)
    yield Reading("buffer_call_seconds", "time of these calls", dict(timer.seconds), "work", counts=True)
