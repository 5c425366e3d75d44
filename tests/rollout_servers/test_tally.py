"""Every token that an engine samples for a ticket is in its group, or unused for a reason."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.env.base import Env, Split, Task
from slipstream.env.builtin.mix import Mix, Part
from slipstream.rollout_servers.engines.base import Completion, Engine, EngineError, Request
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.player import play_group
from slipstream.rollout_servers.tally import BASELINE, ENGINE_CRASH, UNFINISHED, Tally
from slipstream.rollout_servers.tickets import TicketBook
from tests.rollout_servers.scripted import ScriptedEngine, build_player, completion, ids, lasting

DONE = completion(ids("21"))
CUT = completion(ids("2"), finish_reason="abort")


class Rows:
    """Two tasks in each split; `fails`: the second one's reward can't be computed."""

    def __init__(self, *, fails: bool = False) -> None:
        self._references = ("21", None if fails else "21")

    def size(self, split: Split) -> int:
        return 2

    def task(self, split: Split, index: int) -> Task:
        return Task("12r", self._references[index])  # type: ignore[arg-type]

    def fingerprint(self) -> str:
        return "rows"


class Several(ScriptedEngine):
    """As many answers as were asked for."""

    async def generate(self, request: Request) -> list[Completion]:
        return (await super().generate(request))[: request.samples]


def config_of(**rollout: Any) -> RunConfig:
    limits = {"engine": {"max_model_len": 10}, "sampling": {"max_tokens": 4}, "group_size": 2}
    return RunConfig.model_validate(
        {
            "model": {"build": "digits"}, "env": {"name": "rows"}, "scoring": {"workers": 0},
            "rewards": [{"name": f"{__name__}:needs_reference"}], "rollout": limits | rollout,
        }
    )  # fmt: skip


def needs_reference(answer: str, reference: str, info: Mapping[str, Any]) -> float:
    return float(len(reference))


def tokens_of(group: m.Group) -> int:
    """Tokens in the answers of a group, and in those that were lost."""
    masks = [trajectory.action_mask for trajectory in group.trajectories]
    return sum(mask.count(1) for mask in masks) + sum(map(sum, group.lost.values()))


def ticket_for(kind: str, *, samples: int, indices: Sequence[int] = (0,), greedy: bool = False) -> m.Ticket:
    return m.Ticket(
        id="1", kind=kind, epoch=0, indices=list(indices), samples=samples, version=0, greedy=greedy
    )  # fmt: skip


async def play(model: Path, engine: Engine, ticket: m.Ticket, env: Env | None = None, **rollout: Any) -> m.Group:
    """The group of a ticket, whose tokens are all accounted for."""
    config, tally = config_of(**rollout), Tally()
    player = build_player(config, model, lasting(engine, config.rollout), env=env or Rows())
    group = await play_group(player, ticket, tally, on_generated=lambda: None)
    assert tally.sampled == tokens_of(group) + sum(group.unused.values()) > 0
    assert tally.env == ("" if ticket.kind == m.EVAL else "rows")
    return group


async def test_unfinished_answers_and_the_baseline_are_unused(model: Path) -> None:
    engine = Several([DONE, CUT, DONE])
    ticket = ticket_for(m.TRAIN, samples=3, greedy=True)
    group = await play(model, engine, ticket, group_size=3, min_episodes=2)
    assert group.unused == {UNFINISHED: 1, BASELINE: 2}


async def test_failed_held_out_task_is_unused(model: Path) -> None:
    ticket = ticket_for(m.EVAL, samples=1, indices=[0, 1])
    group = await play(model, Several([DONE]), ticket, env=Rows(fails=True))
    assert group.unused == {"reward_error": 2}


async def test_failed_group_has_all_its_tokens_under_its_reason(model: Path) -> None:
    config, tally = config_of(), Tally()
    player = build_player(config, model, lasting(Several([DONE, CUT]), config.rollout), env=Rows())
    with pytest.raises(EpisodeFailed) as failed:
        await play_group(player, ticket_for(m.TRAIN, samples=2, greedy=True), tally, on_generated=lambda: None)
    assert failed.value.reason == "generation_timeout"
    # The greedy answer may have been cancelled before it had a token.
    assert tally.unused.total() == tally.sampled
    assert tally.sampled in (2 + 1, 2 + 1 + 2)


async def test_label_of_a_mixture_names_the_env(model: Path) -> None:
    config, book = config_of(), TicketBook()
    tally = book.accept("1", "first")
    assert tally is not None
    mixed = Mix([Part("words", Rows(), 1.0)])
    player = build_player(config, model, lasting(Several([DONE, DONE]), config.rollout), env=mixed)
    await play_group(player, ticket_for(m.TRAIN, samples=2), tally, on_generated=lambda: None)
    assert book.sampled == {"words": {"1": 4}}
    book.settle("1")
    assert book.sampled == {}


@pytest.mark.parametrize(
    ("unfinished", "crashed"), [(None, 3), ([completion(ids("2"), finish_reason="abort")], 2)], ids=["lost", "kept"]
)
async def test_tokens_of_a_crashed_engine(unfinished: Sequence[Completion] | None, crashed: int) -> None:
    """The engine reports 3 tokens, then crashes and returns those in `unfinished`."""

    class Crashing(ScriptedEngine):
        async def generate(self, request: Request) -> list[Completion]:
            request.tally.follow(lambda: 3)
            raise EngineError("died", unfinished)

    async def restart() -> Engine:
        return Several([DONE])

    tally = Tally()
    engine = RestartingEngine(Crashing(), restart, config_of().rollout)
    (answer,) = await engine.generate(Request([3], deadline_s=60.0, tally=tally))
    assert tally.unused == {ENGINE_CRASH: crashed}
    assert tally.sampled == len(answer.token_ids) + crashed
    await engine.close()


async def test_cancelled_request_keeps_its_tokens() -> None:
    class Stuck(ScriptedEngine):
        async def generate(self, request: Request) -> list[Completion]:
            request.tally.follow(lambda: 3)
            return await asyncio.Future()

    tally = Tally()
    asking = asyncio.create_task(lasting(Stuck(), config_of().rollout).generate(Request([3], 60.0, tally=tally)))
    async with asyncio.timeout(60):
        while tally.sampled != 3:
            await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert (tally.sampled, tally.unused.total()) == (3, 0)
    tally.lose("env_error")
    assert tally.unused == {"env_error": 3}
