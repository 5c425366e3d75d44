"""The memory that a configuration needs, compared with the server's."""

import numpy as np
import pytest
import structlog

from slipstream.buffer.store.server_checks import ServerMemory, group_bytes, require_memory, stored_groups
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode_group
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.buffer import BufferConfig
from slipstream.configs.schema.learner import CheckpointConfig, LearnerConfig
from slipstream.configs.schema.rollout import RolloutConfig, SamplingConfig

LONG = RolloutConfig(group_size=16, sampling=SamplingConfig(max_tokens=32_000))
BUFFER = BufferConfig(max_staleness=1)
LEARNER = LearnerConfig(groups_per_step=128, checkpoint=CheckpointConfig(every_steps=100))


def require(memory: ServerMemory, *, rollout: RolloutConfig = LONG) -> None:
    require_memory(memory, buffer=BUFFER, learner=LEARNER, rollout=rollout, groups_per_version=128)


def test_groups_are_those_of_pipeline_checkpoint_and_retention() -> None:
    assert stored_groups(BUFFER, LEARNER, groups_per_version=256) == 2 * 256 + 128 * 100 + 1000


def test_long_answers_beyond_maxmemory_are_refused() -> None:
    needed_bytes = (256 + 12_800 + 1000) * group_bytes(LONG)
    require(ServerMemory(maxmemory_bytes=needed_bytes))
    with pytest.raises(ConfigError, match=r"maxmemory .*checkpoint\.every_steps=100.*retention\.max_groups=1000"):
        require(ServerMemory(maxmemory_bytes=needed_bytes - 1, host_bytes=needed_bytes))


@pytest.mark.parametrize(("host_bytes", "warned"), [(10**9, True), (10**12, False), (0, False)])
def test_host_with_too_little_memory_is_warned_about(host_bytes: int, warned: bool) -> None:
    with structlog.testing.capture_logs() as logs:
        require(ServerMemory(host_bytes=host_bytes))
    assert bool(logs) == warned


@pytest.mark.parametrize("tokens", [10, 1000, 32_000])
def test_estimate_covers_random_tokens(tokens: int) -> None:
    """Uniform token ids of a large vocabulary, and log-probs of full precision."""
    rng = np.random.default_rng(0)
    rollout = RolloutConfig(group_size=2, sampling=SamplingConfig(max_tokens=tokens))
    answers = [
        m.Trajectory(
            token_ids=rng.integers(0, 1 << 17, tokens).astype(m.TOKEN_DTYPE).tobytes(),
            action_mask=b"\1" * tokens,
            behaviour_logprobs=(-rng.exponential(size=tokens)).astype(m.LOGPROB_DTYPE).tobytes(),
            spans=[m.VersionSpan(version=0, start=0, end=tokens)],
            reward=1.0,
            scores={"exact_match": 1.0},
            finish_reason="stop",
            episode=number,
        )
        for number in range(2)
    ]
    group = m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=answers)
    assert len(encode_group(group)) <= 1.1 * group_bytes(rollout)
