"""Checkpoints (torch.distributed.checkpoint); functions with a `World` are collectives.

A checkpoint has what is trained: frozen weights are those of the initial model. It is complete with `checksums.json`,
its last file. One that differs from its checksums is not loaded.
"""

import json
import shutil
import socket
import uuid
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import msgspec
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from slipstream.configs.paths import checkpoint_name, checkpoint_steps
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.files import file_checksum, fsync_path, write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.parallel.mesh import World

log = get_log("learner.checkpoint")

ModelsAndOptimizers = Mapping[str, tuple[nn.Module, Optimizer]]
"""Models and their optimizers, by name."""

TRAIN_STATE = "progress.json"
CHECKSUMS = "checksums.json"
"""xxh3 (64 bits) of every other file of the checkpoint, by name."""
DAMAGED = ".damaged"
"""Suffix of the name of a damaged checkpoint. It stays until a checkpoint of its step, or of a later one, is saved."""


class CheckpointError(SlipstreamError):
    """A checkpoint, or the trained model, can't be written or read."""


@dataclass(frozen=True)
class TrainState:
    """The state of a training beside models and optimizers; trainers may add fields that JSON has."""

    step: int = 0
    """Steps done."""


S = TypeVar("S", bound=TrainState)


def open_checkpoints(folder: Path, world: World, *, keep: int) -> None:
    """Creates the folder, and removes incomplete checkpoints of earlier starts and those beyond `keep`.

    Raises: CheckpointError, on all ranks, when it can't be made or not all of them see it.
    """
    # A new name: a network file system may have cached that another one does not exist.
    marker, problem = folder / f".shared-{uuid.uuid4().hex}", None
    if world.is_root:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for unused in (*folder.glob("step-*.partial"), *_outdated(folder, keep)):
                _remove(unused)
            marker.touch()
        except OSError as error:
            problem = f"{folder} can't be used for checkpoints: {error.strerror}; see run.dir"
    problem = world.from_root(problem)
    if problem is not None:
        raise CheckpointError(problem)
    shared = folder / world.from_root(marker.name)
    seen = world.gather([socket.gethostname(), shared.exists()])
    if world.is_root:
        marker.unlink(missing_ok=True)
    for rank, (host, sees) in enumerate(seen):
        if not sees:
            raise CheckpointError(
                f"learner rank {rank} on {host} does not see the {folder} of rank 0 on {seen[0][0]}: set run.dir to "
                "storage that all hosts of the learner share"
            )


def save_checkpoint(folder: Path, trained: ModelsAndOptimizers, state: TrainState, world: World, *, keep: int) -> None:
    """Writes `folder/step-<step>`; the name appears only when it is complete, also after a power loss.

    Older ones beyond `keep` are removed.

    Raises: CheckpointError, on all ranks, when it can't be written; no partial one is left.
    """
    _finish(folder, state, _write(folder, _state(trained), state, world), world, keep=keep)


class BackgroundCheckpoint:
    """A checkpoint that a thread of each rank writes, from a copy of the state, while training goes on.

    Until `finish` it has no name, and the one before is the latest.
    """

    def __init__(
        self,
        folder: Path,
        trained: ModelsAndOptimizers,
        state: TrainState,
        world: World,
        *,
        keep: int,
        group: dist.ProcessGroup,
    ) -> None:
        """Copies the state to the host's memory and starts to write it.

        Args:
            group: of all ranks, for these threads alone: collectives of two threads in one group would mix.
        """
        self.state = state
        self._finish = partial(_finish, folder, state, world=world, keep=keep)
        self._world = world
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )
        copied: Any = stager.stage(_state(trained))
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written = thread.submit(_write, folder, copied, state, world, group)
        self._written.add_done_callback(lambda _: stager.close())
        thread.shutdown(wait=False)

    def is_written(self) -> bool:
        """True if the threads of all ranks are done; a collective."""
        return not self._world.largest(int(not self._written.done()))

    def finish(self) -> None:
        """Waits for the files and gives the checkpoint its name; a collective. Raises: CheckpointError as above."""
        self._finish(self._written.result())


class Written(TypedDict):
    """A rank's part of a checkpoint."""

    checksums: dict[str, str]
    """Checksums of the files that the rank has written, by name."""
    problem: str | None


