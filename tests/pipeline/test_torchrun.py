"""A run whose learner has two ranks."""

from multiprocessing.context import ForkServerContext

import pytest

from tests.conftest import free_port
from tests.pipeline.conftest import DEADLINE_S, Pipeline
from tests.pipeline.runs import serving


@pytest.mark.timeout(600)
def test_two_learner_ranks_under_torchrun_train_one_policy(pipeline: Pipeline, forks: ForkServerContext) -> None:
    overrides = ("learner.checkpoint.every_steps=3", "learner.checkpoint.asynchronous=true", "eval.every_steps=0")
    short = ("rollout.engine.name=hf", "learner.steps=10", "learner.optimizer.warmup_steps=0")
    with serving(forks, pipeline, *short, *overrides) as services:
        ranks = ["--nproc-per-node=2", f"--master-port={free_port()}", "-m", "slipstream.learner.cli"]
        torchrun = services.start("torch.distributed.run", *ranks)
        output = torchrun.communicate(timeout=DEADLINE_S)[0]
        assert torchrun.returncode == 0, output
    summary = pipeline.summary()
    assert summary["groups"]["trained"] == 10 * 32
    assert summary["engine_mismatch_abs"] < 1e-4
