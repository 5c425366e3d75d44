"""Random groups, stored as frames, and training steps on them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import action_mask, behaviour_logprobs, decode_group, encode
from slipstream.configs import RunConfig
from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.prepare import StepPreparer
from slipstream.learner.data.balance import SequenceCost, balance_groups
from slipstream.learner.data.buffer_feed import StepData, build_step, group_works, partition_groups
from slipstream.learner.data.prefix_tree import PrefixSharing
from slipstream.learner.models.load import ModelOptions
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl import parts
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.weights.snapshot import Prober

VOCABULARY = 32
RECORDED_STEPS = 4


def run_config(model: Path, folder: Path, **learner: Any) -> RunConfig:
    """A small run on the model in `model`."""
    settings = {
        "steps": 100,
        "groups_per_step": 8,
        "updates_per_step": 2,
        "token_budget": 160,
        "optimizer": {"lr": 3e-3, "warmup_steps": 0, "final_lr_fraction": 1.0},
        **learner,
    }
    return RunConfig.model_validate(
        {
            "run": {"name": "recorded", "dir": str(folder)},
            "model": {"path": str(model), "dtype": "float32"},
            "rollout": {"group_size": 4, "sampling": {"temperature": 0.8}},
            "learner": settings,
        }
    )


def vivid(folder: Path) -> None:
    """Makes a model's matrices ten times as large, so that its outputs depend on the whole context."""
    path = folder / "model.safetensors"
    tensors = {name: tensor * (10 if tensor.ndim == 2 else 1) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def trajectory(
    rng: np.random.Generator,
    *,
    tokens: int,
    versions: Sequence[int] = (0,),
    episode: int = 0,
    begins: NDArray[np.int64] | None = None,
) -> m.Trajectory:
    """A random trajectory: a prompt of a third of the tokens, then an answer whose parts are of `versions`.

    Args:
        begins: tokens whose first ones are the prompt, and with odd episodes also two of the answer.
    """
    prompt = max(1, tokens // 3)
    token_ids = rng.integers(0, VOCABULARY, tokens)
    if begins is not None:
        common = min(tokens, prompt + 2 * (episode % 2), len(begins))
        token_ids[:common] = begins[:common]
    mask = (np.arange(tokens) >= prompt).astype(m.MASK_DTYPE)
    cuts = np.linspace(prompt, tokens, len(versions) + 1).astype(int).tolist()
    logprobs = (rng.normal(-3.0, 0.5, tokens) * mask).astype(m.LOGPROB_DTYPE)
    reward = float(rng.integers(0, 4)) / 3
    return m.Trajectory(
        token_ids=token_ids.astype(m.TOKEN_DTYPE).tobytes(),
        action_mask=mask.tobytes(),
        behaviour_logprobs=logprobs.tobytes(),
        spans=[
            m.VersionSpan(version=version, start=start, end=end)
            for version, start, end in zip(versions, cuts[:-1], cuts[1:], strict=True)
            if start < end
        ],
        reward=reward,
        scores={"exact_match": reward},
        finish_reason="length",
        episode=episode,
    )


def step_groups(step: int, config: RunConfig) -> list[m.Group]:
    """The groups of one step. The longer ones are rank 0's, if two ranks share them, so it gets more micro-batches."""
    groups = []
    for number in range(config.learner.groups_per_step):
        rng = np.random.default_rng([step, number])
        longest = 30 if number % 2 == 0 else 12
        begins = np.random.default_rng([1, step, number]).integers(0, VOCABULARY, longest)
        trajectories = [
            trajectory(
                rng, tokens=int(rng.integers(4, longest)), versions=(max(0, step - 1), step), episode=episode,
                begins=begins,
            )
            for episode in range(config.rollout.group_size)
        ]  # fmt: skip
        groups.append(
            m.Group(id=f"{step}-{number}", kind=m.TRAIN, epoch=0, indices=[number], trajectories=trajectories)
        )
    return groups


def in_turns(group: m.Group, *, seed: int) -> m.Group:
    """The group with observations in its answers, where these are long enough: each has up to three turns."""
    rng, trajectories = np.random.default_rng(seed), []
    for each in group.trajectories:
        mask = action_mask(each).copy()
        first = int(mask.argmax())
        if len(mask) - first >= 6:
            shown = np.sort(rng.choice(np.arange(first + 1, len(mask) - 1), 2, replace=False))
            mask[shown] = 0
        logprobs = behaviour_logprobs(each) * mask
        spans = [
            m.VersionSpan(version=span.version, start=at, end=at + 1)
            for span in each.spans
            for at in range(span.start, span.end)
            if mask[at]
        ]
        trajectories.append(
            replace(each, action_mask=mask.tobytes(), behaviour_logprobs=logprobs.tobytes(), spans=spans)
        )
    return replace(group, trajectories=trajectories)


def mixed_config(config: RunConfig, algorithms: Mapping[str, Any]) -> RunConfig:
    """The run on a mixture of the envs `one` and `two`, with their algorithms."""
    envs = [{"name": "digits", "label": label, "algorithm": algorithms.get(label)} for label in ("one", "two")]
    tree = config.model_dump(mode="json", exclude_unset=True)
    return RunConfig.model_validate(tree | {"env": {"name": "mix", "options": {"envs": envs}}})


def mixed_groups(step: int, config: RunConfig) -> list[m.Group]:
    """The groups of a step with several turns; two of them, both rank 0's of two ranks, are of the env `two`."""
    groups = []
    for number, group in enumerate(step_groups(step, config)):
        label = "two" if number in (2, 4) else "one"
        trajectories = [
            replace(each, scores={**each.scores, f"{m.MIXTURE}{label}": each.reward}) for each in group.trajectories
        ]
        groups.append(in_turns(replace(group, trajectories=trajectories), seed=number))
    return groups


def record(
    folder: Path, steps: int, config: RunConfig, groups_of: Callable[[int, RunConfig], list[m.Group]] = step_groups
) -> None:
    """Writes the frames of some steps' groups."""
    folder.mkdir()
    for step in range(steps):
        for number, group in enumerate(groups_of(step, config)):
            (folder / f"{step}-{number}.msgpack").write_bytes(encode(group))


def recorded_step(
    folder: Path,
    step: int,
    config: RunConfig | TrainStep,
    *,
    rank: int,
    world_size: int,
    cost: SequenceCost | None = None,
    sharing: PrefixSharing | None = None,
) -> StepData:
    """A rank's part of a recorded step: an equal number of groups, or by cost."""
    learner = config.learner
    count, updates = learner.groups_per_step, learner.updates_per_step
    groups = [decode_group((folder / f"{step}-{number}.msgpack").read_bytes()) for number in range(count)]
    assigned, plans = partition_groups(count, updates=updates, rank=rank, world_size=world_size), None
    if cost is not None:
        works = [group_works(group, sharing, token_budget=learner.token_budget) for group in groups]
        shares = [
            balance_groups(works[start : start + count // updates], world_size, budget=learner.token_budget, cost=cost)
            for start in range(0, count, count // updates)
        ]
        assigned = [
            [update * (count // updates) + index for index in by_rank[rank]]
            for update, (by_rank, _) in enumerate(shares)
        ]
        plans = [plan for _, plan in shares]
    return build_step(
        [[(groups[number], 1.0) for number in share] for share in assigned],
        algorithms=config.algorithms,
        rewards=config.rewards,
        step=step,
        consuming_version=step,
        plans=plans,
        sharing=sharing,
    )


def options_of(config: RunConfig) -> ModelOptions:
    """Options of the run's models."""
    return ModelOptions.of(config.model, config.learner)


def build_train_step(config: RunConfig, world: World) -> TrainStep:
    """A learner with the configured model's weights."""
    assert config.model.path is not None, "recorded runs have a model folder"
    return parts.build_train_step(config, config.model.path, world)


def preparer_of(train_step: TrainStep, advantage: Callable[[AdvantageInputs], Tensor] | None = None) -> StepPreparer:
    """The preparation of a step, with another advantage where one is given."""
    prepare = train_step._prepare
    if advantage is None:
        return prepare
    return dataclasses.replace(
        prepare, algorithms=[dataclasses.replace(each, advantage=advantage) for each in prepare.algorithms]
    )


def prober_of(train_step: TrainStep) -> Prober:
    """The prober of the policy."""
    return Prober(train_step.model, tokens=16, vocabulary=VOCABULARY, device=train_step.world.device)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights."""
    return {name: tensor.clone() for name, tensor in full_weights(model)}


def require_same_weights(theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Weights after a few updates by AdamW are equal to 1e-5, all but one in a thousand.

    AdamW divides a gradient by its own magnitude: where that is near zero, its rounding is a visible part of an update
    (the learning rate), of which some hundredths are allowed.
    """
    assert theirs.keys() == mine.keys()
    beyond = count = 0
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-5, atol=1e-4, msg=name)
        beyond += int((~torch.isclose(theirs[name], tensor, rtol=1e-5, atol=1e-5)).sum())
        count += tensor.numel()
    assert beyond <= count / 1000, f"{beyond} of {count}"


def train(
    train_step: TrainStep,
    folder: Path,
    steps: Sequence[int],
    cost: SequenceCost | None = None,
    *,
    shares: bool = True,
) -> list[dict[str, float]]:
    """Trains on recorded steps, shared out by cost where one is given; returns the metrics of each, over all ranks.

    Several ranks compute shared prefixes once where `shares`, and a single one computes each sequence alone.
    """
    figures, world = [], train_step.world
    sharing = PrefixSharing(1) if shares and world.size > 1 and train_step.sharing is not None else None
    for step in steps:
        data = recorded_step(
            folder, step, train_step, rank=world.data_rank, world_size=world.data_size, cost=cost, sharing=sharing
        )
        figures.append(train_step.run(data, unpublished_steps=0))
    return figures
