"""The group of a ticket: tasks of the env, played by a rollout and scored by the rewards."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.errors import ConfigError, format_error
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.threads import SerialThread
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.run import ENV_SCORE
from slipstream.env.base import Env, Split, Task, gives_rewards, has_sessions, runs_agents
from slipstream.env.builtin.mix import LABEL
from slipstream.env.images import has_images, separate_images
from slipstream.models.images import ImageError
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.answers import majority
from slipstream.rewards.base import Failure
from slipstream.rewards.compose import EpisodeReward
from slipstream.rewards.functions.text import OVERLONG, overlong
from slipstream.rewards.scorer import Scorer
from slipstream.rollout_servers.engines.base import Engine
from slipstream.rollout_servers.placeholders import ImagePlaceholders
from slipstream.rollout_servers.rollouts.base import (
    AnswerGenerator,
    EpisodeFailed,
    Played,
    PlayedEpisode,
    Rollout,
    SingleTurn,
    first_error,
    image_id,
)
from slipstream.rollout_servers.rollouts.gateway.rollout import AgentRollout
from slipstream.rollout_servers.rollouts.gateway.sessions import Gateway
from slipstream.rollout_servers.rollouts.multi_turn import MultiTurn
from slipstream.rollout_servers.rollouts.record import Keep, TicketRecord
from slipstream.rollout_servers.rollouts.teaching import Answered, Teaching
from slipstream.rollout_servers.tally import BASELINE, Tally

if TYPE_CHECKING:
    from slipstream.configs import RunConfig

log = get_log("rollout.player")


@dataclass(frozen=True)
class Unscored:
    """The episodes of a task, to be scored until `until`, the event loop's time."""

    split: Split
    index: int
    played: Played
    until: float


@dataclass(frozen=True)
class Scored:
    """The scored episodes of a task.

    Attributes:
        trajectories: with rewards; their episodes are numbered from 0.
        lost: lengths in action tokens of the episodes that could not be scored, by reason.
    """

    trajectories: list[m.Trajectory]
    lost: Mapping[str, list[int]] = field(default_factory=dict)


