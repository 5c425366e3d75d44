"""The learner's models have no dropout, whatever their config says: the engine samples without."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from slipstream.configs import RunConfig
from slipstream.learner.checkpoint import export_model
from slipstream.learner.data.packing import all_actions, pack
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.step import Trainer
from tests.learner.recorded import VOCABULARY, build_trainer, run_config

DROPOUT = 0.5
BATCH = pack(
    [all_actions(np.random.default_rng(length).integers(0, VOCABULARY, length)) for length in (9, 14)], token_budget=40
)[0]


@pytest.fixture
def config(digits_model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A run of a model whose attention has dropout, with reference and critic."""
    folder = shutil.copytree(digits_model, tmp_path / "forgetful")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(settings | {"attention_dropout": DROPOUT}), encoding="utf-8")

    def make(**learner: Any) -> RunConfig:
        critic = {"optimizer": {"lr": 3e-3}}
        return run_config(folder, tmp_path, advantage="gae", critic=critic, kl={"coefficient": 0.1}, **learner)

    return make


def scores(trainer: Trainer) -> list[Tensor]:
    """What policy, reference and critic make of the same actions, with gradient."""
    assert trainer.reference is not None and trainer.critic is not None
    logprobs = [score_actions(model, BATCH, temperature=1.0).logprobs_A for model in (trainer.model, trainer.reference)]
    return [*logprobs, trainer.critic.values(BATCH)]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "activation-checkpointing"])
def test_the_same_weights_give_the_same_scores_twice(
    checkpointing: bool, world: World, config: Callable[..., RunConfig]
) -> None:
    trainer = build_trainer(config(activation_checkpointing=checkpointing), world)
    assert trainer.critic is not None
    nn.init.constant_(trainer.critic.model.get_parameter("head.weight"), 0.1)
    for once, again in zip(scores(trainer), scores(trainer), strict=True):
        assert once.std() > 0
        assert torch.equal(once, again)


@pytest.mark.parametrize(("checkpointing", "passes"), [(False, 1), (True, 2)])
def test_activation_checkpointing_recomputes(
    checkpointing: bool, passes: int, world: World, config: Callable[..., RunConfig]
) -> None:
    trainer = build_trainer(config(activation_checkpointing=checkpointing), world)
    assert trainer.critic is not None
    policy: Any = trainer.model
    backbone: Any = trainer.critic.model.backbone
    seen: list[nn.Module] = []
    parts = [policy.model.layers[0].mlp, backbone.layers[0].mlp]
    for part in parts:
        part.register_forward_pre_hook(lambda module, _: seen.append(module))
    for each in scores(trainer):
        if each.requires_grad:
            each.sum().backward()
    assert [seen.count(part) for part in parts] == [passes, passes]


def test_disabled_dropout_is_logged_and_kept_in_the_export(
    world: World, config: Callable[..., RunConfig], make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = config()
    assert run.model.path is not None
    with capture_logs() as logs:
        trainer = build_trainer(run, world)
        build_trainer(make_config(), world)  # of a model without
    said = [(line["model"], line["attention_dropout"]) for line in logs if "dropout" in line["event"]]
    assert said == 3 * [(str(run.model.path), DROPOUT)]
    export_model(run.model.path, tmp_path / "exported", trainer.model, world, dtype=torch.float32)
    exported = json.loads((tmp_path / "exported" / "config.json").read_text(encoding="utf-8"))
    assert exported["attention_dropout"] == DROPOUT
