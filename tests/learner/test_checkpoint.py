"""Checkpoints: what they restore, damage, and failures to write them."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.tensor import DTensor

from slipstream.buffer.client import BufferClient
from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.learner.checkpoint import (
    BackgroundCheckpoint,
    CheckpointError,
    TrainState,
    load_checkpoint,
    open_checkpoints,
    save_checkpoint,
    undoes_damaged_steps,
)
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl.parts import build_feed
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.trainers.rl.trainer import RLState
from tests.full_disk import files_of_at_most
from tests.learner.recorded import RECORDED_STEPS, build_train_step, record, train, weights_of
from tests.learner.served import DEADLINE_S, LEARNER, served_sections, serving
from tests.learner.trainers.rl.loops import learner_beside

MakeConfig = Callable[..., RunConfig]
TOKENS = torch.tensor([[3, 17, 4, 9, 9, 30]])


def save(folder: Path, train_step: TrainStep, state: TrainState, keep: int = 2) -> None:
    save_checkpoint(folder, train_step.trained, state, train_step.world, keep=keep)


@pytest.fixture
def train_step(world: World, make_config: MakeConfig) -> TrainStep:
    return build_train_step(make_config(), world)


def moments(train_step: TrainStep) -> dict[str, torch.Tensor]:
    """AdamW's state under the names of the parameters."""
    names: dict[Any, str] = {parameter: name for name, parameter in train_step.model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value.full_tensor() if isinstance(value, DTensor) else value
        for parameter, state in train_step.optimizer.state.items()
        for key, value in state.items()
    }


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("optimizer", "state_keys"),
    [("adamw", {"step", "exp_avg", "exp_avg_sq"}), ("muon", {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"})],
)
def test_restored_learner_continues_bit_for_bit(
    world: World, make_config: MakeConfig, tmp_path: Path, optimizer: str, state_keys: set[str]
) -> None:
    config = make_config(optimizer={"name": optimizer, "lr": 3e-3, "warmup_steps": 0})
    record(tmp_path / "groups", RECORDED_STEPS, config)
    train_step = build_train_step(config, world)
    train(train_step, tmp_path / "groups", range(2))
    state = RLState(step=2, version=5)
    save(tmp_path / "saved", train_step, state)
    weights = {name: tensor.clone() for name, tensor in full_weights(train_step.model)}
    adam = {name: tensor.clone() for name, tensor in moments(train_step).items()}
    wanted = train(train_step, tmp_path / "groups", [2, 3])

    restored = build_train_step(config, world)
    assert load_checkpoint(tmp_path / "saved", restored.trained, world, RLState) == state
    for name, tensor in full_weights(restored.model):
        assert torch.equal(tensor, weights[name]), name
    assert moments(restored).keys() == adam.keys()
    assert {name.rpartition("/")[2] for name in adam} == state_keys
    for name, tensor in moments(restored).items():
        assert torch.equal(tensor, adam[name]), name
    assert train(restored, tmp_path / "groups", [2, 3]) == wanted


def test_saving_before_first_update_changes_nothing(world: World, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    record(tmp_path / "groups", 1, config)
    train_step, saved, restored = (build_train_step(config, world) for _ in range(3))
    save(tmp_path / "saved", saved, TrainState())
    load_checkpoint(tmp_path / "saved", restored.trained, world, TrainState)
    assert {int(state["step"]) for state in restored.optimizer.state.values()} == {0}
    assert train(saved, tmp_path / "groups", [0]) == train(train_step, tmp_path / "groups", [0])
    for (name, tensor), (_, theirs) in zip(full_weights(train_step.model), full_weights(saved.model), strict=True):
        assert torch.equal(tensor, theirs), name


def test_restored_optimizer_has_configured_settings(world: World, make_config: MakeConfig, tmp_path: Path) -> None:
    save(tmp_path, build_train_step(make_config(optimizer={"betas": [0.9, 0.99]}), world), TrainState(step=1))
    train_step = build_train_step(make_config(optimizer={"betas": [0.8, 0.95], "weight_decay": 0.1}), world)
    load_checkpoint(tmp_path, train_step.trained, world, TrainState)
    (group,) = train_step.optimizer.param_groups
    assert (tuple(group["betas"]), group["weight_decay"]) == ((0.8, 0.95), 0.1)


def test_only_latest_checkpoints_are_kept(world: World, train_step: TrainStep, tmp_path: Path) -> None:
    for step in (1, 2, 9, 10):
        save(tmp_path, train_step, TrainState(step=step), keep=2)
    assert checkpoint_steps(tmp_path) == [9, 10]
    assert len(list(tmp_path.iterdir())) == 2
    assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=10)


def test_checkpoint_keeps_its_name_through_power_loss(
    train_step: TrainStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Path, list[int]]] = []
    monkeypatch.setattr(
        "slipstream.learner.checkpoint.fsync_path", lambda path: kept.append((path, checkpoint_steps(tmp_path)))
    )
    save(tmp_path, train_step, TrainState(step=1))
    assert kept == [(tmp_path, [1])]


def test_partial_checkpoint_is_ignored_and_replaced(world: World, train_step: TrainStep, tmp_path: Path) -> None:
    save(tmp_path, train_step, TrainState(step=1))
    half = tmp_path / "step-000002.partial"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half of it")
    assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=1)
    save(tmp_path, train_step, TrainState(step=2))
    assert not half.exists()
    assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=2)


