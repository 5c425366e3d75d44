"""Teachers in training steps: their own weights, contexts, engines, several of them, averages and checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.checkpoint import TrainState, load_checkpoint, save_checkpoint
from slipstream.learner.data.buffer_feed import StepData
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.models.digits import build_digits_model
from tests.learner.recorded import build_train_step, recorded_step, train, vivid, weights_of

MakeConfig = Callable[..., RunConfig]
TEMPERATURE = 0.8
PROMPT = np.array([5, 7, 3, 9, 11], dtype=m.TOKEN_DTYPE)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another model with the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "digits"
    build_digits_model(folder, seed=2)
    vivid(folder)
    return folder


def distilling(make_config: MakeConfig, loss: str, *teachers: dict[str, Any], **more: Any) -> RunConfig:
    distill = {"teachers": [*teachers], "loss": loss, **more}
    return make_config(distill=distill, updates_per_step=1, streams={"rl": 0, "ref_kl": 1})


def with_rows(data: StepData, change: Callable[[int, m.Trajectory], m.Trajectory]) -> StepData:
    return replace(data, trajectories=[change(row, each) for row, each in enumerate(data.trajectories)])


def logprobs_of(folder: Path, trajectories: Sequence[m.Trajectory], prompt: Any = None) -> list[Tensor]:
    """Distributions [A, V] at the actions of each trajectory, by transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for each in trajectories:
        ids, start = token_ids(each), int(action_mask(each).argmax())
        ids, start = (ids, start) if prompt is None else (np.concatenate([prompt, ids[start:]]), len(prompt))
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, start - 1 : -1]
        found.append((logits / TEMPERATURE).log_softmax(-1))
    return found


def actions_of(trajectory: m.Trajectory) -> Tensor:
    ids = token_ids(trajectory)[action_mask(trajectory).astype(bool)]
    return torch.from_numpy(ids.astype(np.int64))


def first_step(config: RunConfig, groups: Path) -> StepData:
    return recorded_step(groups, 0, config, rank=0, world_size=1)


@pytest.mark.parametrize("context", [None, "{prompt}{reference}"])
@pytest.mark.parametrize("loss", ["reverse_kl", "advantage"])
def test_metrics_are_those_of_the_distributions(
    world: World,
    make_config: MakeConfig,
    groups: Path,
    digits_model: Path,
    teacher: Path,
    loss: str,
    context: str | None,
) -> None:
    config = distilling(make_config, loss, {"model": str(teacher), "context": context})
    data = first_step(config, groups)
    if context is not None:
        data = with_rows(data, lambda row, each: msgspec.structs.replace(each, teacher_prompt=PROMPT.tobytes()))
    policy = logprobs_of(digits_model, data.trajectories)
    taught = logprobs_of(teacher, data.trajectories, None if context is None else PROMPT)
    values, agreed = [], []
    for own_AV, other_AV, each in zip(policy, taught, data.trajectories, strict=True):
        if loss == "advantage":
            values.append((own_AV - other_AV).gather(1, actions_of(each)[:, None])[:, 0])
        else:
            values.append((own_AV.exp() * (own_AV - other_AV)).sum(-1))
            agreed.append((own_AV.argmax(-1) == other_AV.argmax(-1)).float())
    figures = build_train_step(config, world).run(data, unpublished_steps=0)
    assert figures["distill/kl"] == pytest.approx(torch.cat(values).mean().item(), rel=1e-4)
    assert figures["distill/share"] == 1
    if agreed:
        assert figures["distill/agreement"] == pytest.approx(torch.cat(agreed).mean().item())


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jsd", "advantage"])
def test_distillation_alone_brings_the_policy_to_its_teacher(
    world: World, make_config: MakeConfig, groups: Path, teacher: Path, loss: str
) -> None:
    config = distilling(make_config, loss, {"model": str(teacher)})
    train_step = build_train_step(config.model_copy(update={"rewards": ()}), world)
    # The same answers again and again: the ones of the policy would be others, so the advantage has a weaker hold.
    data = first_step(config, groups)
    figures = [train_step.run(data, unpublished_steps=0) for _ in range(8)]
    assert figures[-1]["distill/kl"] < (0.9 if loss == "advantage" else 0.6) * figures[0]["distill/kl"]


def test_streams_add_up(world: World, make_config: MakeConfig, groups: Path, teacher: Path) -> None:
    losses = {}
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.5, 2.0)):
        distill = {"teachers": [{"model": str(teacher)}]} if weights[1] else None
        config = make_config(
            distill=distill, updates_per_step=1, streams=dict(zip(("rl", "ref_kl"), weights, strict=True))
        )
        losses[weights] = build_train_step(config, world).run(first_step(config, groups), unpublished_steps=0)["loss"]
    assert losses[0.5, 2.0] == pytest.approx(0.5 * losses[1.0, 0.0] + 2 * losses[0.0, 1.0], rel=1e-4)


