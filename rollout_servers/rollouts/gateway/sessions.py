"""The sessions of a rollout server, and the offers of its tickets to agents that come from outside."""

import secrets
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.exposition import Reading
from slipstream.env.base import Task
from slipstream.rollout_servers.rollouts.base import AnswerGenerator
from slipstream.rollout_servers.rollouts.conversation import ChatFormat
from slipstream.rollout_servers.rollouts.gateway.session import Session, State
from slipstream.rollout_servers.rollouts.record import EpisodeRecord
from slipstream.rollout_servers.tally import Tally

OVER_KEPT = 10_000


class Gateway:
    """Opens and finds sessions.

    Attributes:
        key: for opening sessions from outside.
        url: under which agents reach the gateway; empty until it serves.
        refused: requests that were refused, by code.
    """

    def __init__(self, policy: AnswerGenerator) -> None:
        """Raises: ConfigError for a model without a chat template."""
        if policy.tokenizer.chat_template is None:
            raise ConfigError(
                f"agents send chat messages, and the model in {policy.tokenizer.model} has no chat template: choose a "
                "chat model, or put its chat_template.jinja into the folder"
            )
        self.key = secrets.token_urlsafe(32)
        self.url = ""
        self.refused = Counter[str]()
        self.policy = policy
        self.model = policy.tokenizer.model.name
        self._format = ChatFormat.of(policy.tokenizer, policy.config.episode)
        self._sessions: dict[str, Session] = {}
        self._over = deque[str](maxlen=OVER_KEPT)
        self._offers = deque[Session]()

    @contextmanager
    def session(
        self, task: Task, *, greedy: bool, until: float, tally: Tally, record: EpisodeRecord
    ) -> Iterator[Session]:
        """A session whose tokens `tally` counts, and whose steps `record` has; over at the end, whatever happened."""
        session = Session(self.policy, self._format, task, greedy=greedy, until=until, tally=tally, record=record)
        earlier = self._sessions.get(session.id)
        if earlier is not None:  # of a ticket that this server lost by its silence, and got again
            earlier.move()
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            session.close(State.VOID)
            session.is_collected = True
            if self._sessions[session.id] is session:
                del self._sessions[session.id]
            if not session.moved:
                self._over.append(session.id)

    def find(self, session_id: str) -> Session | None:
        """The session of an id, until its episode is collected."""
        return self._sessions.get(session_id)

    def is_over(self, session_id: str) -> bool:
        """True for a session whose episode was collected, if it is one of the last."""
        return session_id in self._over

    async def offer(self, session: Session) -> None:
        """Returns once an agent from outside has taken the session."""
        self._offers.append(session)
        try:
            await session.taken.wait()
        finally:
            if session in self._offers:
                self._offers.remove(session)

    def take(self) -> Session | None:
        """The oldest session that is offered; None while there is no ticket to play."""
        return self._offers.popleft() if self._offers else None

    def offer_again(self, session: Session) -> None:
        """Offers a session whose agent did not get it, unless it is over."""
        if session.state is State.OPEN:
            self._offers.appendleft(session)

    def readings(self) -> Iterator[Reading]:
        """Metrics for Prometheus; read in another thread."""
        yield Reading("server_gateway_sessions", "episodes that agents play", len(self._sessions))
        refused = dict(self.refused)
        yield Reading("server_gateway_refused", "requests of agents that were refused", refused, "code", counts=True)

    def session_url(self, session: Session) -> str:
        """The address of a session."""
        return f"{self.url}/s/{session.id}"
