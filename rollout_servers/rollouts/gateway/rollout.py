"""Episodes that agents play through the gateway."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slipstream.buffer.wire.messages import AgentSpan
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.tracing import AnySpan
from slipstream.env.base import AgentEndpoint, AgentEnv, AgentReward, Task
from slipstream.rewards.base import Ended, Episode, EpisodeTurn
from slipstream.rewards.compose import checked_number
from slipstream.rollout_servers.rollouts.base import SILENT, EpisodeFailed, Played, PlayedEpisode, play_together
from slipstream.rollout_servers.rollouts.env_loop import EnvLoop
from slipstream.rollout_servers.rollouts.gateway.calls import CallRefused
from slipstream.rollout_servers.rollouts.gateway.session import METRICS, Reward, Session, State
from slipstream.rollout_servers.rollouts.gateway.sessions import Gateway
from slipstream.rollout_servers.rollouts.gateway.tree import Branch, Node
from slipstream.rollout_servers.rollouts.record import EpisodeRecord, TicketRecord
from slipstream.rollout_servers.tally import Tally

log = get_log("rollout.gateway")

KILL_S = 10.0
"""Time for an agent to end once it is cancelled."""


class AgentRollout:
    """Plays each episode of a group in a session of the gateway."""

    def __init__(self, env: AgentEnv, gateway: Gateway) -> None:
        self._env = env
        self._gateway = gateway
        self._loop = EnvLoop("agents", reason="agent_error")

    async def play(
        self, task: Task, *, samples: int, greedy: bool, until: float, tally: Tally, record: TicketRecord
    ) -> Played:
        """Plays `samples` episodes of the task (`Rollout.play`). Raises: EngineError."""

        async def play_one(number: int, tokens: Tally, traced: AnySpan) -> PlayedEpisode:
            steps = record.episode(number)
            episode = await self._play(task, greedy=greedy, until=until, tally=tokens, record=steps)
            traced.note(ended=episode.view.ended, turns=len(episode.view.turns))
            return episode

        return await play_together(samples, tally, play_one)

    def close(self) -> None:
        """Ends the agents' thread."""
        self._loop.close()

    async def _play(
        self, task: Task, *, greedy: bool, until: float, tally: Tally, record: EpisodeRecord
    ) -> PlayedEpisode:
        """Raises: EpisodeFailed, EngineError."""
        with self._gateway.session(task, greedy=greedy, until=until, tally=tally, record=record) as session:
            try:
                if self._env.from_outside and not session.opened:
                    await self._taken(session)
                else:
                    session.budget.begin()
                reward = await self._reward(session, until=until)
                _require_not_given_up(session)
                if reward is None and self._env.needs_reward and not session.rewarded.is_set():
                    await self._posted_reward(session, until)
                    _require_not_given_up(session)
            finally:
                session.close(State.DONE)
                await session.settle()
            return self._played(session, reward)

    async def _reward(self, session: Session, *, until: float) -> AgentReward | None:
        """Runs the agent, unless it has ended on an earlier server. Raises: EpisodeFailed, EngineError."""
        if session.finished is not None:
            return session.finished.reward
        reward = await self._agent(session, until=until)
        if not self._env.from_outside:
            with suppress(CallRefused):  # the group is not this server's any more
                await session.end(State.DONE, reward=reward)
        return reward

    async def _taken(self, session: Session) -> None:
        """Offers a session until an agent from outside takes it. Raises: EpisodeFailed."""
        try:
            async with asyncio.timeout_at(session.budget.until):
                await self._gateway.offer(session)
        except TimeoutError:
            raise EpisodeFailed(SILENT, "no agent has opened the session") from None

    async def _agent(self, session: Session, *, until: float) -> AgentReward | None:
        """Runs the agent, or waits for one from outside, until it has ended. Raises: EpisodeFailed, EngineError."""
        agent: asyncio.Future[Any]
        if self._env.from_outside:
            agent = asyncio.create_task(_ended(session))
            cancel: Callable[[], object] = agent.cancel
        else:
            endpoint = AgentEndpoint(self._gateway.session_url(session), session.key, self._gateway.model)
            running = self._loop.start(self._env.run_agent, session.task, endpoint)
            agent, cancel = asyncio.wrap_future(running.result), running.cancel
        failure = asyncio.create_task(session.failed.wait())
        try:
            async with asyncio.timeout_at(session.budget.until):
                await asyncio.wait([agent, failure], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            session.budget.limit = session.budget.limit or "wall"
        finally:
            failure.cancel()
            if not agent.done():
                session.close(State.DONE)  # its calls fail from now on
                cancel()
                await asyncio.wait([agent], timeout=KILL_S)
                agent.cancel()
        if session.failure is not None:
            raise session.failure
        has_ended = agent.done() and not agent.cancelled()
        if self._env.from_outside and not has_ended and not session.tree.nodes:
            raise EpisodeFailed(SILENT, f"no word of the agent of session {session.id}")
        try:
            if not has_ended:
                raise EpisodeFailed("agent_timeout", "the agent did not end in time")
            return _checked(agent.result())
        except EpisodeFailed:
            # One that failed or was stopped at a budget leaves its episode to the rewards.
            if session.budget.limit is None or asyncio.get_running_loop().time() >= until:
                raise
            return None

    async def _posted_reward(self, session: Session, until: float) -> None:
        """Waits for the reward of an agent from outside, which may come after its end. Raises: EpisodeFailed."""
        if not self._env.from_outside:
            raise EpisodeFailed("reward_missing", "the agent gave no reward; does the env need one (needs_reward)?")
        try:
            async with asyncio.timeout_at(until):
                await session.rewarded.wait()
        except TimeoutError:
            raise EpisodeFailed("reward_missing", f"session {session.id} got no reward") from None

    def _played(self, session: Session, reward: AgentReward | None) -> PlayedEpisode:
        """Raises: EpisodeFailed."""
        tree = session.tree
        branches = tree.branches()
        if not branches:
            raise EpisodeFailed("agent_error", "the agent got no answer to train on")
        session.count_unused()
        ends = _ends(branches)
        rewards = [(ends[node], posted.value) for node, posted in session.rewards() if node in ends]
        rewards += [(max(ends.values()), posted.value) for node, posted in session.rewards() if node not in ends]
        _label(branches, session.rewards())
        if reward is not None:
            rewards.append((max(ends.values()), reward.value))
        counts = (tree.roots, len(tree.delivered), len(branches), session.retries)
        metrics = Counter({name: float(count) for name, count in zip(METRICS, counts, strict=True)})
        metrics.update({f"ignored/{name}": float(count) for name, count in session.ignored.items()})
        for parts in [posted.parts for _, posted in session.rewards()] + ([reward.metrics] if reward else []):
            metrics.update(parts)  # adds those of the same name
        ended: Ended = session.budget.limit or "done"
        first, last = branches[0].transcript, branches[-1].nodes[-1][0]
        view = Episode(
            prompt=_shown(branches[0].nodes[0][0].path[0].messages),
            reference=session.task.reference,
            info=session.task.info,
            turns=_turns(branches),
            prompt_tokens=first.prompt_tokens,
            finish_reason="stop" if last.completion.finish_reason == "stop" else "length",
            ended=ended,
        )
        return PlayedEpisode([branch.transcript for branch in branches], view, sorted(rewards), metrics)


def _label(branches: list[Branch], rewards: list[tuple[Node, Reward]]) -> None:
    """Gives the transcripts the labels of their answers, if there are any, with what each earned by itself."""
    if not any(node.agent for branch in branches for node, _ in branch.nodes):
        return
    own = defaultdict[Node, float](float)
    for node, posted in rewards:
        if posted.completion_id is not None or posted.agent is not None:
            own[node] += posted.value
    for branch in branches:
        branch.transcript.agents = [
            AgentSpan(end=end, agent=node.agent, reward=own[node]) for node, end in branch.nodes
        ]


async def _ended(session: Session) -> None:
    """Returns once an agent from outside has closed its session."""
    await session.ended.wait()


def _require_not_given_up(session: Session) -> None:
    """Raises: EpisodeFailed for a session that its agent has closed as failed or void, or that is another server's."""
    if session.moved:
        raise EpisodeFailed("session_void", "another server goes on with the session")
    if session.state is State.FAILED:
        raise EpisodeFailed("agent_error", "the agent closed its session as failed")
    if session.state is State.VOID:
        raise EpisodeFailed("session_void", "the agent closed its session as void")


def _checked(reward: object) -> AgentReward | None:
    """Raises: EpisodeFailed."""
    if reward is None:
        return None
    given = reward if isinstance(reward, AgentReward) else AgentReward(reward)  # type: ignore[arg-type]
    try:
        metrics = {str(name): checked_number(value) for name, value in given.metrics.items()}
        return AgentReward(checked_number(given.value), metrics)
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeFailed("agent_error", f"reward of run_agent: {error}") from None


def _ends(branches: list[Branch]) -> dict[Node, int]:
    """The end of each trained answer in the transcripts end to end."""
    ends, start = dict[Node, int](), 0
    for branch in branches:
        ends |= {node: start + end for node, end in branch.nodes}
        start += len(branch.transcript.token_ids)
    return ends


def _turns(branches: list[Branch]) -> tuple[EpisodeTurn, ...]:
    """The trained answers, branch by branch; the last one is that of the last call."""
    ends, turns = _ends(branches), list[EpisodeTurn]()
    for branch in branches:
        for place, (node, _) in enumerate(branch.nodes):
            following = branch.nodes[place + 1][0] if place + 1 < len(branch.nodes) else None
            calls = [
                {"id": call["id"], **call["function"], "error": ""} for call in node.answer.get("tool_calls") or ()
            ]
            turns.append(
                EpisodeTurn(
                    text=str(node.answer["content"]),
                    tokens=len(node.completion.token_ids),
                    end=ends[node],
                    observation=_shown(following.messages) if following and following.parent is node else "",
                    tool_calls=calls,
                    content=str(node.answer["content"]) if calls else "",
                )
            )
    return tuple(turns)


def _shown(messages: Any) -> list[dict[str, Any]]:
    """Messages for rewards, which run in other processes: without the bytes of images."""
    return [
        {
            **message,
            "content": [{"type": "image"} if part["type"] == "image" else part for part in message["content"]],
        }
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]
