"""The group of a ticket: its episodes, played at once, and a greedy baseline where the ticket asks for one."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from slipstream.buffer.wire import messages as m
from slipstream.configs.runtime.logging import get_log
from slipstream.env.base import Split
from slipstream.rollout_servers.rollouts.base import EpisodeFailed, first_error, image_id
from slipstream.rollout_servers.rollouts.player import Player, Scored, Unscored

log = get_log("rollout.group")


async def play_group(player: Player, ticket: m.Ticket, *, on_generated: Callable[[], None]) -> tuple[m.Group, int]:
    """The group of a ticket, and the number of tokens that were generated for it.

    Tasks of an evaluation fail one by one: the group lacks their episodes and counts them by reason.

    Args:
        on_generated: called once the engine is no longer needed, whether that succeeded or not.

    Raises: EpisodeFailed, of an evaluation when all tasks fail; EngineError when the engine is dead.
    """
    split: Split = "eval" if ticket.kind == m.EVAL else "train"
    failures: list[EpisodeFailed] = []
    images: dict[str, bytes] = {}
    generating = set(ticket.indices)

    async def play(index: int) -> Scored:
        try:
            try:
                unscored = await player.generate(split, index, samples=ticket.samples)
            finally:
                generating.discard(index)
                if not generating:
                    on_generated()
            if split == "eval":
                _require_version(ticket, unscored)
            images.update(_images(unscored))
            return await player.score(unscored)
        except EpisodeFailed as error:
            failures.append(error)
            if len(failures) == len(ticket.indices):
                raise
            log.warning("held-out task failed", ticket=ticket.id, reason=error.reason, detail=error.detail)
            return Scored([])

    try:
        async with asyncio.TaskGroup() as tasks:
            played = [tasks.create_task(play(index)) for index in ticket.indices]
            baselines = [
                tasks.create_task(player.play(split, index, samples=1, greedy=True))
                for index in ticket.indices
                if ticket.greedy
            ]
    except BaseExceptionGroup as errors:
        _, others = errors.split(EpisodeFailed)
        raise others or first_error(EpisodeFailed, errors) or errors from None
    return _group(
        ticket,
        [task.result() for task in played],
        baseline=[trajectory for task in baselines for trajectory in task.result()],
        failures=Counter(failure.reason for failure in failures),
        images=images,
    )


def _images(unscored: Unscored) -> dict[str, bytes]:
    """The images of all episodes, each once."""
    transcripts = [transcript for episode in unscored.played.episodes for transcript in episode.transcripts]
    return {image_id(image.encoded): image.encoded for transcript in transcripts for image in transcript.images}


def _group(
    ticket: m.Ticket,
    by_task: Sequence[Scored],
    *,
    baseline: Sequence[m.Trajectory],
    failures: Mapping[str, int],
    images: dict[str, bytes],
) -> tuple[m.Group, int]:
    """The group with its episodes numbered across tasks, and its number of action tokens, the baseline's included."""
    trajectories: list[m.Trajectory] = []
    lost = defaultdict[str, list[int]](list)
    count = 0
    for found in by_task:
        trajectories += [msgspec.structs.replace(each, episode=count + each.episode) for each in found.trajectories]
        count = trajectories[-1].episode + 1 if trajectories else 0
        for reason, lengths in found.lost.items():
            lost[reason] += lengths
    group = m.Group(
        id=ticket.id,
        kind=ticket.kind,
        epoch=ticket.epoch,
        indices=ticket.indices,
        trajectories=trajectories,
        missing=ticket.samples * len(ticket.indices) - count,
        lost=dict(lost),
        failures=dict(failures),
        greedy_reward=baseline[0].reward if baseline else None,
        images=images,
    )
    tokens = sum(sum(trajectory.action_mask) for trajectory in [*trajectories, *baseline])
    return group, tokens + sum(map(sum, lost.values()))


def _require_version(ticket: m.Ticket, unscored: Unscored) -> None:
    """Raises: EpisodeFailed when some tokens are of another version than the evaluation's."""
    episodes = unscored.played.episodes
    others = {version for episode in episodes for version in episode.versions} - {ticket.version}
    if others:
        detail = f"evaluation of version {ticket.version}: tokens are of {sorted(others)} too"
        raise EpisodeFailed("superseded", detail, sum(episode.action_tokens for episode in episodes))
