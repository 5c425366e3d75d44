"""What rollout servers say of themselves and of their tickets; the groups that they deliver go to `intake.py`."""

import asyncio

from slipstream.buffer import identity
from slipstream.buffer.intake import Settle
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.records import Facts
from slipstream.buffer.sending import Send, peer_name
from slipstream.buffer.ticketing import Server, Ticketing
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.logs import get_log

log = get_log("buffer.servers")

GRACE_S = 5.0
"""A ticket may be on its way to its server for so long; then it counts as lost."""
MOST_SERVERS = 10_000


class Servers:
    """Servers come and go, have credits, and fail."""

    def __init__(self, config: RunConfig, ledger: Ledger, ticketing: Ticketing, settle: Settle, send: Send) -> None:
        """`ticketing` has those that are here."""
        self._config = config
        self._ledger = ledger
        self._ticketing = ticketing
        self._settle = settle
        self._send = send
        self._refused: m.ServerHello | None = None

    async def welcome(self, peer: bytes, hello: m.ServerHello) -> None:
        """A process has come, or asks whether it is known. Raises: ConfigError (`require_newcomer`)."""
        await self._settle()  # what came before it is dealt with, which the answer says
        servers = self._ticketing.servers
        known = servers.get(peer)
        if known is not None and known.hello == hello:  # thousands of these may have come while Redis was away
            await self._send(peer, m.Welcome(version=await self._ledger.version()))
            known.ask_again()
            return
        refusal = await self._refusal(peer, hello)
        if peer not in servers and len(servers) >= MOST_SERVERS:
            refusal = f"this buffer knows {MOST_SERVERS} servers already; it forgets those that fall silent"
        if refusal:
            if self._refused != hello:  # many of one server may have waited for this service
                log.warning("server refused", peer=peer_name(peer), reason=refusal)
            self._refused = hello
            await self._send(peer, m.Refused(reason=refusal))
            return
        lost = await self._ledger.join(peer_name(peer), hello.incarnation)
        servers[peer] = Server(hello, heard_at=asyncio.get_running_loop().time())
        log.info("server joined", server=peer_name(peer), tasks=hello.train_tasks, tickets_reissued=lost)
        await self._send(peer, m.Welcome(version=await self._ledger.version()))

    async def part(self, peer: bytes, goodbye: m.ServerGoodbye) -> None:
        """A process ends in order; another one may have come under its name."""
        await self._settle()  # what it delivered before counts
        back = await self._ledger.leave(peer_name(peer), goodbye.incarnation)
        server = self._ticketing.servers.get(peer)
        if server is not None and server.hello.incarnation == goodbye.incarnation:
            del self._ticketing.servers[peer]
            log.info("server left", server=peer_name(peer), tickets_reissued=back)
        self._ticketing.ask_all_again()

    async def _refusal(self, peer: bytes, hello: m.ServerHello) -> str | None:
        """What about a server doesn't fit the run, None if it all does. Raises: ConfigError (`require_newcomer`)."""
        if hello.run != self._config.run.name:
            return identity.of_another_run(self._config, "server", hello.run)
        if not hello.train_tasks:
            return f"env {hello.env!r} has no tasks to train on"
        if hello.train_tasks < self._config.buffer.shards:
            return (
                f"env {hello.env!r} has {hello.train_tasks} tasks to train on, but each of the "
                f"buffer.shards={self._config.buffer.shards} needs one"
            )
        disagreement = identity.disagreement(hello, self._config)
        if disagreement:
            if peer not in self._ticketing.servers:
                identity.require_newcomer(
                    hello.incarnation, await self._ledger.incarnation(peer_name(peer)), disagreement
                )
            return disagreement
        mine = identity.of_server(hello)
        return identity.change(mine, await self._ledger.identify(mine))

    async def hear(self, peer: bytes, credits: m.Credits) -> None:
        """A server that is here says how it is, and which tickets it holds."""
        server = self._ticketing.servers[peer]
        server.credits = credits
        lost = await self._ledger.hear(peer_name(peer), held=credits.held, grace_s=GRACE_S)
        server.full = False
        if lost:
            log.warning("tickets lost on their way", server=peer_name(peer), reissued=lost)
            self._ticketing.ask_all_again()

    async def failed(self, peer: bytes, message: m.GroupFailed) -> None:
        """A ticket came to nothing; the answers that it had are of unknown length."""
        log.warning("group failed", group=message.id, reason=message.reason, detail=message.detail)
        if message.id.startswith("e"):
            outcome = await self._ledger.evaluation_failed(message.id)
            self._ticketing.ask_all_again()
        else:
            facts = Facts(tokens=message.tokens)
            outcome = await self._ledger.filter(message.id, reason=message.reason, facts=facts)
        await self._send(peer, m.Acknowledge(outcomes={message.id: outcome}))
        self._ticketing.landed(peer)