def test_an_engine_gives_what_the_same_model_gives_here(
    world: World, make_config: MakeConfig, groups: Path, teacher: Path
) -> None:
    for loss, more in (("advantage", {}), ("forward_kl", {"top_k": 4})):
        here = distilling(make_config, loss, {"model": str(teacher)}, **more)
        # Past the check of the temperature, which the values below have.
        assert here.learner.distill is not None
        engine = here.learner.distill.teachers[0].model_copy(update={"model": None, "url": "http://127.0.0.1:1"})
        distill = here.learner.distill.model_copy(update={"teachers": (engine,)})
        there = here.model_copy(update={"learner": here.learner.model_copy(update={"distill": distill})})
        data = first_step(here, groups)
        taught = logprobs_of(teacher, data.trajectories)

        def scored(row: int, each: m.Trajectory, taught: list[Tensor] = taught) -> m.Trajectory:
            top = taught[row].topk(4)
            return msgspec.structs.replace(
                each,
                teacher_logprobs=taught[row].gather(1, actions_of(each)[:, None]).numpy().tobytes(),
                teacher_top_ids=top.indices.to(torch.int32).numpy().tobytes(),
                teacher_top_logprobs=top.values.numpy().tobytes(),
            )

        figures = [
            build_train_step(config, world).run(given, unpublished_steps=0)
            for config, given in ((here, data), (there, with_rows(data, scored)))
        ]
        for name, value in figures[0].items():
            assert figures[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (loss, name)


def test_several_teachers_score_the_answers_of_their_envs(
    world: World, make_config: MakeConfig, groups: Path, teacher: Path
) -> None:
    config = distilling(make_config, "forward_kl", {"model": str(teacher), "env": "a"}, {"env": "b"})
    data = first_step(config, groups)
    labels = ["abc"[row % 3] for row in range(len(data.trajectories))]
    data = with_rows(
        data, lambda row, each: msgspec.structs.replace(each, scores={**each.scores, f"mix/{labels[row]}": 0})
    )
    sizes = [len(actions_of(each)) for each in data.trajectories]
    only_a = distilling(make_config, "forward_kl", {"model": str(teacher), "env": "a"})
    figures, of_a = (build_train_step(each, world).run(data, unpublished_steps=0) for each in (config, only_a))
    a, b = (sum(size for size, label in zip(sizes, labels, strict=True) if label == wanted) for wanted in "ab")
    assert figures["distill/share"] == pytest.approx((a + b) / sum(sizes))
    # The policy is its initial weights, with which env b's teacher agrees.
    assert figures["distill/kl"] == pytest.approx(of_a["distill/kl"] * a / (a + b), rel=1e-4)


def test_answers_without_a_context_are_not_distilled(world: World, make_config: MakeConfig, groups: Path) -> None:
    config = distilling(make_config, "reverse_kl", {"weights": "present", "context": "{prompt} {solution}"})
    data = first_step(config, groups)
    given = with_rows(
        data, lambda row, each: msgspec.structs.replace(each, teacher_prompt=PROMPT.tobytes() if row % 2 else b"")
    )
    figures = build_train_step(config, world).run(given, unpublished_steps=0)
    sizes = [len(actions_of(each)) for each in data.trajectories]
    assert figures["distill/share"] == pytest.approx(sum(sizes[1::2]) / sum(sizes))
    assert figures["distill/kl"] > 0
    assert "distill/kl" not in build_train_step(config, world).run(data, unpublished_steps=0)


def mean_weights(train_step: TrainStep) -> dict[str, Tensor]:
    assert train_step.teachers is not None, "the run has teachers"
    return {name: tensor.clone() for name, tensor in train_step.teachers.averages["teacher_0"][0].named_parameters()}


def test_average_follows_the_policy_and_is_restored(
    world: World, make_config: MakeConfig, groups: Path, tmp_path: Path
) -> None:
    distill = {"teachers": [{"weights": "average", "average_rate": 0.25}], "loss": "jsd"}
    config = make_config(distill=distill, updates_per_step=1, streams={"ref_kl": 1})  # rewards move the policy
    train_step = build_train_step(config, world)
    initial = weights_of(train_step.model)
    (first,) = train(train_step, groups, [0])
    assert first["distill/kl"] == pytest.approx(0, abs=1e-6)
    for name, mean in mean_weights(train_step).items():
        torch.testing.assert_close(mean, initial[name].lerp(weights_of(train_step.model)[name], 0.25))
    save_checkpoint(tmp_path / "saved", train_step.trained, TrainState(step=1), world, keep=1)
    (wanted,) = train(train_step, groups, [1])
    assert wanted["distill/kl"] > 1e-5
    restored = build_train_step(config, world)
    assert load_checkpoint(tmp_path / "saved", restored.trained, world, TrainState) is not None
    assert train(restored, groups, [1]) == [wanted]


def test_teacher_with_other_tokens_is_refused_by_name(
    world: World, make_config: MakeConfig, teacher: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in teacher.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = msgspec.json.decode((other / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    with pytest.raises(ConfigError, match=r"learner\.distill\.teachers\.0\.model=.*other"):
        build_train_step(distilling(make_config, "jsd", {"model": str(other)}), world)
