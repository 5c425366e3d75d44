"""Two learner ranks: their results on recorded groups equal those of one rank."""

import json
import re
import shutil
import signal
import socket
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.learner.checkpoint import TrainState, load_checkpoint
from slipstream.learner.models.lora import AdapterStateDict
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from tests.conftest import free_port
from tests.learner.experts import record_with_experts, write_experts
from tests.learner.recorded import (
    RECORDED_STEPS,
    build_train_step,
    mixed_config,
    mixed_groups,
    record,
    recorded_step,
    run_config,
    train,
)
from tests.learner.trainers.rl.two_ranks import (
    OF_ENVS,
    OPTIMIZERS,
    REPLAY,
    STEPS,
    STREAMS,
    VARIANTS,
    variant_of,
    with_learner,
    with_model,
)
from tests.pipeline.forked import run_to_end
from tests.vision import gradient_norms, write_vision_model

DEADLINE_S = 900
"""The ranks train all variants one after the other, which takes minutes on a busy machine."""
pytestmark = pytest.mark.timeout(DEADLINE_S)

COMPUTED_ALONE = {"average", "teacher", "envs"}
"""Variants with teachers, or with targets of a cross-entropy: their sequences share no prefixes."""


@dataclass(frozen=True)
class TwoRanks:
    """The files of two ranks."""

    config: RunConfig
    folder: Path
    """`figures.json` of rank 0, `results-<rank>.json`, `exported/`, and the run's folder with a checkpoint."""

    def results(self, name: str) -> list[Any]:
        """A result of each rank."""
        files = [self.folder / f"results-{rank}.json" for rank in (0, 1)]
        return [json.loads(file.read_text(encoding="utf-8"))[name] for file in files]


