"""Vision-language models: packed = unpacked, the distribution without placeholders, and the frozen encoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from slipstream.configs.schema.learner import OptimizerConfig
from slipstream.env.builtin.colours import Colours
from slipstream.learner.data.images import ImageReader
from slipstream.learner.data.packing import TokenSequence, pack
from slipstream.learner.models.hf_state_dict import HfStateDict
from slipstream.learner.models.load import ModelOptions, load_model
from slipstream.learner.models.optim import build_optimizer
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World
from tests.vision import FAMILIES, IMAGE_TOKEN, PLACEHOLDERS, VOCABULARY, vision_sequences, write_vision_model

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model", request.param)


def load(folder: Path, world: World, *, train_encoder: bool = False) -> Any:
    options = ModelOptions(dtype=torch.float32, attention="segments", train_vision_encoder=train_encoder)
    return load_model(folder, options, world)


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[TokenSequence]:
    return vision_sequences(folder)


def test_packed_is_unpacked_and_depends_on_the_picture(
    folder: Path, world: World, sequences: list[TokenSequence]
) -> None:
    model = load(folder, world)
    (together,) = pack(sequences, token_budget=1000)
    with torch.no_grad():
        packed = score_actions(model, together, temperature=1.0, entropy="value", collision=True)
        alone = {}
        for row, sequence in enumerate(sequences):
            (batch,) = pack([sequence], token_budget=1000)
            alone[row] = score_actions(model, batch, temperature=1.0, entropy="value", collision=True)
        expected = [alone[row] for row in together.rows_B.tolist()]
        for name in ("logprobs_A", "entropy_A", "collision_A"):
            together_A = torch.cat([getattr(each, name) for each in expected])
            assert (getattr(packed, name) - together_A).abs().max() < TOLERANCE
        other = Colours().task("train", 7)
        read = ImageReader(folder).read(sequences[2].token_ids, other.images)
        (batch,) = pack([TokenSequence(sequences[2].token_ids, sequences[2].action_mask, read)], token_budget=1000)
        changed = score_actions(model, batch, temperature=1.0).logprobs_A
    assert (changed - alone[2].logprobs_A).abs().max() > 100 * TOLERANCE


def test_log_probs_are_those_of_transformers(folder: Path, world: World, sequences: list[TokenSequence]) -> None:
    model, (batch,) = load(folder, world), pack(sequences, token_budget=1000)
    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    with torch.no_grad():
        packed = score_actions(model, batch, temperature=1.0, whole_vocabulary=True).logprobs_A
        for row in batch.rows_B.tolist():
            ids, images = torch.from_numpy(sequences[row].token_ids)[None], sequences[row].images
            inputs = {} if images is None else {"pixel_values": images.pixels_PD, "image_grid_thw": images.grids_I3}
            kinds = (ids == IMAGE_TOKEN).int()  # by which transformers finds positions
            logits = plain(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits[0, :-1]
            found.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[-3:, 0])
    assert (packed - torch.cat(found)).abs().max() < TOLERANCE


@pytest.mark.parametrize("whole", [False, True])
def test_placeholders_have_no_probability(
    folder: Path, world: World, sequences: list[TokenSequence], whole: bool
) -> None:
    model, (batch,) = load(folder, world), pack([sequences[2]], token_budget=1000)
    actions = [replace(batch, actions_S=torch.full_like(batch.actions_S, token)) for token in range(VOCABULARY)]
    with torch.no_grad():
        logprobs = [score_actions(model, each, temperature=0.7, whole_vocabulary=whole).logprobs_A for each in actions]
    probabilities_AV = torch.stack(logprobs, dim=-1).exp()
    assert (probabilities_AV.sum(-1) - 1).abs().max() < TOLERANCE
    assert bool((probabilities_AV[:, PLACEHOLDERS] > 0).any()) == whole
    assert (probabilities_AV > 0).sum() == probabilities_AV.numel() - (0 if whole else 3 * len(PLACEHOLDERS))


@pytest.mark.parametrize("train_encoder", [False, True])
def test_encoder_is_trained_only_where_it_is_configured(
    folder: Path, world: World, sequences: list[TokenSequence], train_encoder: bool
) -> None:
    model = load(folder, world, train_encoder=train_encoder)
    optimizer = build_optimizer(model, OptimizerConfig())
    (batch,) = pack(sequences, token_budget=1000)
    scores = score_actions(model, batch, temperature=1.0, entropy="gradient")
    assert scores.entropy_A is not None
    torch.autograd.backward(scores.logprobs_A.sum() + scores.entropy_A.sum())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients.values())
    trained = {name for name, gradient in gradients.items() if gradient is not None and gradient.abs().max() > 0}
    assert any("visual" in name for name in trained) == train_encoder
    assert "model.language_model.layers.0.mlp.up_proj.weight" in trained
    assert sum(len(group["params"]) for group in optimizer.param_groups) == sum(
        train_encoder or "visual" not in name for name in gradients
    )


def test_published_names_are_those_of_the_files(folder: Path, world: World) -> None:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as file:
        saved = set(file.keys())
    assert set(HfStateDict(load(folder, world), dtype=torch.float32).tensors) == saved
