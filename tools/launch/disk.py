"""The disk of a run's folder: the space that checkpoints and the trained model will take, and whether it is full."""

import math
import shutil
from pathlib import Path

from safetensors import safe_open

from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps

STATE_BYTES = {"adamw": 12, "adamw_8bit": 6, "muon": 8}
"""Bytes of a checkpoint for each parameter, by optimizer: master weights in float32, and the averages (Muon: one)."""
FULL_BYTES = 1 << 20
"""A disk with less free space is full: Redis's next write to its file fails."""


def disk_problems(config: RunConfig) -> list[str]:
    """One message if the checkpoints and the trained model will not fit on the disk of the run's folder.

    Of a model that is not in a folder yet, or whose adapters alone are trained, the size is not known or small.
    """
    path, checkpoint, folder = config.model.path, config.learner.checkpoint, config.paths
    if path is None or config.model.lora is not None or not path.is_dir():
        return []
    policy, learner = parameters(path), config.learner
    others = [other.path or path for other in (learner.critic, learner.process_reward) if other is not None]
    trained = policy + sum(map(parameters, others))
    size = trained * STATE_BYTES[config.learner.optimizer.name]
    # The oldest is removed once the next is complete.
    most = checkpoint.keep + 1 + (checkpoint.upload is not None)  # the one that is uploaded stays until then
    missing = max(0, most - len(checkpoint_steps(folder.checkpoints)))
    model = policy * (4 if config.model.dtype_here == "float32" else 2)
    wanted, free = missing * size + model, free_bytes(folder.root)
    if wanted <= free:
        return []
    return [
        f"run.dir={config.run.dir}: its disk has {_gb(free)} free, but {missing} checkpoints of {_gb(size)} and the "
        f"trained model ({_gb(model)}) take {_gb(wanted)}: name a folder on another disk, or lower "
        f"learner.checkpoint.keep={checkpoint.keep}"
    ]


def parameters(folder: Path) -> int:
    """Parameters in a model folder's safetensors files; 0 of a model in another format."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def is_full(folder: Path) -> bool:
    """True if the disk of a folder takes no more files."""
    return free_bytes(folder) < FULL_BYTES


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk on which a folder is, or will be."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
