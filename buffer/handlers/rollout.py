"""What rollout servers say of themselves and of their tickets; the groups that they deliver go to `intake.py`."""

import asyncio
from dataclasses import dataclass

from slipstream.buffer import identity
from slipstream.buffer.handlers.base import Send, peer_name
from slipstream.buffer.handlers.ingest import Settle
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import Fullness
from slipstream.buffer.store.types import Facts
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log

log = get_log("buffer.servers")


@dataclass
class Server:
    """A rollout server as the service sees it."""

    hello: m.ServerHello
    credits: m.Credits | None = None
    heard_at: float = 0.0
    full: bool = False
    """It was granted all that its credits allow, and nothing of that has come back yet."""
    sated: int | None = None
    """The version of whose evaluation it was granted its part, and nothing of that has come back yet."""
    drained: int | None = None
    """The last version of which it was told that its evaluation needs nothing more from it."""

    def ask_again(self) -> None:
        """There may be something for it to evaluate, or it may not have heard that there is nothing."""
        self.sated = self.drained = None


class Ticketing:
    """Who may generate, and what.

    Attributes:
        servers: by their peer identity; one that is silent for `buffer.server_deadline_s` is forgotten.
        evaluating: the version whose evaluation was asked for last.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, send: Send, fullness: Fullness) -> None:
        self._config = config
        self._ledger = ledger
        self._send = send
        self._fullness = fullness
        self.servers: dict[bytes, Server] = {}
        self.evaluating: int | None = None

    def landed(self, peer: bytes) -> None:
        """A ticket of this server has come back, so it may have another one."""
        if peer in self.servers:
            self.servers[peer].full = False
            self.servers[peer].sated = None

    def look_at_all(self) -> None:
        """Tickets may have come back in ways that nobody hears of, such as their deadline."""
        for server in self.servers.values():
            server.full = False

    def ask_all_again(self) -> None:
        """Slices of the evaluation came back: servers that were told there are none may have them."""
        for server in self.servers.values():
            server.ask_again()

    def forget(self, names: set[str]) -> None:
        """The ledger has judged these silent, or others before, if another service has asked it to."""
        now = asyncio.get_running_loop().time()
        for peer, server in list(self.servers.items()):
            if peer_name(peer) in names or self._is_silent(server, now):
                del self.servers[peer]
                log.warning("server silent, forgotten", server=peer_name(peer))

    def silences_s(self, now: float) -> dict[str, float]:
        """For how long each server has said nothing."""
        return {peer_name(peer): now - server.heard_at for peer, server in self.servers.items()}

    async def grant(self) -> None:
        """Issues what servers may generate. A fleet is not asked about one by one each time that a group comes in."""
        now = asyncio.get_running_loop().time()
        refused = -1  # servers of this version and older ones would get nothing: the run allows no more at present
        for peer, server in list(self.servers.items()):
            if not self._here(peer, server):
                continue  # it went while the ledger was asked about another one
            if server.credits is not None and not self._is_silent(server, now):
                await self._fullness.attempt(self._grant_evaluation(peer, server, server.credits))
                version = server.credits.status.version
                if not server.full and version > refused and self._here(peer, server):
                    free = await self._fullness.attempt(self._grant_groups(peer, server, server.credits))
                    refused = refused if free == 0 else version

    def _is_silent(self, server: Server, now: float) -> bool:
        return now - server.heard_at > self._config.buffer.server_deadline_s

    def _here(self, peer: bytes, server: Server) -> bool:
        """Whether it is still this one: another process may have come under its name."""
        return self.servers.get(peer) is server

    async def _grant_groups(self, peer: bytes, server: Server, credits: m.Credits) -> int:
        """Returns how many credits it has left: more than 0 means that the run allows no more at present."""
        hello = server.hello
        free = credits.capacity
        server.full = True  # before the ledger is asked: a ticket that comes back in the meantime counts
        try:
            issued = await self._ledger.issue(
                peer_name(peer),
                server_version=credits.status.version,
                credits=credits.capacity,
                train_tasks=hello.train_tasks,
            )
            free = issued.free
        finally:
            if free:
                server.full = False
        tickets = [
            m.Ticket(
                id=task.id,
                kind=m.TRAIN,
                epoch=task.epoch,
                indices=[
                    int(task_order(hello.train_tasks, seed=self._config.run.seed, epoch=task.epoch)[task.position])
                ],
                samples=self._config.rollout.group_size,
                version=credits.status.version,
                greedy=self._config.greedy_baseline,
            )
            for task in issued.tasks
        ]
        if tickets:
            await self._send(peer, m.Tickets(tickets=tickets))
        return free

    async def _grant_evaluation(self, peer: bytes, server: Server, credits: m.Credits) -> None:
        """Gives a server that runs the version under evaluation its part of the held-out tasks."""
        version = credits.status.version
        if version in (server.sated, server.drained):
            return
        if version != self.evaluating:
            if self.evaluating is not None and version < self.evaluating:  # it may wait for its part all the same
                server.drained = version
                await self._send(peer, m.EvalDrained(version=version))
            return
        left = None
        # Before the ledger is asked, as above: slices may come back in the meantime.
        server.sated = server.drained = version
        try:
            left, granted = await self._ledger.evaluate(
                version, server=peer_name(peer), eval_tasks=server.hello.eval_tasks
            )
        finally:
            if left is None:
                server.sated = None
            if left != 0:
                server.drained = None
        tickets = [
            m.Ticket(
                id=work.id,
                kind=m.EVAL,
                epoch=0,
                indices=list(range(work.first, work.first + work.tasks)),
                samples=1,
                version=version,
            )
            for work in granted
        ]
        if tickets:
            await self._send(peer, m.Tickets(tickets=tickets))
        if not left:
            await self._send(peer, m.EvalDrained(version=version))


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
        lost = await self._ledger.heartbeat(peer_name(peer), held=credits.held, grace_s=GRACE_S)
        server.full = False
        if lost:
            log.warning("tickets lost on their way", server=peer_name(peer), reissued=lost)
            self._ticketing.ask_all_again()

    async def failed(self, peer: bytes, message: m.GroupFailed) -> None:
        """A ticket came to nothing; the answers that it had are of unknown length."""
        log.warning("group failed", group=message.id, reason=message.reason, detail=message.detail)
        if message.kind == m.EVAL:
            outcome = await self._ledger.evaluation_failed(message.id)
            self._ticketing.ask_all_again()
        else:
            facts = Facts(tokens=message.tokens)
            outcome = await self._ledger.filter(message.id, reason=message.reason, facts=facts)
        await self._send(peer, m.Acknowledge(outcomes={message.id: outcome}))
        self._ticketing.landed(peer)