def _write(
    folder: Path, trained: dict[str, Any], state: TrainState, world: World, group: dist.ProcessGroup | None = None
) -> Written:
    """Writes this rank's files of a checkpoint to a partial one."""
    partial_folder = _partial(folder, state)
    try:
        dcp.save(trained, checkpoint_id=partial_folder, process_group=group)
        if world.is_root:
            write_atomically(partial_folder / TRAIN_STATE, [json.dumps(asdict(state)).encode()])
        # Each rank hashes the files that it has written: they are in its host's memory.
        own = [*partial_folder.glob(f"__{world.rank}_*"), *(partial_folder.glob("[!_]*") if world.is_root else ())]
        return Written(checksums={path.name: file_checksum(path) for path in own}, problem=None)
    except (CheckpointException, OSError) as error:
        rank = min(getattr(error, "failures", [world.rank]))
        return Written(checksums={}, problem=f"{_cause(error)} (rank {rank})")


def _finish(folder: Path, state: TrainState, written: Written, world: World, *, keep: int) -> None:
    """Completes a checkpoint whose files all ranks have written, and removes older ones.

    Raises: CheckpointError, on all ranks, when one could not write; the partial one is removed.
    """
    gathered: dict[str, Any] = {**written}
    of_ranks = world.gather(gathered)
    problem = next((of_rank["problem"] for of_rank in of_ranks if of_rank["problem"]), None)
    partial_folder = _partial(folder, state)
    if world.is_root and problem is None:
        checksums = {name: value for of_rank in of_ranks for name, value in of_rank["checksums"].items()}
        try:
            _complete(partial_folder, folder / checkpoint_name(state.step), checksums)
        except OSError as error:
            problem = str(error)
    problem = world.from_root(problem)
    if problem is not None:
        free_mb = shutil.disk_usage(folder).free / 1e6
        if world.is_root:
            _remove(partial_folder)
        raise CheckpointError(
            f"the checkpoint of step {state.step} can't be written to {folder}: {problem}, with {free_mb:,.1f} MB free "
            f"there; make room or lower learner.checkpoint.keep={keep}, and start again: the run goes on from the "
            "checkpoint before"
        )
    if world.is_root:
        for old in (*_outdated(folder, keep), *_damaged(folder, range(state.step + 1))):
            _remove(old)


def _partial(folder: Path, state: TrainState) -> Path:
    """The folder of a checkpoint while it is written."""
    return folder / f"{checkpoint_name(state.step)}.partial"


def _complete(partial_folder: Path, target: Path, checksums: Mapping[str, str]) -> None:
    """Writes the checksums and gives the checkpoint its name. Raises: OSError."""
    write_atomically(partial_folder / CHECKSUMS, [msgspec.json.encode(checksums)])
    _remove(target)
    partial_folder.rename(target)
    fsync_path(target.parent)


def load_checkpoint(folder: Path, trained: ModelsAndOptimizers, world: World, kind: type[S]) -> S | None:
    """Restores the latest sound checkpoint that rank 0 sees into models and optimizers; None if there is none at all.

    Damaged ones after it are logged and renamed. The optimizers keep their present settings, not those of the
    checkpoint.

    Args:
        kind: class of the trainer's state.

    Raises: CheckpointError, on all ranks, when every checkpoint is damaged, or it is of other models.
    """
    damaged: dict[Path, str] = {}
    for step in reversed(world.from_root(checkpoint_steps(folder))):
        found = folder / checkpoint_name(step)
        damages = world.gather(_find_damage(found, world))
        damage = next((f"{damage} (rank {rank})" for rank, damage in enumerate(damages) if damage), None)
        if damage is None:
            state = _restore(found, trained, world, kind)
            if world.is_root:
                for path, reason in damaged.items():
                    _set_aside(path, reason, used=found)
            return state
        damaged[found] = damage
    if not damaged:
        return None
    # They keep their names: the next start must not begin at step 0.
    listed = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
    raise CheckpointError(
        f"every checkpoint in {folder} is damaged: {listed}; restore one from a copy, or start the run over"
    )


def restore_checkpoint(folder: Path, step: int, trained: ModelsAndOptimizers, world: World, kind: type[S]) -> S:
    """Restores the checkpoint of a step into models and optimizers; otherwise as `load_checkpoint`.

    Raises: CheckpointError, on all ranks, when it is damaged, or of other models.
    """
    found = folder / checkpoint_name(step)
    damage = next(filter(None, world.gather(_find_damage(found, world))), None)
    if damage is not None:
        raise CheckpointError(f"{found} is damaged: {damage}")
    return _restore(found, trained, world, kind)


def undoes_damaged_steps(folder: Path, step: int) -> bool:
    """True if a checkpoint of a later step than `step` is damaged."""
    return any(_step_of(path) > step for path in folder.glob(f"step-*{DAMAGED}"))