class Player:
    """Plays episodes of one env with one engine.

    Attributes:
        env: the tasks.
        tokenizer: of the policy.
        scorer: of the episodes.
        teaching: adds what teachers give to trajectories that are trained on; None: there are no teachers.
        gateway: of an env whose episodes agents play; it must serve while they are played.
    """

    def __init__(
        self,
        env: Env,
        tokenizer: Tokenizer,
        engine: Engine,
        scorer: Scorer,
        config: RolloutConfig,
        *,
        env_name: str,
        ticket_deadline_s: float,
        evaluate_env_rewards: bool = True,
    ) -> None:
        """Without `evaluate_env_rewards`, evaluations only record what sessions give.

        Args:
            env_name: names the env in errors.
            ticket_deadline_s: a ticket is void after so long.

        Raises: ConfigError if a reward has the name under which the rewards of sessions are recorded.
        """
        if gives_rewards(env) and ENV_SCORE in scorer.names:
            raise ConfigError(f"rewards: the name {ENV_SCORE!r} is taken by what the sessions of env {env_name!r} give")
        self.env = env
        self.tokenizer = tokenizer
        self.scorer = scorer
        self._config = config
        self._env_name = env_name
        self._ticket_deadline_s = ticket_deadline_s
        self._evaluate_env_rewards = evaluate_env_rewards
        self.teaching: Teaching | None = None
        self._env_thread = SerialThread()
        policy = AnswerGenerator(engine, tokenizer, config, ImagePlaceholders.of(tokenizer.model))
        self._rollout: Rollout
        self.gateway: Gateway | None = None
        if runs_agents(env):
            self.gateway = Gateway(policy)
            self._rollout = AgentRollout(env, self.gateway)
        else:
            self._rollout = MultiTurn(env, policy) if has_sessions(env) else SingleTurn(policy)

    @classmethod
    def from_config(
        cls,
        config: "RunConfig",
        env: Env,
        tokenizer: Tokenizer,
        engine: Engine,
        scorer: Scorer,
        teaching: Teaching | None = None,
    ) -> "Player":
        """The player of a run."""
        player = cls(
            env,
            tokenizer,
            engine,
            scorer,
            config.rollout,
            env_name=config.env.name,
            ticket_deadline_s=config.buffer.ticket_deadline_s,
            evaluate_env_rewards=config.eval.reward is None,
        )
        player.teaching = teaching
        return player

    async def play(self, split: Split, index: int, *, samples: int, greedy: bool = False) -> list[m.Trajectory]:
        """Plays and scores `samples` episodes of one task. Raises: as `generate` and `score` do."""
        return (await self.score(await self.generate(split, index, samples=samples, greedy=greedy))).trajectories

    async def generate(
        self,
        split: Split,
        index: int,
        *,
        samples: int,
        greedy: bool = False,
        tally: Tally | None = None,
        record: TicketRecord | None = None,
    ) -> Unscored:
        """Plays `samples` episodes of one task; the only one of a held-out task is greedy.

        Fewer, but at least `rollout.min_episodes`, if the others were not finished at `rollout.group_deadline_s`.

        Args:
            tally: counts their tokens, and discards those of the others.
            record: of the steps of episodes of several turns, and of those from which they go on.

        Raises: EpisodeFailed when the task, its prompt or its sessions fail, EngineError when the engine is dead.
        """
        now = asyncio.get_running_loop().time
        void_at = now() + self._ticket_deadline_s
        tally = tally or Tally()
        try:
            task = await self._task(split, index)
            tally.name(self._label(task.info) or self._env_name)
            played = await self._rollout.play(
                task,
                samples=samples,
                greedy=greedy or (split == "eval" and samples == 1),
                until=now() + self._config.group_deadline_s,
                tally=tally,
                record=record or TicketRecord(),
            )
            self._require_enough(played, split, samples)
        except EpisodeFailed as error:
            raise self._named(error, split, index) from error
        if played.failure is not None:
            failure, missing = self._named(played.failure, split, index), samples - len(played.episodes)
            log.warning("group lacks episodes", missing=missing, reason=failure.reason, detail=failure.detail)
        return Unscored(split, index, played, void_at)

    async def score(self, unscored: Unscored) -> Scored:
        """Rewards of the episodes; of those to train on some may fail, as long as `rollout.min_episodes` remain.

        Raises: EpisodeFailed.
        """
        episodes, evaluation = unscored.played.episodes, unscored.split == "eval"
        results = await self.scorer.score(
            [episode.view for episode in episodes], until=unscored.until, evaluation=evaluation
        )
        lost = self._lost(unscored, results)
        scored = [
            (episode, result)
            for episode, result in zip(episodes, results, strict=True)
            if not isinstance(result, Failure)
        ]
        trajectories = list[m.Trajectory]()
        for number, (episode, result) in enumerate(scored):
            env_rewards = (episode.env_rewards or ()) if self._evaluate_env_rewards or not evaluation else ()
            shaping = {} if evaluation else self._shaping(episode)
            reward = result.reward + sum(value for _, value in env_rewards) + sum(shaping.values())
            trajectories += episode.trajectories(
                reward=reward,
                scores=result.scores | _env_scores(episode) | shaping | self._mixture_score(episode, reward),
                episode=number,
                turn_rewards=[*result.spans, *env_rewards],
            )
        if self.teaching is not None and not evaluation:
            try:
                trajectories = await self.teaching.add(
                    trajectories,
                    [Answered(episode.view, result) for episode, result in scored],
                    env=self._label(episodes[0].view.info),
                    until=unscored.until,
                )
            except EpisodeFailed as error:
                failed = EpisodeFailed(error.reason, error.detail, [episode.action_tokens for episode in episodes])
                raise self._named(failed, unscored.split, unscored.index) from error
        if evaluation and len(episodes) > 1:
            chosen = majority([episode.view.answer for episode in episodes])
            agreed = next(trajectory.reward for trajectory in trajectories if trajectory.episode == chosen)
            for trajectory in trajectories:
                trajectory.scores[m.MAJORITY] = agreed
        return Scored(trajectories, lost)

    def _lost(self, unscored: Unscored, results: Sequence[EpisodeReward | Failure]) -> Mapping[str, list[int]]:
        """Lengths of the episodes without a score, by reason. Raises: EpisodeFailed when too few are left."""
        lengths = [episode.action_tokens for episode in unscored.played.episodes]
        failures = [(length, each) for length, each in zip(lengths, results, strict=True) if isinstance(each, Failure)]
        if not failures:
            return {}
        first, left = failures[0][1], len(results) - len(failures)
        if left < self._enough(unscored.split, len(results)):
            failed = EpisodeFailed(first.reason, first.detail, lengths)
            raise self._named(failed, unscored.split, unscored.index)
        lost = defaultdict[str, list[int]](list)
        for length, failure in failures:
            lost[failure.reason].append(length)
        log.warning("episodes not scored", lost=len(failures), left=left, reason=first.reason, detail=first.detail)
        return lost

    def _enough(self, split: Split, samples: int) -> int:
        """Episodes of `samples` without which a task's group is dropped."""
        return min(samples, self._config.fewest_episodes) if split == "train" else samples

    def _mixture_score(self, episode: PlayedEpisode, reward: float) -> dict[str, float]:
        """The reward under the label of the task's env, if the env is a mixture."""
        label = self._label(episode.view.info)
        return {f"{m.MIXTURE}{label}": reward} if label else {}

    def _label(self, info: Mapping[str, Any]) -> str | None:
        """The label of a task's env, if the env is a mixture."""
        label = info.get(LABEL)
        return str(label) if label in getattr(self.env, "labels", ()) else None

    def _require_enough(self, played: Played, split: Split, samples: int) -> None:
        finished = len(played.episodes)
        if finished >= self._enough(split, samples):
            return
        lengths = [episode.action_tokens for episode in played.episodes]
        if played.failure is not None:
            raise EpisodeFailed(played.failure.reason, played.failure.detail, lengths)
        raise EpisodeFailed(
            "generation_timeout",
            f"{finished} of {samples} answers finished within "
            f"rollout.group_deadline_s={self._config.group_deadline_s:g}",
            lengths,
        )

    def _shaping(self, episode: PlayedEpisode) -> dict[str, float]:
        """Additions to an episode's reward for its length, by name."""
        config = self._config.overlong
        if config is None:
            return {}
        penalty = overlong(
            episode.action_tokens,
            truncated=episode.view.ended in m.CUT_OFF,
            max_tokens=self._config.episode_tokens if gives_rewards(self.env) else self._config.sampling.max_tokens,
            cache_tokens=config.cache_tokens,
            penalty=config.penalty,
        )
        return {OVERLONG: penalty}

    async def _task(self, split: Split, index: int) -> Task:
        deadline_s = self._config.group_deadline_s
        try:
            return await self._env_thread.call(self._read_task, split, index, deadline_s=deadline_s)
        except TimeoutError:
            detail = f"no task within rollout.group_deadline_s={deadline_s:g}; tasks are read one at a time"
            raise EpisodeFailed("env_error", detail) from None

    def _read_task(self, split: Split, index: int) -> Task:
        """The env's task; runs in the env's thread. Raises: EpisodeFailed."""
        try:
            task: object = self.env.task(split, index)
            if not isinstance(task, Task) or not isinstance(task.info, Mapping):
                raise TypeError(f"{repr(task)[:200]} is no Task whose info is a mapping")
            if not task.images and not has_images(task.prompt):
                return task
            prompt, images = separate_images(task.prompt, task.images)
            return replace(task, prompt=prompt, images=images)
        except ImageError as error:
            raise EpisodeFailed(error.reason, error.detail) from error
        # User code may raise anything, a SystemExit too: it costs this task and nothing else. Nothing else interrupts
        # this thread: a KeyboardInterrupt or a CancelledError is the env's own.
        except BaseException as error:
            raise EpisodeFailed("env_error", format_error(error)) from error

    def _named(self, error: EpisodeFailed, split: Split, index: int) -> EpisodeFailed:
        """The error with its task's name."""
        detail = f"task ({self._env_name}, {split}, {index}): {error.detail}"
        return EpisodeFailed(error.reason, detail, error.lengths)


