"""A run whose episodes have several turns."""

from multiprocessing.context import ForkServerContext

import numpy as np

from slipstream.buffer.wire import codec
from slipstream.models.digits import EOS, TOKENS
from tests.pipeline.conftest import Pipeline
from tests.pipeline.runs import train, trained_groups
from tests.pipeline.two_turns import HINT

EOS_ID = TOKENS.index(EOS)
OVERRIDES = (
    "rollout.engine.name=hf",
    "env={name: tests.pipeline.two_turns:TwoTurns, options: {}}",
    "rollout.sampling={max_tokens: 16, ignore_eos: false}",
    "rollout.group_size=8",
    "learner.steps=2",
    "learner.optimizer.warmup_steps=0",
    "learner.groups_per_step=4",
    "learner.checkpoint.every_steps=1",
    "eval.tasks=4",
)


def test_a_run_trains_on_episodes_of_two_turns(forks: ForkServerContext, pipeline: Pipeline) -> None:
    assert train(forks, pipeline, *OVERRIDES) == 0
    groups = [group for step in trained_groups(pipeline.run_folder) for group in step]
    assert len(groups) == 8
    hint, turns = [TOKENS.index(token) for token in HINT], list[float]()
    for group in groups:
        assert [trajectory.episode for trajectory in group.trajectories] == list(range(8))
        for trajectory in group.trajectories:
            turns.append(trajectory.scores["env/turns"])
            assert sum(span.value for span in trajectory.rewards) == trajectory.reward
            mask, ids = codec.action_mask(trajectory), codec.token_ids(trajectory)
            assert (codec.behaviour_logprobs(trajectory)[mask == 0] == 0).all()
            if turns[-1] == 2:
                (first_end,) = np.flatnonzero((ids == EOS_ID) & (mask == 1))[:1]
                assert ids[first_end + 1 :][:2].tolist() == hint
                assert mask[first_end + 1 :][:3].tolist() == [0, 0, 1]
    assert {1.0, 2.0} >= set(turns) >= {2.0}
