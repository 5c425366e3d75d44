"""One learner rank under torchrun: trains on recorded groups, saves a checkpoint, exports the model.

python -m torch.distributed.run --nproc-per-node 2 --module tests.learner.two_ranks FOLDER
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from slipstream.configs import RunConfig
from slipstream.configs.folder import RunFolder
from slipstream.configs.schema.losses import Aggregation
from slipstream.learner.checkpoint import Progress, export_model, save_checkpoint
from slipstream.learner.distributed import join_world, leave_world
from tests.learner.recorded import build_trainer, train

STEPS = 3
CRITIC = {"optimizer": {"lr": 3e-3, "warmup_steps": 0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "critic": {"advantage": "gae", "critic": CRITIC},
    "whitened": {"advantage": "reinforce_plus_plus"},
    "reference": {"kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"}},
    "correction": {"correction": {"normalise": True, "second_moment": 0.5, "veto": 1e-4}},
    **{mode: {"loss": {"aggregation": mode, "entropy_bonus": 0.01}} for mode in get_args(Aggregation)[:-1]},
    "constant": {"loss": {"aggregation": "constant", "constant": 64.0}},
}
"""Settings of `learner` that ranks must not matter for either; two steps of each."""


def with_learner(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The run with other settings of `learner`."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    return RunConfig.model_validate(tree | {"learner": tree["learner"] | settings})


def main(folder: Path) -> None:
    """Leaves `figures.json`, `variants.json`, `exported/` and the run's folder in `folder`."""
    torch.set_num_threads(1)
    config = RunConfig.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    world = join_world()
    trainer = build_trainer(config, world)
    figures = train(trainer, folder / "groups", range(STEPS))
    save_checkpoint(RunFolder.of(config).checkpoints, trainer.trained, Progress(step=STEPS), world, keep=1)
    assert config.model.path is not None, "recorded runs have a model folder"
    export_model(config.model.path, folder / "exported", trainer.model, world, dtype=torch.float32)
    if world.is_root:
        (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    variants = {
        name: train(build_trainer(with_learner(config, settings), world), folder / "groups", range(2))
        for name, settings in VARIANTS.items()
    }
    if world.is_root:
        (folder / "variants.json").write_text(json.dumps(variants), encoding="utf-8")
    leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
