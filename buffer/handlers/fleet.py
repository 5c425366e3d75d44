"""The rollout servers that the service knows, and the tickets that they are granted."""

import asyncio
from dataclasses import dataclass

from slipstream.buffer.handlers.peers import Send, peer_name
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import MemoryGuard
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log

log = get_log("buffer.fleet")


@dataclass
class Server:
    """A rollout server as the service sees it."""

    hello: m.ServerHello
    credits: m.Credits | None = None
    last_message_at: float = 0.0
    credits_used: bool = False
    """All its credits were granted, and no ticket has come back since."""
    eval_share_granted: int | None = None
    """The version of whose evaluation it was granted its share, and no ticket has come back since."""
    eval_drained: int | None = None
    """The last version whose EvalDrained it was sent."""

    def offer_evaluation(self) -> None:
        """Asks the ledger for evaluation tickets again, and repeats an EvalDrained that may be lost."""
        self.eval_share_granted = self.eval_drained = None


class Fleet:
    """The live rollout servers.

    Attributes:
        servers: by their peer identity; one that is silent for `buffer.server_deadline_s` is forgotten.
        evaluating: the version whose evaluation was asked for last.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, send: Send, memory: MemoryGuard) -> None:
        self._config = config
        self._ledger = ledger
        self._send = send
        self._memory = memory
        self.servers: dict[bytes, Server] = {}
        self.evaluating: int | None = None

    def ticket_returned(self, peer: bytes) -> None:
        """A ticket of this server has come back, so it may have another one."""
        if peer in self.servers:
            self.servers[peer].credits_used = False
            self.servers[peer].eval_share_granted = None

    def recheck_credits(self) -> None:
        """Tickets may have come back without a message, such as by their deadline."""
        for server in self.servers.values():
            server.credits_used = False

    def offer_evaluation(self) -> None:
        """Slices of the evaluation came back: servers that were sent EvalDrained may have them."""
        for server in self.servers.values():
            server.offer_evaluation()

    def forget(self, names: set[str]) -> None:
        """Removes servers that the ledger has judged silent, and others that are."""
        now = asyncio.get_running_loop().time()
        for peer, server in list(self.servers.items()):
            if peer_name(peer) in names or self._is_silent(server, now):
                del self.servers[peer]
                log.warning("server silent, forgotten", server=peer_name(peer))

    def silences_s(self, now: float) -> dict[str, float]:
        """Seconds since each server's last message."""
        return {peer_name(peer): now - server.last_message_at for peer, server in self.servers.items()}

    async def grant(self) -> None:
        """Issues tickets. The ledger is asked only about servers whose credits are not used up."""
        now = asyncio.get_running_loop().time()
        refused = -1  # servers of this version and older ones would get nothing
        for peer, server in list(self.servers.items()):
            if not self._here(peer, server):
                continue  # it went while the ledger was asked about another one
            if server.credits is not None and not self._is_silent(server, now):
                await self._memory.attempt(self._grant_evaluation(peer, server, server.credits))
                version = server.credits.status.version
                if not server.credits_used and version > refused and self._here(peer, server):
                    free = await self._memory.attempt(self._grant_groups(peer, server, server.credits))
                    refused = refused if free == 0 else version

    def _is_silent(self, server: Server, now: float) -> bool:
        return now - server.last_message_at > self._config.buffer.server_deadline_s

    def _here(self, peer: bytes, server: Server) -> bool:
        """False once another process has come under its name."""
        return self.servers.get(peer) is server

    async def _grant_groups(self, peer: bytes, server: Server, credits: m.Credits) -> int:
        """Returns its unused credits: more than 0 means that the run allows no more at present."""
        hello = server.hello
        free = credits.capacity
        server.credits_used = True  # before the ledger is asked: a ticket that comes back in the meantime counts
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
                server.credits_used = False
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
        if version in (server.eval_share_granted, server.eval_drained):
            return
        if version != self.evaluating:
            if self.evaluating is not None and version < self.evaluating:  # it may wait for its part all the same
                server.eval_drained = version
                await self._send(peer, m.EvalDrained(version=version))
            return
        left = None
        # Before the ledger is asked, as above: slices may come back in the meantime.
        server.eval_share_granted = server.eval_drained = version
        try:
            left, granted = await self._ledger.evaluate(
                version, server=peer_name(peer), eval_tasks=server.hello.eval_tasks
            )
        finally:
            if left is None:
                server.eval_share_granted = None
            if left != 0:
                server.eval_drained = None
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
