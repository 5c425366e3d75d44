"""Prompts with images: placeholders, requests, trajectories, and tasks that can't be played."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import action_mask, decode_group, encode_group, token_ids
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.base import Action, Split, Task, Turn
from slipstream.env.builtin.colours import Colours
from slipstream.models.images import ImageError
from slipstream.models.tokenizer import PromptError, Tokenizer
from slipstream.rollout_servers.engines.base import Completion, Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.placeholders import ImagePlaceholders
from slipstream.rollout_servers.prompt_filter import without_long_prompts
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.player import play_group
from slipstream.rollout_servers.tally import Tally
from tests.rollout_servers.scripted import ScriptedEngine, build_player, completion
from tests.vision import IMAGE_TOKEN, write_vision_model

TASK = Colours(images=2).task("train", 0)
IMAGES: tuple[bytes, ...] = tuple(TASK.images)
EOS = 6
TOKENS_OF_IMAGE = 4


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


@dataclass
class Pictures:
    """An env of one task, or of one session that shows its picture in the first of two turns."""

    of: Task = TASK
    eval_tasks: int = 0

    def size(self, split: Split) -> int:
        return 3 if split == "train" else self.eval_tasks

    def task(self, split: Split, index: int) -> Task:
        return self.of

    def fingerprint(self) -> str:
        return "pictures"


class TwoTurns(Pictures):
    """Asks a second question about the same picture."""

    def session(self, task: Task) -> "TwoTurns":
        self.turns = [Turn([{"role": "user", "content": "again?"}]), Turn(done=True)]
        return self

    async def reset(self) -> Any:
        return self.of.prompt

    async def step(self, action: Action) -> Turn:
        return self.turns.pop(0)

    async def close(self) -> None:
        return None


@dataclass
class Recording(ScriptedEngine):
    """Keeps the requests."""

    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        return [completion([10, EOS])] * request.samples


def config_of(model: Path, **rollout: Any) -> RunConfig:
    rollout = {"engine": {"max_model_len": 128}, "sampling": {"max_tokens": 8}} | rollout
    return RunConfig.model_validate(
        {"model": {"path": model}, "env": {"name": "colours"}, "scoring": {"workers": 0}, "rollout": rollout}
    )


def test_each_image_has_as_many_placeholders_as_tokens(vision_model: Path) -> None:
    placeholders = ImagePlaceholders.of(vision_model)
    assert placeholders is not None
    prompt = Tokenizer(vision_model).encode(TASK.prompt)
    assert prompt.count(IMAGE_TOKEN) == 2
    expanded, images = placeholders.expand(prompt, IMAGES)
    assert [image.encoded for image in images] == list(IMAGES)
    for image in images:
        assert expanded[image.start : image.start + image.tokens] == [IMAGE_TOKEN] * TOKENS_OF_IMAGE
    assert Request(expanded, 1.0, images=images).compact_ids == prompt
    assert len(expanded) == len(prompt) + 2 * (TOKENS_OF_IMAGE - 1)


@pytest.mark.parametrize("images", [(), IMAGES[:1], (*IMAGES, IMAGES[0])])
def test_placeholders_and_images_must_match(vision_model: Path, images: Sequence[bytes]) -> None:
    placeholders, prompt = ImagePlaceholders(vision_model), Tokenizer(vision_model).encode(TASK.prompt)
    with pytest.raises(PromptError, match=f"2 .* {len(images)} "):
        placeholders.expand(prompt, images)
    with pytest.raises(ImageError):
        placeholders.expand(prompt, (IMAGES[0], b"no image"))


async def test_group_has_each_image_once(vision_model: Path) -> None:
    engine = Recording()
    same = Task(TASK.prompt, TASK.reference, images=[IMAGES[0]] * 2)
    player = build_player(config_of(vision_model), vision_model, engine, env=Pictures(same))
    ticket = m.Ticket(id="1", kind=m.TRAIN, epoch=0, indices=[0], samples=3, version=0)
    group = await play_group(player, ticket, Tally(), on_generated=lambda: None)
    group = decode_group(encode_group(group))
    assert list(group.images.values()) == [IMAGES[0]]
    assert [each.images for each in group.trajectories] == [[next(iter(group.images))] * 2] * 3
    (request,) = engine.requests
    first = group.trajectories[0]
    assert token_ids(first).tolist() == [*request.prompt_ids, 10, EOS]
    assert action_mask(first).sum() == 2


@pytest.mark.parametrize("history", ["sampled", "template"])
async def test_later_turns_have_the_images_of_the_prompt(vision_model: Path, history: str) -> None:
    engine = Recording()
    rollout = {"episode": {"history": history, "tokens": 60}}
    player = build_player(config_of(vision_model, **rollout), vision_model, engine, env=TwoTurns())
    (trajectory,) = await player.play("train", 0, samples=1)
    first, second = engine.requests
    assert [image.encoded for image in second.images] == [image.encoded for image in first.images] == list(IMAGES)
    assert second.compact_ids[: len(first.compact_ids)] == first.compact_ids
    assert second.compact_ids.count(IMAGE_TOKEN) == len(trajectory.images) == 2
    assert token_ids(trajectory).tolist()[: len(second.prompt_ids)] == list(second.prompt_ids)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Task("x", "", images=[b"no image"]), "image_unreadable"),
        (Task("x", "", images=["/none.png"]), "image_unreadable"),
        (Task([{"role": "user", "content": [{"type": "image"}]}], ""), "image_unreadable"),
        (Task([{"role": "user", "content": "<|image_pad|>"}], ""), "prompt_untokenizable"),
        (Task("x", "", images=[IMAGES[0]] * 40), "prompt_too_long"),
    ],
)
async def test_task_without_usable_images_fails_alone(vision_model: Path, task: Task, reason: str) -> None:
    player = build_player(config_of(vision_model), vision_model, Recording(), env=Pictures(task))
    with pytest.raises(EpisodeFailed) as failed:
        await player.play("train", 0, samples=1)
    assert failed.value.reason == reason


async def test_model_of_texts_takes_no_images(model: Path) -> None:
    task = Task("12r", "", images=IMAGES[:1])
    player = build_player(config_of(model), model, Recording(), env=Pictures(task))
    with pytest.raises(EpisodeFailed, match="no images"):
        await player.play("train", 0, samples=1)


def test_prompts_are_measured_with_their_images(vision_model: Path) -> None:
    tokens = len(ImagePlaceholders(vision_model).expand(Tokenizer(vision_model).encode(TASK.prompt), IMAGES)[0])
    env, tokenizer = Pictures(), Tokenizer(vision_model)
    fits = config_of(vision_model, engine={"max_model_len": tokens + 8}).rollout
    assert without_long_prompts(env, tokenizer, fits) is env
    with pytest.raises(ConfigError):
        without_long_prompts(env, tokenizer, config_of(vision_model, engine={"max_model_len": tokens + 7}).rollout)


@pytest.mark.parametrize("engine", ["hf", "sglang"])
async def test_engine_without_images_is_refused(vision_model: Path, engine: str) -> None:
    config = config_of(vision_model, engine={"name": engine})
    with pytest.raises(ConfigError, match=f"rollout.engine.name={engine}"):
        await start_engine(config, vision_model, eos_token_ids=(EOS,))
