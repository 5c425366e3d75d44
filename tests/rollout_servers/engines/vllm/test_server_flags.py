"""Engine arguments as flags."""

from typing import Any

import pytest

from slipstream.rollout_servers.engines.vllm.server_flags import command_line_flags


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({"tensor_parallel_size": 2}, ["--tensor-parallel-size", "2"]),
        (
            {"gpu_memory_utilization": 0.8, "model": "/a model"},
            ["--gpu-memory-utilization", "0.8", "--model", "/a model"],
        ),
        ({"enforce_eager": True, "async_scheduling": False}, ["--enforce-eager", "--no-async-scheduling"]),
        ({"hf_overrides": {"rope_theta": 1e6}}, ["--hf-overrides", '{"rope_theta": 1000000.0}']),
        ({"middleware": ["a", "b"]}, ["--middleware", "a", "b"]),
        ({"quantization": None}, []),
        ({"seed": 0}, ["--seed", "0"]),
    ],
)
def test_an_argument_becomes_a_flag_of_its_kind(arguments: dict[str, Any], flags: list[str]) -> None:
    assert command_line_flags(arguments) == flags
