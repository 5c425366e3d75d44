"""Which transports a learner offers."""

from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.errors import ConfigError
from slipstream.learner.weights.transports.build import transport_names

VLLM_PROCESS = {"name": "vllm", "core": "process"}
BY_HOST = ("shm", "stream")


@pytest.mark.parametrize(
    ("engine", "gpu", "offered"),
    [
        (VLLM_PROCESS, True, ("nccl", *BY_HOST)),
        (VLLM_PROCESS, False, ("shm", "gloo", "stream")),
        ({"name": "vllm", "core": "inline"}, True, BY_HOST),
        ({"name": "vllm", "core": "server"}, True, BY_HOST),
        ({"name": "sglang", "core": "process"}, True, BY_HOST),
    ],
)
def test_weights_are_kept_on_the_gpu_for_nccl_only_where_the_engines_take_it(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], gpu: bool, offered: tuple[str, ...]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    config = RunConfig.model_validate({"model": {"build": "digits"}, "rollout": {"engine": engine}})
    assert transport_names(config) == offered


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = RunConfig.model_validate({"model": {"build": "digits"}, "weights": {"transport": "nccl"}})
    with pytest.raises(ConfigError, match="nccl needs a CUDA GPU"):
        transport_names(config)
