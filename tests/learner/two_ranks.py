"""One learner rank under torchrun: trains on recorded groups, saves a checkpoint, exports the model.

python -m torch.distributed.run --nproc-per-node 2 --module tests.learner.two_ranks FOLDER
"""

import json
import sys
from pathlib import Path

import torch

from slipstream.configs import RunConfig
from slipstream.configs.folder import RunFolder
from slipstream.learner.checkpoint import Progress, export_model, save_checkpoint
from slipstream.learner.distributed import join_world, leave_world
from tests.learner.recorded import build_trainer, train

STEPS = 3


def main(folder: Path) -> None:
    """Leaves `figures.json`, `exported/` and the run's folder in `folder`."""
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
    leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