def _find_damage(found: Path, world: World) -> str | None:
    """The first damaged file of this rank's share of a checkpoint's files, and the kind of damage; None if none is."""
    try:
        checksums = msgspec.json.decode((found / CHECKSUMS).read_bytes(), type=dict[str, str])
    except (OSError, ValueError, msgspec.DecodeError) as error:
        return f"{CHECKSUMS}: {error}"
    for name in sorted(checksums)[world.rank :: world.size]:
        try:
            checksum = file_checksum(found / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if checksum != checksums[name]:
            return f"{name}: its checksum is {checksum}, and was {checksums[name]}"
    return None


def _set_aside(damaged: Path, reason: str, *, used: Path) -> None:
    """Renames a damaged checkpoint: under its name it would count among those to keep."""
    renamed = damaged.with_name(f"{damaged.name}{DAMAGED}")
    log.error("checkpoint damaged; an earlier one is used", folder=str(renamed), reason=reason, used=str(used))
    _remove(renamed)
    try:
        damaged.rename(renamed)
    except OSError as error:
        log.warning("damaged checkpoint not renamed", folder=str(damaged), reason=error.strerror)


def _damaged(folder: Path, steps: range) -> list[Path]:
    """Damaged checkpoints of these steps."""
    return [path for path in folder.glob(f"step-*{DAMAGED}") if _step_of(path) in steps]


def _step_of(damaged: Path) -> int:
    """The step of a damaged checkpoint; -1 for other names."""
    number = damaged.name.removeprefix("step-").removesuffix(DAMAGED)
    return int(number) if number.isdecimal() else -1


def _restore(found: Path, trained: ModelsAndOptimizers, world: World, kind: type[S]) -> S:
    """Restores a checkpoint. Raises: CheckpointError, on all ranks, when it is of other models."""
    state = _state(trained)
    loaded, problem = kind(), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no_dist: each rank plans alone; together they would exchange pickles
            dcp.load(state, checkpoint_id=found, no_dist=True)
        loaded = kind(**json.loads((found / TRAIN_STATE).read_text(encoding="utf-8")))
    except (CheckpointException, OSError, ValueError, TypeError) as error:  # the last two: of TRAIN_STATE
        problem = f"{_cause(error)} (rank {world.rank})"
    problem = next(filter(None, world.gather(problem)), None)
    if problem is not None:
        raise CheckpointError(
            f"{found} can't be loaded: {problem}; train with the release, the model, the model.lora, the "
            "learner.trainer, the learner.critic, the learner.process_reward and the learner.optimizer.name of its run"
        )
    for name, (model, optimizer) in trained.items():
        configured = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state[name]["model"],
            optim_state_dict=state[name]["optimizer"],
            options=StateDictOptions(strict=False),  # without frozen weights; `dcp.load` misses no others
        )
        for group, settings in zip(optimizer.param_groups, configured, strict=True):
            group.update(settings)
    return loaded


def _state(trained: ModelsAndOptimizers) -> dict[str, Any]:
    """Trained weights (`model`) and moments (`optimizer`) by the model's name; a collective, without copies."""
    states: dict[str, Any] = {}
    for name, (model, optimizer) in trained.items():
        fresh = not optimizer.state
        weights, moments = get_state_dict(model, optimizer)
        for parameter, tensor in model.named_parameters(remove_duplicate=False):  # a tied one has several names
            if not tensor.requires_grad:
                weights.pop(parameter, None)
        states[name] = {"model": weights, "optimizer": moments}
        if fresh:  # get_state_dict fills it by a step without effect; counted, that would bias the first update
            for values in optimizer.state.values():
                if "step" in values:
                    values["step"].zero_()
    return states


def _outdated(folder: Path, keep: int) -> list[Path]:
    """All checkpoints but the latest `keep`."""
    return [folder / checkpoint_name(step) for step in checkpoint_steps(folder)[:-keep]]


def _remove(folder: Path) -> None:
    """Deletes a checkpoint if it exists; failure is logged: on NFS another process may be reading it."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("old checkpoint not deleted", folder=str(folder), reason=error.strerror)


def _cause(error: CheckpointException | OSError | ValueError | TypeError) -> str:
    """Cause of a failure, in a line. Raises: exceptions such as KeyboardInterrupt, which torch wraps too."""
    if not isinstance(error, CheckpointException):
        return str(error)
    failures = [failure for failure, _ in error.failures.values()]
    for failure in failures:
        if not isinstance(failure, Exception):
            raise failure
    return "; ".join(str(failure) or type(failure).__name__ for failure in failures)