@pytest.fixture(scope="module")
def two_ranks(digits_model: Path, forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """Two learner ranks have trained on recorded groups."""
    folder = tmp_path_factory.mktemp("two_ranks")
    config = run_config(digits_model, folder, token_budget=80)
    record(folder / "groups", RECORDED_STEPS, config)
    write_vision_model(folder / "vision")
    described = shutil.copytree(digits_model, folder / "changed") / "config.json"
    described.write_text(f"{described.read_text()}\n")
    write_experts(folder / "experts")
    record_with_experts(folder / "groups-with-experts", 2, config)
    record(folder / "groups-of-envs", 2, config, mixed_groups)
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    run_to_end(
        forks, "tests.learner.trainers.rl.two_ranks", folder, free_port(),
        output=folder / "output", deadline_s=0.9 * DEADLINE_S,
    )  # fmt: skip
    return TwoRanks(config, folder)


@pytest.mark.parametrize("balanced", [False, True], ids=["equal-groups", "equal-cost"])
def test_two_ranks_have_losses_of_one(two_ranks: TwoRanks, world: World, balanced: bool) -> None:
    config = two_ranks.config
    alone = train(build_train_step(config, world), two_ranks.folder / "groups", range(STEPS))
    together = json.loads((two_ranks.folder / "figures.json").read_text(encoding="utf-8"))
    if balanced:
        together = two_ranks.results("balanced")[0]
    assert len(together) == STEPS
    for mine, theirs in zip(alone, together, strict=True):
        assert mine["actions"] == theirs["actions"]
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert theirs["kl_k3"] == pytest.approx(mine["kl_k3"], rel=1e-4)


def test_recorded_shares_differ_in_micro_batches(two_ranks: TwoRanks) -> None:
    """Otherwise no rank would run out of micro-batches."""
    shares = [
        recorded_step(two_ranks.folder / "groups", 0, two_ranks.config, rank=rank, world_size=2) for rank in (0, 1)
    ]
    for mine, theirs in zip(shares[0].updates, shares[1].updates, strict=True):
        assert len(mine) > len(theirs)
    lengths = {len(trajectory.action_mask) for share in shares for trajectory in share.trajectories}
    assert len(lengths) > 5


@pytest.mark.parametrize("variant", [*VARIANTS, "envs"])
def test_objective_is_independent_of_ranks(variant: str, two_ranks: TwoRanks, world: World) -> None:
    groups = two_ranks.folder / "groups"
    if variant == "envs":
        config, groups = (
            mixed_config(with_learner(two_ranks.config, STREAMS), OF_ENVS),
            groups.with_name("groups-of-envs"),
        )
    else:
        config = variant_of(two_ranks.config, variant)
    train_step = build_train_step(config, world)
    assert (train_step.sharing is None) == (variant in COMPUTED_ALONE)
    alone = train(train_step, groups, range(2))
    together = json.loads((two_ranks.folder / "variants.json").read_text(encoding="utf-8"))[variant]
    for mine, theirs in zip(alone, together, strict=True):
        assert mine["grad_norm"] > 0
        if variant in COMPUTED_ALONE:
            assert theirs["prefix_saving"] == mine["prefix_saving"] == 0
        else:
            assert theirs["prefix_saving"] > mine["prefix_saving"] == 0
            assert theirs["flops"] < 0.8 * mine["flops"]
        theirs |= {name: mine[name] for name in ("prefix_saving", "flops")}
        # A few actions may lie on the edge of a clip.
        loose = {name: mine[name] for name in mine if name.endswith("clip_fraction")}
        assert theirs | loose == pytest.approx(mine, abs=1e-4, rel=1e-3)
        assert theirs == pytest.approx(theirs | loose, abs=2e-2, rel=1e-2)


def test_replayed_experts_are_independent_of_ranks(two_ranks: TwoRanks, world: World) -> None:
    config = with_model(with_learner(two_ranks.config, REPLAY), two_ranks.folder / "experts")
    alone = train(build_train_step(config, world), two_ranks.folder / "groups-with-experts", range(2))
    together = json.loads((two_ranks.folder / "variants.json").read_text(encoding="utf-8"))["experts"]
    for mine, theirs in zip(alone, together, strict=True):
        assert mine["experts/changed"] > 0.3
        for name in ("loss", "grad_norm", "kl_k3", "entropy"):
            assert theirs[name] == pytest.approx(mine[name], abs=1e-5, rel=1e-4), name
        for name in mine:
            if name.startswith("experts/"):  # a rank without work sends a token of its own to experts
                assert theirs[name] == pytest.approx(mine[name], rel=0.05), name


def test_gradients_with_images_are_independent_of_ranks(two_ranks: TwoRanks, world: World) -> None:
    alone = gradient_norms(two_ranks.folder / "vision", world)
    assert two_ranks.results("vision") == [pytest.approx(alone, rel=1e-5, abs=1e-6)] * 2


def test_checkpoint_of_two_ranks_continues_on_one(two_ranks: TwoRanks, world: World) -> None:
    config = two_ranks.config
    alone = build_train_step(config, world)
    wanted = train(alone, two_ranks.folder / "groups", range(RECORDED_STEPS))[-1]
    continued = build_train_step(config, world)
    saved = config.paths.checkpoints
    assert load_checkpoint(saved, continued.trained, world, TrainState) == TrainState(step=STEPS)
    assert two_ranks.results("checksum") == [continued.checksum()] * 2, "it does not depend on the shards"
    (figures,) = train(continued, two_ranks.folder / "groups", [STEPS])
    assert figures["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    assert figures["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_resumes_on_two_ranks(two_ranks: TwoRanks, optimizer: str) -> None:
    for uninterrupted, resumed in two_ranks.results(f"resumed {optimizer}"):
        assert uninterrupted[-1]["grad_norm"] > 0
        assert resumed == uninterrupted


def test_export_of_two_ranks_equals_their_checkpoint(two_ranks: TwoRanks, world: World) -> None:
    train_step = build_train_step(two_ranks.config, world)
    load_checkpoint(two_ranks.config.paths.checkpoints, train_step.trained, world, TrainState)
    exported = AutoModelForCausalLM.from_pretrained(two_ranks.folder / "exported", dtype="auto")
    assert exported.state_dict().keys() == {name for name, _ in full_weights(train_step.model)}
    for name, tensor in full_weights(train_step.model):
        assert torch.equal(exported.state_dict()[name], tensor), name


def test_adapters_of_two_ranks_continue_on_one(two_ranks: TwoRanks, world: World) -> None:
    config, groups = variant_of(two_ranks.config, "lora"), two_ranks.folder / "groups"
    alone, continued = (build_train_step(config, world) for _ in range(2))
    train(alone, groups, [0])
    assert load_checkpoint(two_ranks.folder / "lora", continued.trained, world, TrainState) == TrainState(step=1)
    exported = load_file(two_ranks.folder / "adapter" / "adapter_model.safetensors")
    for train_step in (alone, continued):
        for name, tensor in AdapterStateDict(train_step.model, dtype=torch.float32).gather():
            # AdamW divides by the size of a gradient, however small that is.
            torch.testing.assert_close(exported[name], tensor, atol=1e-5, rtol=1e-4)
    assert train(continued, groups, [1])[0] == pytest.approx(train(alone, groups, [1])[0], abs=1e-4, rel=1e-3)


def test_error_of_one_rank_is_raised_on_both(two_ranks: TwoRanks) -> None:
    host, folder = socket.gethostname(), two_ranks.folder
    patterns = {
        "no room": rf"{folder / 'full'}.*rank 1", "folders apart": f"rank 1 on {host}",
        "checkpoints apart": rf"step-{STEPS:06d}: checksums\.json.*rank 1", "model in groups": str(folder / "groups"),
        "model in nowhere": r"nowhere.*rank 1", "model in changed": "other files.*rank 1",
        "settings apart": r"rank 1: learner\.optimizer.*lr=1e-09", "ruined": "step 1 .*1 updates were skipped",
    }  # fmt: skip
    for name, pattern in patterns.items():
        for error in two_ranks.results(name):
            assert re.search(pattern, error), name
    assert not list((folder / "full").iterdir())


def test_ranks_exchange_values_of_different_sizes(two_ranks: TwoRanks) -> None:
    values = [{"rank": rank, "text": "x" * (1 + 1000 * rank), "none": None} for rank in (0, 1)]
    assert two_ranks.results("exchanged") == [[values, values[0], 1]] * 2


def test_total_of_advantages_keeps_its_argument(two_ranks: TwoRanks) -> None:
    own, summed = zip(*two_ranks.results("advantage's sums"), strict=True)
    assert own == ([1, 1, 0, 0], [1, 1, 1, 1])
    assert summed == ([2, 2, 1, 1],) * 2


@pytest.mark.parametrize("case", ["signal", "away"])
def test_stop_signal_of_one_rank_stops_both(two_ranks: TwoRanks, case: str) -> None:
    assert two_ranks.results(case) == [128 + signal.SIGTERM] * 2
    run = two_ranks.config.run.model_copy(update={"name": case})
    assert checkpoint_steps(two_ranks.config.model_copy(update={"run": run}).paths.checkpoints) == [1]