def test_partial_and_old_checkpoints_are_removed_at_start(world: World, train_step: TrainStep, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, train_step, TrainState(step=step), keep=3)
    (tmp_path / "step-000004.partial").mkdir()
    open_checkpoints(tmp_path, world, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("room_bytes", [10, 10_000, 400_000], ids=["none", "for-little", "for-the-weights"])
def test_full_disk_leaves_only_previous_checkpoint(
    world: World, train_step: TrainStep, tmp_path: Path, room_bytes: int
) -> None:
    save(tmp_path, train_step, TrainState(step=1))
    with files_of_at_most(room_bytes), pytest.raises(CheckpointError) as caught:
        save(tmp_path, train_step, TrainState(step=2))
    assert all(part in str(caught.value) for part in ("step 2", str(tmp_path), "learner.checkpoint.keep=2"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=1)


def test_failure_to_complete_checkpoint_is_an_error(
    train_step: TrainStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("slipstream.learner.checkpoint.fsync_path", fail)
    with pytest.raises(CheckpointError, match=r"step 1 .*Input/output error"):
        save(tmp_path, train_step, TrainState(step=1))
    assert not list(tmp_path.glob("*.partial"))


def test_damaged_checkpoint_is_passed_over_if_not_renamed(
    world: World, train_step: TrainStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for step in (1, 2):
        save(tmp_path, train_step, TrainState(step=step))
    overwrite(tmp_path / "step-000002" / "__0_0.distcp")
    monkeypatch.setattr(Path, "rename", fail)
    with structlog.testing.capture_logs() as logs:
        assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=1)
    assert [line["log_level"] for line in logs if "reason" in line] == ["error", "warning"]


def test_unusable_checkpoint_folder_is_named(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/saved .* Not a directory"):
        open_checkpoints(tmp_path / "file" / "saved", world, keep=1)


def test_failure_to_delete_old_checkpoint_is_logged(
    train_step: TrainStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder / ".nfs0001"))

    save(tmp_path, train_step, TrainState(step=1), keep=1)
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(shutil, "rmtree", busy)
        save(tmp_path, train_step, TrainState(step=2), keep=1)
    assert [(record["event"], record["reason"]) for record in logs if "folder" in record][-1:] == [
        ("old checkpoint not deleted", "Device or resource busy")
    ]
    save(tmp_path, train_step, TrainState(step=3), keep=1)
    assert checkpoint_steps(tmp_path) == [3]


def overwrite(path: Path) -> None:
    """Writes other bytes into the middle of a file."""
    size = min(2000, path.stat().st_size // 2)
    with path.open("r+b") as file:
        file.seek((path.stat().st_size - size) // 2)
        file.write(b"\xa5" * size)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "overwritten": overwrite, "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0), "deleted": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *(("__0_0.distcp", damage) for damage in DAMAGE), (".metadata", "truncated"), (".metadata", "deleted"),
        ("progress.json", "overwritten"), ("progress.json", "deleted"),
        ("checksums.json", "emptied"), ("checksums.json", "deleted"),
    ],
)  # fmt: skip
def test_checkpoint_before_damaged_one_is_used(
    file: str, damage: str, world: World, train_step: TrainStep, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path, train_step, TrainState(step=step))
    DAMAGE[damage](tmp_path / "step-000002" / file)
    with structlog.testing.capture_logs() as logs:
        assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=1)
    (line,) = [line for line in logs if line["log_level"] == "error"]
    renamed = tmp_path / "step-000002.damaged"
    assert (line["folder"], line["used"]) == (str(renamed), str(tmp_path / "step-000001"))
    assert line["reason"].startswith(f"{file}: ")
    assert [undoes_damaged_steps(tmp_path, step) for step in (1, 2)] == [True, False]
    save(tmp_path, train_step, TrainState(step=2))
    assert not renamed.exists()
    assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=2)


def test_only_damaged_checkpoints_are_an_error(world: World, train_step: TrainStep, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, train_step, TrainState(step=step))
        overwrite(tmp_path / f"step-00000{step}" / "__0_0.distcp")
    for _ in range(2):  # a repeated start does not begin at step 0
        with pytest.raises(CheckpointError, match=r"step-000002: __0_0\.distcp.*step-000001: __0_0\.distcp"):
            load_checkpoint(tmp_path, train_step.trained, world, TrainState)
    assert checkpoint_steps(tmp_path) == [1, 2]


def test_train_state_of_other_release_is_refused(world: World, train_step: TrainStep, tmp_path: Path) -> None:
    save(tmp_path, train_step, TrainState(step=1))
    saved = tmp_path / "step-000001"
    (saved / "progress.json").write_text('{"step": 1, "of_another_release": 2}')
    checksums = json.loads((saved / "checksums.json").read_text())
    checksums["progress.json"] = xxhash.xxh3_64_hexdigest((saved / "progress.json").read_bytes())
    (saved / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(CheckpointError, match=r"step-000001.*of_another_release.*rank 0"):
        load_checkpoint(tmp_path, train_step.trained, world, TrainState)
    assert checkpoint_steps(tmp_path) == [1]


def test_checkpoint_without_critic_is_refused(world: World, make_config: MakeConfig, tmp_path: Path) -> None:
    save(tmp_path, build_train_step(make_config(), world), TrainState(step=1))
    with_critic = build_train_step(make_config(advantage="gae", critic={}), world)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/step-000001 .*critic.*learner.critic"):
        load_checkpoint(tmp_path, with_critic.trained, world, TrainState)


def test_keyboard_interrupt_while_saving_is_not_wrapped(
    train_step: TrainStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, train_step, TrainState(step=1))


def test_saving_step_again_replaces_it(world: World, train_step: TrainStep, tmp_path: Path) -> None:
    for version in (1, 2):
        save(tmp_path, train_step, RLState(step=7, version=version))
    assert load_checkpoint(tmp_path, train_step.trained, world, RLState) == RLState(step=7, version=2)


def test_nothing_is_restored_without_checkpoint(world: World, train_step: TrainStep, tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "none", train_step.trained, world, TrainState) is None


@pytest.fixture
def group(world: World) -> Iterator[dist.ProcessGroup]:
    """The process group of the threads that write checkpoints."""
    created = dist.new_group(backend="gloo")
    yield created
    dist.destroy_process_group(created)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no file of a checkpoint is written."""
    opened, write = threading.Event(), dcp.FileSystemWriter.write_data

    def wait(*given: Any) -> Any:
        assert opened.wait(DEADLINE_S)
        return write(*given)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", wait)
    yield opened
    opened.set()


def start(folder: Path, train_step: TrainStep, step: int, group: dist.ProcessGroup) -> BackgroundCheckpoint:
    return BackgroundCheckpoint(
        folder, train_step.trained, TrainState(step=step), train_step.world, keep=2, group=group
    )


def test_background_checkpoint_has_state_of_its_start(
    world: World, train_step: TrainStep, group: dist.ProcessGroup, gate: threading.Event, groups: Path, tmp_path: Path
) -> None:
    train(train_step, groups, [0])
    weights, adam = weights_of(train_step.model), {name: value.clone() for name, value in moments(train_step).items()}
    writing = start(tmp_path, train_step, 1, group)
    train(train_step, groups, [1])
    assert not writing.is_written()
    assert checkpoint_steps(tmp_path) == []
    gate.set()
    writing.finish()
    assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=1)
    torch.testing.assert_close(weights_of(train_step.model), weights, atol=0, rtol=0)
    torch.testing.assert_close(moments(train_step), adam, atol=0, rtol=0)


def test_crash_while_writing_leaves_checkpoint_before(
    world: World, train_step: TrainStep, group: dist.ProcessGroup, gate: threading.Event, tmp_path: Path
) -> None:
    gate.set()
    save(tmp_path, train_step, TrainState(step=1))
    gate.clear()
    writing = start(tmp_path, train_step, 2, group)
    assert load_checkpoint(tmp_path, train_step.trained, world, TrainState) == TrainState(step=1)
    gate.set()
    writing._written.result(DEADLINE_S)  # the process ends here, without `finish`
    open_checkpoints(tmp_path, world, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_failure_in_background_is_raised_when_it_is_finished(
    train_step: TrainStep, group: dist.ProcessGroup, tmp_path: Path
) -> None:
    save(tmp_path, train_step, TrainState(step=1))
    with files_of_at_most(10_000):
        writing = start(tmp_path, train_step, 2, group)
        with pytest.raises(CheckpointError, match=r"step 2 .*learner\.checkpoint\.keep=2"):
            writing.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_groups_are_durable_when_background_checkpoint_is_complete(
    world: World,
    gate: threading.Event,
    digits_model: Path,
    redis_url: str,
    run_name: str,
    free_address: str,
    tmp_path: Path,
) -> None:
    config = RunConfig.model_validate(
        {
            **served_sections(redis_url, run_name, free_address, tmp_path),
            "model": {"path": str(digits_model), "dtype": "float32"},
            "learner": {
                "steps": 3, "optimizer": {"warmup_steps": 0}, "groups_per_step": 4, "wait_deadline_s": DEADLINE_S,
                "checkpoint": {"every_steps": 1, "asynchronous": True},
            },
        }
    )  # fmt: skip
    with serving(config, tmp_path) as server, closing(BufferClient(config, "learner", LEARNER)) as buffer:
        server.deliver(12)
        learner = learner_beside(config, build_train_step(config, world), version=0)
        loop = learner.loop
        loop.feed = build_feed(config, loop.initial_model, world, LEARNER)
        assert loop.root is not None
        loop.root.buffer = buffer
        with closing(loop.feed):
            loop.start(resumed=False)
            loop._step()
            counts = buffer.state().counts
            assert (counts.trained, counts.durable) == (4, 0)
            gate.set()
            loop._step()  # waits for the first checkpoint, before it starts the second
            assert buffer.state().counts.durable == 4
            loop._step()
        counts = buffer.state().counts
    assert (counts.trained, counts.durable) == (12, 12)
    assert checkpoint_steps(config.paths.checkpoints) == [2, 3]