def _env_scores(episode: PlayedEpisode) -> dict[str, float]:
    """A session's rewards and metrics, by the name under which they are recorded."""
    if episode.env_rewards is None:
        return {}
    metrics = {f"{ENV_SCORE}/{name}": value for name, value in episode.metrics.items()}
    return {ENV_SCORE: sum(value for _, value in episode.env_rewards)} | metrics


async def play_group(
    player: Player, ticket: m.Ticket, tally: Tally, *, on_generated: Callable[[], None], keep: Keep | None = None
) -> m.Group:
    """The group of a ticket.

    Tasks of an evaluation fail one by one: the group lacks their episodes and counts them by reason.

    Args:
        tally: counts the ticket's tokens.
        on_generated: called once the engine is no longer needed, whether that succeeded or not.
        keep: has the buffer keep the steps of episodes to train on; None: they are lost with this server.

    Raises: EpisodeFailed, of an evaluation when all tasks fail; EngineError when the engine is dead.
    """
    split: Split = "eval" if ticket.kind == m.EVAL else "train"
    failures: list[EpisodeFailed] = []
    images: dict[str, bytes] = {}
    generating = set(ticket.indices)
    record = TicketRecord(ticket.id, tally, None if split == "eval" else keep, ticket.events)

    if split == "eval":
        tally.name("")  # its tasks may be of several envs

    async def generate(index: int, tokens: Tally) -> Unscored:
        try:
            return await player.generate(split, index, samples=ticket.samples, tally=tokens, record=record)
        finally:
            generating.discard(index)
            if not generating:
                on_generated()

    async def play(index: int) -> Scored:
        with tally.part() as tokens:
            try:
                unscored = await generate(index, tokens)
                if split == "eval":
                    _require_version(ticket, unscored)
                images.update(_images(unscored))
                return await player.score(unscored)
            except EpisodeFailed as error:
                tokens.lose(error.reason)
                failures.append(error)
                if len(failures) == len(ticket.indices):
                    raise
                log.warning("held-out task failed", ticket=ticket.id, reason=error.reason, detail=error.detail)
                return Scored([])

    async def play_baseline(index: int) -> float:
        with tally.part() as tokens:
            try:
                unscored = await player.generate(split, index, samples=1, greedy=True, tally=tokens)
                return (await player.score(unscored)).trajectories[0].reward
            finally:
                tokens.lose(BASELINE)

    try:
        async with asyncio.TaskGroup() as tasks:
            played = [tasks.create_task(play(index)) for index in ticket.indices]
            baselines = [tasks.create_task(play_baseline(index)) for index in ticket.indices if ticket.greedy]
    except BaseExceptionGroup as errors:
        _, others = errors.split(EpisodeFailed)
        error = others or first_error(EpisodeFailed, errors) or errors
        if isinstance(error, EpisodeFailed):
            tally.lose(error.reason)
        raise error from None
    tally.lose_untaken()
    return _group(
        ticket,
        [task.result() for task in played],
        greedy_reward=baselines[0].result() if baselines else None,
        failures=Counter(failure.reason for failure in failures),
        images=images,
        unused=tally.unused,
    )


