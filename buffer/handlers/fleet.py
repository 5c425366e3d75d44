"""Live rollout servers, and the granting of tickets to them."""

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
    """State of a rollout server."""

    hello: m.ServerHello
    credits: m.Credits | None = None
    last_message_at: float = 0.0
    credits_used: bool = False
    """True if all its credits were granted and no ticket has returned since."""
    eval_share_granted: int | None = None
    """The version of whose evaluation it got its share, if no ticket has returned since."""
    eval_drained: int | None = None
    """The last version whose EvalDrained it was sent."""

    def offer_evaluation(self) -> None:
        """Has evaluation tickets granted again, and an EvalDrained, which may be lost, repeated."""
        self.eval_share_granted = self.eval_drained = None


class Fleet:
    """The live rollout servers.

    Attributes:
        servers: by peer identity; one that is silent for `buffer.server_deadline_s` is removed.
        evaluating: the version whose evaluation was requested last.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, send: Send, memory: MemoryGuard) -> None:
        self._config = config
        self._ledger = ledger
        self._send = send
        self._memory = memory
        self.servers: dict[bytes, Server] = {}
        self.evaluating: int | None = None

    def ticket_returned(self, peer: bytes) -> None:
        """Records that a ticket of this server has returned, so that it may get another one."""
        if peer in self.servers:
            self.servers[peer].credits_used = False
            self.servers[peer].eval_share_granted = None

    def recheck_credits(self) -> None:
        """Rechecks all servers: tickets may have returned without a message, such as by their deadline."""
        for server in self.servers.values():
            server.credits_used = False

    def offer_evaluation(self) -> None:
        """Offers returned slices of the evaluation to all servers, also after their EvalDrained."""
        for server in self.servers.values():
            server.offer_evaluation()

    def forget(self, names: set[str]) -> None:
        """Removes the named servers and all others that are silent."""
        now = asyncio.get_running_loop().time()
        for peer, server in list(self.servers.items()):
            if peer_name(peer) in names or self._is_silent(server, now):
                del self.servers[peer]
                log.warning("server silent, removed", server=peer_name(peer))

    def silences_s(self, now: float) -> dict[str, float]:
        """Seconds since each server's last message."""
        return {peer_name(peer): now - server.last_message_at for peer, server in self.servers.items()}

    async def grant(self) -> None:
        """Issues tickets to servers with unused credits."""
        now = asyncio.get_running_loop().time()
        refused = -1  # servers of this version or an older one would get nothing
        for peer, server in list(self.servers.items()):
            if not self._is_current(peer, server):
                continue  # removed during the call for another server
            if server.credits is not None and not self._is_silent(server, now):
                await self._memory.attempt(self._grant_evaluation(peer, server, server.credits))
                version = server.credits.status.version
                if not server.credits_used and version > refused and self._is_current(peer, server):
                    free = await self._memory.attempt(self._grant_groups(peer, server, server.credits))
                    refused = refused if free == 0 else version

    def _is_silent(self, server: Server, now: float) -> bool:
        return now - server.last_message_at > self._config.buffer.server_deadline_s

    def _is_current(self, peer: bytes, server: Server) -> bool:
        """False after the server was removed or replaced by another process of its name."""
        return self.servers.get(peer) is server

    async def _grant_groups(self, peer: bytes, server: Server, credits: m.Credits) -> int:
        """Grants train tickets; returns the unused credits: more than 0 means that the run allows no more now."""
        hello = server.hello
        free = credits.capacity
        server.credits_used = True  # before the call: a ticket that returns during it must count
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
        """Grants a server that runs the version under evaluation its share of the held-out tasks."""
        version = credits.status.version
        if version in (server.eval_share_granted, server.eval_drained):
            return
        if version != self.evaluating:
            if self.evaluating is not None and version < self.evaluating:  # it may be waiting for its share
                server.eval_drained = version
                await self._send(peer, m.EvalDrained(version=version))
            return
        share = self._eval_share(peer, server, credits)
        if not share:
            return
        left = None
        # Before the call, as above: slices may return during it.
        server.eval_share_granted = server.eval_drained = version
        try:
            left, granted = await self._ledger.evaluate(
                version, server=peer_name(peer), eval_tasks=server.hello.eval_tasks, share=share
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

    def _eval_share(self, peer: bytes, server: Server, credits: m.Credits) -> int:
        """Held-out tasks that a server may hold: its part of all by its credits, at most what it can play at once.

        The parts add up to the tasks; 0 without credits, as while its engine restarts. Servers of a later version do
        not count, because they can't answer.
        """
        version, now = credits.status.version, asyncio.get_running_loop().time()
        before = total = 0
        for other_peer, other in self.servers.items():
            if other_peer == peer:
                before, total = total, total + credits.capacity
            elif other.credits is not None and other.credits.status.version <= version:
                total += 0 if self._is_silent(other, now) else other.credits.capacity
        if not credits.capacity:
            return 0
        tasks = min(server.hello.eval_tasks, self._config.eval.tasks)
        part = tasks * (before + credits.capacity) // total - tasks * before // total
        return min(credits.capacity * self._config.rollout.group_size, max(1, part))
