"""A checkpoint restores everything that the next step depends on."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.learner.checkpoint import (
    CheckpointError,
    TrainState,
    load_checkpoint,
    open_checkpoints,
    save_checkpoint,
)
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.step import Trainer
from tests.full_disk import files_of_at_most
from tests.learner.recorded import RECORDED_STEPS, build_trainer, record, train

MakeConfig = Callable[..., RunConfig]
TOKENS = torch.tensor([[3, 17, 4, 9, 9, 30]])


def save(folder: Path, trainer: Trainer, progress: TrainState, keep: int = 2) -> None:
    save_checkpoint(folder, trainer.trained, progress, trainer.world, keep=keep)


def moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    """AdamW's state under the names of the parameters."""
    names: dict[Any, str] = {parameter: name for name, parameter in trainer.model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value.full_tensor() if isinstance(value, DTensor) else value
        for parameter, state in trainer.optimizer.state.items()
        for key, value in state.items()
    }


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def test_a_restored_learner_takes_the_same_next_step_bit_for_bit(
    world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    record(tmp_path / "groups", RECORDED_STEPS, config)
    trainer = build_trainer(config, world)
    train(trainer, tmp_path / "groups", range(2))
    progress = TrainState(step=2, version=5)
    save(tmp_path / "saved", trainer, progress)
    weights = {name: tensor.clone() for name, tensor in full_weights(trainer.model)}
    adam = {name: tensor.clone() for name, tensor in moments(trainer).items()}
    wanted = train(trainer, tmp_path / "groups", [2, 3])

    restored = build_trainer(config, world)
    assert load_checkpoint(tmp_path / "saved", restored.trained, world) == progress
    for name, tensor in full_weights(restored.model):
        assert torch.equal(tensor, weights[name]), name
    assert moments(restored).keys() == adam.keys()
    assert {name.rpartition("/")[2] for name in adam} == {"step", "exp_avg", "exp_avg_sq"}
    for name, tensor in moments(restored).items():
        assert torch.equal(tensor, adam[name]), name
    assert train(restored, tmp_path / "groups", [2, 3]) == wanted


def test_a_checkpoint_before_the_first_update_does_not_change_it(
    world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    record(tmp_path / "groups", 1, config)
    trainer, saved, restored = (build_trainer(config, world) for _ in range(3))
    save(tmp_path / "saved", saved, TrainState())
    load_checkpoint(tmp_path / "saved", restored.trained, world)
    assert {int(state["step"]) for state in restored.optimizer.state.values()} == {0}
    assert train(saved, tmp_path / "groups", [0]) == train(trainer, tmp_path / "groups", [0])
    for (name, tensor), (_, theirs) in zip(full_weights(trainer.model), full_weights(saved.model), strict=True):
        assert torch.equal(tensor, theirs), name


def test_a_restored_optimizer_has_the_settings_of_the_configuration(
    world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    save(tmp_path, build_trainer(make_config(optimizer={"betas": [0.9, 0.99]}), world), TrainState(step=1))
    trainer = build_trainer(make_config(optimizer={"betas": [0.8, 0.95], "weight_decay": 0.1}), world)
    load_checkpoint(tmp_path, trainer.trained, world)
    (group,) = trainer.optimizer.param_groups
    assert (tuple(group["betas"]), group["weight_decay"]) == ((0.8, 0.95), 0.1)


def test_only_the_latest_checkpoints_are_kept_and_the_latest_is_loaded(
    world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = build_trainer(make_config(), world)
    for step in (1, 2, 9, 10):
        save(tmp_path, trainer, TrainState(step=step), keep=2)
    assert checkpoint_steps(tmp_path) == [9, 10]
    assert len(list(tmp_path.iterdir())) == 2
    assert load_checkpoint(tmp_path, trainer.trained, world) == TrainState(step=10)


def test_a_checkpoint_keeps_its_name_through_a_power_loss(
    world: World, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Path, list[int]]] = []
    monkeypatch.setattr(
        "slipstream.learner.checkpoint.fsync_path", lambda path: kept.append((path, checkpoint_steps(tmp_path)))
    )
    save(tmp_path, build_trainer(make_config(), world), TrainState(step=1))
    assert kept == [(tmp_path, [1])]


def test_a_checkpoint_that_was_half_written_is_ignored_and_replaced(
    world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = build_trainer(make_config(), world)
    save(tmp_path, trainer, TrainState(step=1))
    half = tmp_path / "step-000002.partial"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half of it")
    assert load_checkpoint(tmp_path, trainer.trained, world) == TrainState(step=1)
    save(tmp_path, trainer, TrainState(step=2))
    assert not half.exists()
    assert load_checkpoint(tmp_path, trainer.trained, world) == TrainState(step=2)


def test_what_was_half_written_and_what_is_too_old_makes_room_when_a_learner_starts(
    world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = build_trainer(make_config(), world)
    for step in (1, 2, 3):
        save(tmp_path, trainer, TrainState(step=step), keep=3)
    (tmp_path / "step-000004.partial").mkdir()
    open_checkpoints(tmp_path, world, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("room_bytes", [10, 10_000, 400_000], ids=["none", "for-little", "for-the-weights"])
def test_a_checkpoint_that_finds_no_room_leaves_the_one_before_it_and_nothing_else(
    world: World, make_config: MakeConfig, tmp_path: Path, room_bytes: int
) -> None:
    trainer = build_trainer(make_config(), world)
    save(tmp_path, trainer, TrainState(step=1))
    with files_of_at_most(room_bytes), pytest.raises(CheckpointError) as caught:
        save(tmp_path, trainer, TrainState(step=2))
    assert str(caught.value).startswith(f"the checkpoint of step 2 can't be written to {tmp_path}: ")
    assert "lower learner.checkpoint.keep=2" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert load_checkpoint(tmp_path, trainer.trained, world) == TrainState(step=1)


def test_a_folder_where_no_checkpoint_can_be_written_is_named(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/saved can't be used for checkpoints: Not a directory"):
        open_checkpoints(tmp_path / "file" / "saved", world, keep=1)


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_learner(
    world: World, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder / ".nfs0001"))

    trainer = build_trainer(make_config(), world)
    save(tmp_path, trainer, TrainState(step=1), keep=1)
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as said:
        patch.setattr(shutil, "rmtree", busy)
        save(tmp_path, trainer, TrainState(step=2), keep=1)
    assert [(record["event"], record["reason"]) for record in said if "folder" in record][-1:] == [
        ("old checkpoint not deleted", "Device or resource busy")
    ]
    save(tmp_path, trainer, TrainState(step=3), keep=1)
    assert checkpoint_steps(tmp_path) == [3]


@pytest.mark.parametrize("written", ["", '{"step": 1, "of_another_release": 2}'], ids=["cut off", "other fields"])
def test_a_checkpoint_whose_progress_can_not_be_read_is_named(
    written: str, world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = build_trainer(make_config(), world)
    save(tmp_path, trainer, TrainState(step=1))
    (tmp_path / "step-000001" / "progress.json").write_text(written)
    with pytest.raises(CheckpointError, match=r"step-000001 can.t be loaded: .*; if it is damaged, move it away"):
        load_checkpoint(tmp_path, trainer.trained, world)


@pytest.mark.parametrize("left_bytes", [0, 1000])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_of_a_checkpoint_whose_files_were_cut_off_it_is_said_what_is_wrong(
    file: str, left_bytes: int, world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = build_trainer(make_config(), world)
    save(tmp_path, trainer, TrainState(step=1))
    os.truncate(tmp_path / "step-000001" / file, left_bytes)
    with pytest.raises(CheckpointError, match=r"step-000001 can.t be loaded: \S+.* \(rank 0\); .* move it away"):
        load_checkpoint(tmp_path, trainer.trained, world)


def test_a_checkpoint_without_the_critic_that_is_to_be_restored_is_named(
    world: World, make_config: MakeConfig, tmp_path: Path
) -> None:
    save(tmp_path, build_trainer(make_config(), world), TrainState(step=1))
    with_critic = build_trainer(make_config(advantage="gae", critic={}), world)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/step-000001 can't be loaded: .*critic.*learner.critic"):
        load_checkpoint(tmp_path, with_critic.trained, world)


def test_ctrl_c_while_a_checkpoint_is_written_is_no_error_of_the_checkpoint(
    world: World, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, build_trainer(make_config(), world), TrainState(step=1))


def test_saving_a_step_again_replaces_it(world: World, make_config: MakeConfig, tmp_path: Path) -> None:
    trainer = build_trainer(make_config(), world)
    for version in (1, 2):
        save(tmp_path, trainer, TrainState(step=7, version=version))
    assert load_checkpoint(tmp_path, trainer.trained, world) == TrainState(step=7, version=2)


def test_without_a_checkpoint_nothing_is_restored(world: World, make_config: MakeConfig, tmp_path: Path) -> None:
    trainer = build_trainer(make_config(), world)
    assert load_checkpoint(tmp_path / "none", trainer.trained, world) is None
