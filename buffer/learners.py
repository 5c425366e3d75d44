"""What learners tell and ask; those that wait for groups are in `leasing.py`."""

from typing import Any

import msgspec

from slipstream.buffer import identity
from slipstream.buffer.intake import Settle
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.reception import Malformed
from slipstream.buffer.records import SupersededError, UnknownLearnerError
from slipstream.buffer.sending import Send, peer_name
from slipstream.buffer.ticketing import Ticketing
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.errors import RefusedError
from slipstream.configs.logs import get_log

log = get_log("buffer.learners")


class Learners:
    """Each is answered with how the run stands.

    Attributes:
        length_bias: by the reason of drops, as it was measured last.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        ticketing: Ticketing,
        malformed: Malformed,
        settle: Settle,
        send: Send,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._ticketing = ticketing
        self._malformed = malformed
        self._settle = settle
        self._send = send
        self._greeted = ""
        self.length_bias: dict[str, float] = {}

    async def answer(self, peer: bytes, message: Any) -> None:
        """Does what a learner says, or refuses. Raises: ConfigError (`require_newcomer`)."""
        answer: m.Message
        try:
            await self._obey(message)
            answer = await self._state(message.request)
        except UnknownLearnerError:
            answer = m.WhoAreYou(request=message.request)
        except (RefusedError, SupersededError) as error:
            log.warning("learner refused", learner=peer_name(peer), reason=str(error))
            answer = m.Refused(request=message.request, reason=str(error))
        await self._send(peer, answer)

    async def _obey(self, message: Any) -> None:
        match message:
            case m.LearnerHello():
                await self._welcome(message)
            case m.Trained() | m.Published() | m.Throttle() | m.Checkpointed() | m.Finish() if (
                message.incarnation != self._greeted
            ):
                # This service was started since, perhaps with other settings: its hello says what the learner's are.
                raise UnknownLearnerError(self._config.run.name)
            case m.Trained():
                await self._ledger.train(message.step, learner=message.incarnation)
            case m.Published():
                await self._publish(message)
            case m.Throttle():
                await self._ledger.throttle(message.max_staleness, learner=message.incarnation)
            case m.Checkpointed():
                await self._ledger.durable(message.step, learner=message.incarnation)
            case m.StateRequest():
                await self._settle()  # what came before it counts
            case m.Finish():
                await self._settle()
                expired = await self._ledger.finish(learner=message.incarnation)
                log.info("run finished", groups_expired=expired)

    async def _welcome(self, hello: m.LearnerHello) -> None:
        if hello.run != self._config.run.name:
            raise RefusedError(identity.of_another_run(self._config, "learner", hello.run))
        disagreement = identity.disagreement(hello, self._config)
        if disagreement:
            if hello.incarnation != self._greeted:
                identity.require_newcomer(hello.incarnation, await self._ledger.learner(), disagreement)
            raise RefusedError(disagreement)
        mine = identity.of_learner(hello)
        other = identity.change(mine, await self._ledger.identify(mine))
        if other:
            raise RefusedError(other)
        back, forgotten = await self._ledger.restart(hello.step, learner=hello.incarnation)
        if back or hello.incarnation != self._greeted:  # else it has asked again
            log.info("learner joined", step=hello.step, groups_back_to_ready=back)
        self._greeted = hello.incarnation
        if forgotten:
            log.error("groups of undone steps were forgotten and can't be trained on again", steps=forgotten)

    async def _publish(self, message: m.Published) -> None:
        await self._ledger.publish(message.version, evaluate=message.evaluate, learner=message.incarnation)
        if message.evaluate:  # not before: a sweep that has just asked the ledger would put back the version before
            self._ticketing.evaluating = message.version

    async def _state(self, request: int) -> m.State:
        standing = await self._ledger.standing()
        servers = self._ticketing.servers.values()
        return m.State(
            request=request,
            version=standing.version,
            counts=msgspec.structs.replace(standing.counts, dropped_frames=self._malformed.count),
            servers=[server.credits.status for server in servers if server.credits],
            evals=await self._ledger.eval_reports(standing.evaluated),
            length_bias=self.length_bias,
            tasks=dict(standing.tasks),
        )
