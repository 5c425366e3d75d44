"""The finished steps of a ticket's episodes, kept by the buffer: another server goes on from them if this one ends."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec
import numpy as np

from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.logging import get_log
from slipstream.rollout_servers.engines.base import Completion
from slipstream.rollout_servers.tally import Tally

log = get_log("rollout.record")

Keep = Callable[[m.KeepEvent], asyncio.Future[str]]
"""Has the buffer keep an event; the result is its outcome (`Acknowledge`), once it is kept."""

VOID: Final = "void"
"""Outcome for a ticket that is another server's by now."""


class EncodedCompletion(msgspec.Struct, frozen=True, array_like=True):
    """An engine's completion as bytes."""

    token_ids: bytes
    logprobs: bytes
    spans: list[m.VersionSpan]
    finish_reason: str
    routed_experts: m.RoutedExperts | None = None
    kept: list[bytes] | None = None

    @classmethod
    def of(cls, completion: Completion) -> Self:
        """The bytes of a completion."""
        kept = completion.kept
        return cls(
            np.asarray(completion.token_ids, dtype=m.TOKEN_DTYPE).tobytes(),
            np.asarray(completion.logprobs, dtype=m.LOGPROB_DTYPE).tobytes(),
            list(completion.spans),
            completion.finish_reason,
            completion.routed_experts,
            None if kept is None else [each.astype(m.TOKEN_DTYPE).tobytes() for each in kept],
        )

    def completion(self) -> Completion:
        """The answer."""
        kept = self.kept
        return Completion(
            np.frombuffer(self.token_ids, dtype=m.TOKEN_DTYPE).tolist(),
            np.frombuffer(self.logprobs, dtype=m.LOGPROB_DTYPE).tolist(),
            self.spans,
            self.finish_reason,
            self.routed_experts,
            None if kept is None else [np.frombuffer(each, dtype=m.TOKEN_DTYPE) for each in kept],
        )


@dataclass
class EpisodeRecord:
    """The steps of one episode.

    Attributes:
        kept: of an earlier server, in order.
        places: number of those that are taken, by events of another release, too.
    """

    ticket: "TicketRecord"
    episode: int
    kept: Sequence[m.EpisodeEvent] = ()
    places: int = 0

    @property
    def kept_tokens(self) -> int:
        """Sampled in the steps of the earlier server."""
        return sum(event.tokens for event in self.kept)

    def add(self, content: bytes, *, tokens: int = 0) -> asyncio.Future[str]:
        """Has a step kept, in which `tokens` were sampled; the result is the outcome, once it is kept.

        A step of more than `MOST_EVENT_BYTES` is not kept (`full`), with a warning.
        """
        keep, place = self.ticket.keep, self.places
        self.places += 1
        is_full = len(content) > m.MOST_EVENT_BYTES or place >= m.MOST_EVENTS
        if keep is not None and is_full:
            log.warning(
                "a step is too large to be kept; another server would repeat the episode from there",
                ticket=self.ticket.id,
                episode=self.episode,
                step=place,
                bytes=len(content),
                most_bytes=m.MOST_EVENT_BYTES,
                most_steps=m.MOST_EVENTS,
            )
        if keep is None or is_full:
            skipped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            skipped.set_result("full")
            return skipped
        event = m.EpisodeEvent(episode=self.episode, place=place, tokens=tokens, content=content)
        return keep(m.KeepEvent(id=self.ticket.id, env=self.ticket.tally.env or "", event=event))


@dataclass
class TicketRecord:
    """The steps of all episodes of a ticket.

    Attributes:
        keep: None where nothing is kept.
        tally: of the ticket; it has the tokens of earlier servers' steps until an episode takes them.
    """

    id: str = ""
    tally: Tally = field(default_factory=Tally)
    keep: Keep | None = None
    events: Sequence[m.EpisodeEvent] = ()

    def episode(self, number: int) -> EpisodeRecord:
        """The steps of an episode, but for those of another release."""
        events = [event for event in self.events if event.episode == number]
        places = 1 + max((event.place for event in events), default=-1)
        return EpisodeRecord(self, number, [event for event in events if event.v == m.SCHEMA_VERSION], places)
