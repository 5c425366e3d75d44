"""Messages of rollout servers: hello, goodbye, failed tickets. Deliveries: `ingest.py`; heartbeats: `fleet.py`."""

from collections.abc import Mapping
from itertools import chain

from slipstream.buffer import identity
from slipstream.buffer.handlers.fleet import Fleet
from slipstream.buffer.handlers.ingest import Ingest
from slipstream.buffer.handlers.peers import Send, peer_name
from slipstream.buffer.policies.statistics import histogram
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.types import Facts
from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.logging import get_log

log = get_log("buffer.rollout")

MAX_SERVERS = 10_000


class RolloutHandler:
    """Handles hello, goodbye and failed tickets."""

    def __init__(self, settings: Mapping[str, str], ledger: Ledger, fleet: Fleet, ingest: Ingest, send: Send) -> None:
        """`settings` must be the same on every server; others that a server reports, the same on all servers."""
        self._settings = settings
        self._ledger = ledger
        self._fleet = fleet
        self._ingest = ingest
        self._send = send
        self._refused: m.ServerHello | None = None

    async def hello(self, peer: bytes, hello: m.ServerHello) -> None:
        """Registers a server, or refuses it. Raises: ConfigError (`require_unknown_incarnation`)."""
        await self._ingest.store()  # the answer implies that all groups delivered before the hello were handled
        servers = self._fleet.servers
        known = servers.get(peer)
        if (
            known is not None and known.hello == hello
        ):  # thousands of repetitions may be queued after an outage of Redis
            await self._send(peer, m.Welcome(version=await self._ledger.version()))
            known.offer_evaluation()
            return
        refusal = await self._refusal(peer, hello)
        if peer not in servers and len(servers) >= MAX_SERVERS:
            refusal = (
                f"this buffer has {MAX_SERVERS} servers already; silent ones are removed after buffer.server_deadline_s"
            )
        if refusal:
            if self._refused != hello:  # a server's repeated hellos are logged once
                log.warning("server refused", peer=peer_name(peer), reason=refusal)
            self._refused = hello
            await self._send(peer, m.Refused(reason=refusal))
            return
        lost = await self._ledger.join(peer_name(peer), hello.incarnation)
        self._fleet.join(peer, hello)
        log.info("server joined", server=peer_name(peer), tasks=hello.train_tasks, tickets_reissued=lost)
        await self._send(peer, m.Welcome(version=await self._ledger.version()))

    async def goodbye(self, peer: bytes, goodbye: m.ServerGoodbye) -> None:
        """Removes a server that stops, unless a newer process has registered under its name."""
        await self._ingest.store()  # its earlier deliveries count
        server = self._fleet.servers.get(peer)
        known = server is not None and server.hello.incarnation == goodbye.incarnation
        if known:
            del self._fleet.servers[peer]  # before the call: no heartbeat may be recorded after it
        back = await self._ledger.leave(peer_name(peer), goodbye.incarnation)
        if known:
            log.info("server left", server=peer_name(peer), tickets_reissued=back)
        self._fleet.offer_evaluation()

    async def _refusal(self, peer: bytes, hello: m.ServerHello) -> str | None:
        """The reason to refuse a server, or None. Raises: ConfigError (`require_unknown_incarnation`)."""
        if hello.run != self._ledger.run:
            return identity.wrong_run_error(self._ledger.run, "server", hello.run)
        if not hello.train_tasks:
            return f"env {hello.env!r} has no tasks to train on"
        difference = identity.settings_difference(hello.settings, self._settings)
        if difference:
            if peer not in self._fleet.servers:
                identity.require_unknown_incarnation(
                    hello.incarnation, await self._ledger.incarnation(peer_name(peer)), difference
                )
            return difference
        others = chain(self._fleet.learner_settings(), self._fleet.server_settings(but=peer))
        difference = identity.host_difference(hello.settings, self._settings, others)
        if difference:
            return difference
        mine = identity.server_identity(hello)
        return identity.identity_change(mine, await self._ledger.identify(mine))

    async def failed(self, peer: bytes, message: m.GroupFailed) -> None:
        """Records a failed ticket."""
        log.warning("group failed", group=message.id, reason=message.reason, detail=message.detail)
        if message.kind == m.EVAL:
            outcome = await self._ledger.evaluations.record_failure(message.id, reason=message.reason)
            self._fleet.offer_evaluation()
        else:
            lengths = histogram(message.lengths)
            dropped = {message.reason: lengths} if lengths else {}
            facts = Facts(tokens=message.tokens, delivered=lengths, dropped=dropped)
            outcome = await self._ledger.filter(message.id, reason=message.reason, facts=facts)
        await self._send(peer, m.Acknowledge(outcomes={message.id: outcome}))
        self._fleet.ticket_returned(peer)