def _images(unscored: Unscored) -> dict[str, bytes]:
    """The images of all episodes, each once."""
    transcripts = [transcript for episode in unscored.played.episodes for transcript in episode.transcripts]
    return {image_id(image.encoded): image.encoded for transcript in transcripts for image in transcript.images}


def _group(
    ticket: m.Ticket,
    by_task: Sequence[Scored],
    *,
    greedy_reward: float | None,
    failures: Mapping[str, int],
    images: dict[str, bytes],
    unused: Mapping[str, int],
) -> m.Group:
    """The group with its episodes numbered across tasks."""
    trajectories: list[m.Trajectory] = []
    lost = defaultdict[str, list[int]](list)
    count = 0
    for scored in by_task:
        trajectories += [
            msgspec.structs.replace(trajectory, episode=count + trajectory.episode)
            for trajectory in scored.trajectories
        ]
        count = trajectories[-1].episode + 1 if trajectories else 0
        for reason, lengths in scored.lost.items():
            lost[reason] += lengths
    return m.Group(
        id=ticket.id,
        kind=ticket.kind,
        epoch=ticket.epoch,
        indices=ticket.indices,
        trajectories=trajectories,
        missing=ticket.samples * len(ticket.indices) - count,
        lost=dict(lost),
        failures=dict(failures),
        greedy_reward=greedy_reward,
        images=images,
        unused=dict(unused),
    )


def _require_version(ticket: m.Ticket, unscored: Unscored) -> None:
    """Raises: EpisodeFailed when some tokens are of another version than the evaluation's."""
    episodes = unscored.played.episodes
    others = {version for episode in episodes for version in episode.versions} - {ticket.version}
    if others:
        detail = f"evaluation of version {ticket.version}: tokens are of {sorted(others)} too"
        raise EpisodeFailed("superseded", detail)
