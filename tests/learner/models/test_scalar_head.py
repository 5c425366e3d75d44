"""Scalar heads: the same numbers as transformers' classifiers, from files and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from slipstream.configs.schema.learner import CriticConfig
from slipstream.learner.algorithms.critic import load_critic
from slipstream.learner.data.packing import TokenSequence, all_actions, pack, whole_sequence
from slipstream.learner.export import export_model
from slipstream.learner.models.load import ModelOptions
from slipstream.learner.models.scalar_head import (
    ScalarModel,
    load_scalar_model,
    save_as_classifier,
    scalar_values,
)
from slipstream.learner.parallel.mesh import World
from tests.contract.experts import write_experts

OPTIONS = ModelOptions(dtype=torch.float32, attention="auto")
TEXTS = [np.array([2, 7, 11, 4, 9]), np.array([3, 5]), np.array([8, 6, 2, 12])]
Kind = Literal["sequences", "tokens"]


def exported(source: Path, folder: Path, world: World, kind: Kind) -> ScalarModel:
    """A model with a random head, and its files in `folder`."""
    model = load_scalar_model(source, OPTIONS, world, bias=kind == "tokens")
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(4))
    save_as_classifier(model, kind)
    export_model(source, folder, model, world, dtype=torch.float32)
    return model


@torch.no_grad()
def values(model: Any, sequences: Sequence[TokenSequence]) -> Tensor:
    (batch,) = pack(sequences, token_budget=64)
    flat: Tensor = scalar_values(model, batch)
    return torch.cat([flat[batch.sequence_A == row] for row in batch.rows_B.argsort()])


@pytest.mark.parametrize("experts", [False, True])
@torch.no_grad()
def test_reward_is_that_of_transformers(experts: bool, digits_model: Path, world: World, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if experts:
        write_experts(source, "qwen3_moe")
    else:
        source = digits_model
    model = exported(source, tmp_path / "saved", world, "sequences")
    rewards = values(model, [whole_sequence(ids) for ids in TEXTS])
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    wanted = [classifier(torch.from_numpy(ids)[None]).logits.item() for ids in TEXTS]
    assert rewards.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    again = load_scalar_model(tmp_path / "saved", OPTIONS, world, bias=False)
    assert values(again, [whole_sequence(ids) for ids in TEXTS]).equal(rewards)


@torch.no_grad()
def test_critic_takes_the_trained_head(digits_model: Path, world: World, tmp_path: Path) -> None:
    model = exported(digits_model, tmp_path / "saved", world, "tokens")
    wanted = values(model, [all_actions(ids) for ids in TEXTS])
    classifier = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved").eval()
    of_files = torch.cat([classifier(torch.from_numpy(ids)[None]).logits[0, :-1, 0] for ids in TEXTS])
    torch.testing.assert_close(wanted, of_files, rtol=1e-5, atol=1e-6)
    critic = load_critic(CriticConfig(path=tmp_path / "saved"), digits_model, OPTIONS, world)
    fresh = load_critic(CriticConfig(path=digits_model), digits_model, OPTIONS, world)
    assert critic is not None and fresh is not None
    assert values(critic.model, [all_actions(ids) for ids in TEXTS]).equal(wanted)
    assert not values(fresh.model, [all_actions(ids) for ids in TEXTS]).any()
