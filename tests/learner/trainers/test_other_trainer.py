"""`learner CONFIG` with a trainer of the user's own: without buffer, Redis, rollout servers, env and rewards."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config, load_config
from slipstream.configs.paths import RunPaths, checkpoint_steps
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.signals import GracefulStop
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.assemble import find_trainer
from slipstream.learner.trainers.setup import RankSetup
from slipstream.models.folder import initial_model
from tests.conftest import free_port
from tests.learner.recorded import VOCABULARY
from tests.learner.trainers.next_token import NextToken
from tests.pipeline.forked import DEADLINE_S, Forked

ROOT = Path(__file__).parents[3]
STEPS = 7
LEARNER = ("-m", "slipstream.learner.cli")
NEXT_TOKEN = f"{NextToken.__module__}:NextToken"
MODULES = """\
import atexit, sys
from slipstream.learner.cli import main
atexit.register(lambda: print(*sys.modules, sep="\\n"))
main()
"""
"""The learner, which prints all imported modules at its end."""
OF_RL = (
    "redis", "slipstream.buffer", "slipstream.env", "slipstream.rewards", "slipstream.learner.algorithms",
    "slipstream.learner.data.buffer_feed", "slipstream.learner.trainers.rl", "slipstream.learner.weights",
)  # fmt: skip
"""Modules that only RL needs."""


class Stopped(NextToken):
    """Sends itself a signal in the fifth step."""

    number = signal.SIGTERM

    def next_batch(self) -> list[MicroBatch]:
        if self.state.step == 4:
            os.kill(os.getpid(), self.number)
        return super().next_batch()


class Killed(Stopped):
    number = signal.SIGKILL


def write_run(folder: Path, model: Path, **model_settings: Any) -> Path:
    """A configuration file that has nothing to do with RL, and rows of token ids."""
    rng = np.random.default_rng(0)
    rows = [np.sort(rng.integers(0, VOCABULARY, rng.integers(4, 20))).tolist() for _ in range(24)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = {
        "run": {"name": "sft", "dir": str(folder)}, "model": {"path": str(model), "dtype": "float32", **model_settings},
        "learner": {
            "trainer": {"name": NEXT_TOKEN, "options": {"path": str(folder / "rows.jsonl")}}, "steps": STEPS,
            "token_budget": 24, "optimizer": {"lr": 3e-3, "warmup_steps": 2},
            "checkpoint": {"every_steps": 3, "upload": f"file://{folder}/store"},
        },
    }  # fmt: skip
    file = folder / "sft.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def run_learner(launch: Sequence[str], *arguments: object) -> tuple[int, str]:
    """Exit code and output of a learner."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    return done.returncode, done.stdout + done.stderr


def losses(paths: RunPaths) -> dict[int, float]:
    records = map(json.loads, paths.metrics.read_text(encoding="utf-8").splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def setup_of(config: RunConfig, world: World, cleanup: ExitStack) -> RankSetup:
    model = initial_model(config)
    return RankSetup(
        config=config, initial_model=model, world=world, signals=GracefulStop(), cleanup=cleanup, started=0.0
    )


def uninterrupted_losses(file: Path, world: World) -> dict[int, float]:
    """Losses of a training in this process."""
    config = load_config(file, ["run.name=uninterrupted"])
    with ExitStack() as cleanup:
        NextToken.from_setup(setup_of(config, world, cleanup)).run()
    return losses(config.paths)


def interrupt_run(forks: ForkServerContext, file: Path, trainer: type[Stopped]) -> list[int]:
    """Interrupts a learner in its fifth step; returns the steps of its checkpoints."""
    output = file.with_name("output")
    arguments = [str(file), f"learner.trainer.name={__name__}:{trainer.__name__}"]
    code = Forked(forks, "slipstream.learner.cli", arguments, output).wait(DEADLINE_S)
    assert code in (-trainer.number, 128 + trainer.number), output.read_text()
    return checkpoint_steps(RunPaths(file.parent / "sft").checkpoints)


def test_learner_needs_no_part_of_rl_and_continues_from_a_store(
    digits_model: Path, world: World, tmp_path: Path, forks: ForkServerContext
) -> None:
    file, paths = write_run(tmp_path, digits_model), RunPaths(tmp_path / "sft")
    assert interrupt_run(forks, file, Stopped) == [3, 4]
    shutil.rmtree(paths.checkpoints)
    code, output = run_learner(("-c", MODULES), file)
    assert code == 0, output
    modules = output.splitlines()
    assert "slipstream.learner.trainers.assemble" in modules
    assert [name for name in modules if name.startswith(OF_RL)] == []
    resumed = losses(paths)
    assert resumed == pytest.approx(uninterrupted_losses(file, world), rel=1e-5)
    assert resumed[STEPS] < 0.9 * resumed[1]
    assert (
        checkpoint_steps(paths.checkpoints)
        == checkpoint_steps(tmp_path / "store" / "sft" / "checkpoints")
        == [6, STEPS]
    )
    assert load_file(tmp_path / "store" / "sft" / "model" / "model.safetensors").keys()
    exported, initial = (AutoModelForCausalLM.from_pretrained(path) for path in (paths.export, digits_model))
    assert not exported.get_parameter("lm_head.weight").equal(initial.get_parameter("lm_head.weight"))


def test_killed_learner_resumes_adapters_on_two_ranks(
    digits_model: Path, world: World, tmp_path: Path, forks: ForkServerContext
) -> None:
    file = write_run(tmp_path, digits_model, lora={"rank": 4, "export": "adapter"})
    paths = RunPaths(tmp_path / "sft")
    assert interrupt_run(forks, file, Killed) == [3]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *LEARNER)
    code, output = run_learner(torchrun, file)
    assert code == 0, output
    assert losses(paths) == pytest.approx(uninterrupted_losses(file, world), rel=1e-4)
    assert checkpoint_steps(paths.checkpoints) == [6, STEPS]
    adapter = load_file(paths.export / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("collections:OrderedDict", "subclass of slipstream.learner.trainers.base.Trainer"),
        ("slipstream.learner.trainers.base:Trainer", "lacks from_setup, models, next_batch, update"),
    ],
    ids=["no-trainer", "incomplete"],
)
def test_class_that_can_not_train_is_refused(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        find_trainer(LearnerConfig.model_validate({"trainer": name}).trainer)


def test_wrong_options_are_named(digits_model: Path, world: World, tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, digits_model), ["learner.trainer.options={rows_per_step: many}"])
    with ExitStack() as cleanup, pytest.raises(ConfigError) as refused:
        NextToken.from_setup(setup_of(config, world, cleanup))
    keys = [problem.partition(":")[0] for problem in refused.value.problems]
    assert keys == ["learner.trainer.options.path", "learner.trainer.options.rows_per_step"]


def test_settings_of_rl_are_not_checked_for_other_trainers(digits_model: Path, tmp_path: Path) -> None:
    file = write_run(tmp_path, digits_model)
    unusable = ["rewards=[]", "rollout.group_size=1", "learner.groups_per_step=3", "learner.updates_per_step=2"]
    config = load_config(file, unusable)
    again = tmp_path / "dumped.yaml"
    again.write_text(dump_config(config), encoding="utf-8")
    assert load_config(again) == config
    with pytest.raises(ConfigError) as refused:
        load_config(file, [*unusable, "learner.trainer=rl"])
    assert len(refused.value.problems) >= 3
