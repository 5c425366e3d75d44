"""Episodes of several turns: actions of the policy, observations of a session as plain text."""

import asyncio
from dataclasses import dataclass, field

from slipstream.env.base import Action, SessionEnv, Task, Turn
from slipstream.rewards.base import Episode, EpisodeTurn
from slipstream.rollout_servers.rollouts.base import EpisodeFailed, Played, PlayedEpisode, Policy, Transcript
from slipstream.rollout_servers.rollouts.sessions import OpenSession, Sessions


@dataclass
class _State:
    """An episode while it is played."""

    transcript: Transcript = field(default_factory=lambda: Transcript.begin([]))
    turns: list[EpisodeTurn] = field(default_factory=list)
    env_rewards: list[tuple[int, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, action: Action, turn: Turn, *, observed: bool) -> None:
        """Records a turn; its observation only where the policy has seen it."""
        end = len(self.transcript.token_ids)
        observation = turn.observation if observed else ""
        self.turns.append(EpisodeTurn(text=action.text, tokens=len(action.token_ids), end=end, observation=observation))
        self.env_rewards.append((end, float(turn.reward)))
        for name, value in turn.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)


class MultiTurn:
    """Plays each episode of a group in a session of its own; `rollout.sampling.max_tokens` bounds all its turns."""

    def __init__(self, env: SessionEnv, policy: Policy) -> None:
        self._policy = policy
        self._sessions = Sessions(env, group_deadline_s=policy.config.group_deadline_s)

    async def play(self, task: Task, *, samples: int, greedy: bool, until: float) -> Played:
        """As the protocol `Rollout` has it. Raises: EngineError."""
        finished, failures, lost_tokens = list[PlayedEpisode](), list[EpisodeFailed](), 0

        async def play_one() -> None:
            nonlocal lost_tokens
            state, episode = _State(), None
            try:
                async with self._sessions.open(task, until=until) as session:
                    episode = await self._episode(task, session, state, greedy=greedy, until=until)
            except EpisodeFailed as error:
                failures.append(error)
            if episode is None:
                lost_tokens += state.transcript.action_tokens
            else:
                finished.append(episode)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(samples):
                tasks.create_task(play_one())
        return Played(finished, lost_tokens, failures[0] if failures else None)

    def close(self) -> None:
        """Ends the sessions' thread."""
        self._sessions.close()

    async def _episode(
        self, task: Task, session: OpenSession, state: _State, *, greedy: bool, until: float
    ) -> PlayedEpisode | None:
        """One episode; None when it was cut short at the deadline. Raises: EpisodeFailed, EngineError."""
        prompt_ids = self._policy.prompt_ids(session.prompt)
        state.transcript = transcript = Transcript.begin(prompt_ids)
        end = len(prompt_ids) + self._policy.config.sampling.max_tokens
        while True:
            room = end - len(transcript.token_ids)
            (completion,) = await self._policy.generate(
                transcript.token_ids, samples=1, greedy=greedy, until=until, max_tokens=room
            )
            transcript.add_action(completion)
            if completion.finish_reason == "abort":
                return None
            (text,) = self._policy.tokenizer.decode([completion.token_ids])
            action = Action(text, tuple(completion.token_ids), finish_reason=completion.finish_reason)
            turn = await session.step(action)
            observation = [] if turn.done else self._policy.observation_ids(turn.observation)
            is_full = completion.finish_reason == "length" or len(transcript.token_ids) + len(observation) >= end
            state.add(action, turn, observed=not (turn.done or is_full))
            if turn.done or is_full:
                break
            transcript.add_observation(observation)
        view = Episode(
            prompt=session.prompt,
            reference=task.reference,
            info=task.info,
            turns=tuple(state.turns),
            prompt_tokens=len(prompt_ids),
            finish_reason=completion.finish_reason if turn.done else "length",
        )
        return PlayedEpisode(transcript, view, state.env_rewards, state.metrics)
