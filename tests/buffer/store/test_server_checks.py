"""The memory that a configuration needs, compared with the server's."""

import numpy as np
import pytest
import structlog

from slipstream.buffer.store.server_checks import ServerMemory, group_bytes, needed_bytes, require_memory
from slipstream.buffer.store.types import SPILL_BYTES
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode_group
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.buffer import BufferConfig
from slipstream.configs.schema.learner import CheckpointConfig, LearnerConfig
from slipstream.configs.schema.rollout import RolloutConfig, SamplingConfig

SHORT = RolloutConfig(group_size=16, sampling=SamplingConfig(max_tokens=100))
LONG = RolloutConfig(group_size=16, sampling=SamplingConfig(max_tokens=32_000))
BUFFER = BufferConfig(max_staleness=1)
LEARNER = LearnerConfig(groups_per_step=128, checkpoint=CheckpointConfig(every_steps=100))


def require(memory: ServerMemory, *, rollout: RolloutConfig = LONG) -> None:
    require_memory(memory, buffer=BUFFER, learner=LEARNER, rollout=rollout, groups_per_version=128)


@pytest.mark.parametrize(("max_tokens", "kept_bytes"), [(100, group_bytes(SHORT)), (32_000, SPILL_BYTES + 2500)])
def test_needed_memory(max_tokens: int, kept_bytes: int) -> None:
    """All groups of the pipeline and of a step that is being spilled; of the others what is not spilled."""
    rollout = RolloutConfig(group_size=16, sampling=SamplingConfig(max_tokens=max_tokens))
    size = group_bytes(rollout)
    expected = 2 * 256 * size + 128 * size + (128 * 99 + 1000) * kept_bytes
    assert needed_bytes(BUFFER, LEARNER, rollout, groups_per_version=256) == expected


def test_long_answers_beyond_maxmemory_are_refused() -> None:
    needed = needed_bytes(BUFFER, LEARNER, LONG, groups_per_version=128)
    assert 1e9 < needed < 2.5e9, "47 GB without spill files"
    require(ServerMemory(maxmemory_bytes=needed))
    with pytest.raises(ConfigError, match=r"maxmemory .*checkpoint\.every_steps=100.*retention\.max_groups=1000"):
        require(ServerMemory(maxmemory_bytes=needed - 1, host_bytes=needed))


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
            token_ids=rng.integers(0, 1 << 17, tokens).astype(m.TOKEN_DTYPE).tobytes(), action_mask=b"\1" * tokens,
            behaviour_logprobs=(-rng.exponential(size=tokens)).astype(m.LOGPROB_DTYPE).tobytes(),
            spans=[m.VersionSpan(version=0, start=0, end=tokens)], reward=1.0, scores={"exact_match": 1.0},
            finish_reason="stop", episode=number,
        )
        for number in range(2)
    ]  # fmt: skip
    group = m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=answers)
    assert len(encode_group(group)) <= 1.1 * group_bytes(rollout)
