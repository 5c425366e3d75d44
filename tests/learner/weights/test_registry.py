"""Which transports a learner offers."""

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.weights.transports.registry import transport_names

VLLM_PROCESS = {"name": "vllm", "core": "process"}
BY_HOST = ("shm", "stream")
BUILD = "slipstream.learner.weights.transports.registry"


def imports(there: bool) -> Callable[[str], None]:
    """What importing does where vLLM is there, or is not."""

    def import_module(name: str) -> None:
        if not there:
            raise ModuleNotFoundError("No module named 'vllm'")

    return import_module


@pytest.mark.parametrize(
    ("engine", "gpu", "vllm", "offered"),
    [
        (VLLM_PROCESS, True, True, ("nccl", *BY_HOST)),
        (VLLM_PROCESS, True, False, BY_HOST),
        (VLLM_PROCESS, False, True, ("shm", "gloo", "stream")),
        ({"name": "vllm", "core": "inline"}, True, True, BY_HOST),
        ({"name": "sglang", "core": "process"}, True, True, BY_HOST),
    ],
)
def test_auto_offers_nccl_only_where_both_sides_support_it(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], gpu: bool, vllm: bool, offered: tuple[str, ...]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(f"{BUILD}.import_module", imports(vllm))
    config = RunConfig.model_validate({"model": {"build": "digits"}, "rollout": {"engine": engine}})
    assert transport_names(config) == offered


def test_sglang_nccl_is_explicit_and_needs_no_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(f"{BUILD}.import_module", imports(False))
    settings = {"rollout": {"engine": {"name": "sglang"}}, "weights": {"transport": "nccl"}}
    config = RunConfig.model_validate({"model": {"build": "digits"}, **settings})
    assert transport_names(config) == ("nccl_sglang", "stream")


@pytest.mark.parametrize(
    ("gpu", "vllm", "reason"),
    [(False, True, "nccl needs a CUDA GPU"), (True, False, "nccl needs vLLM, .* too .No module named 'vllm'")],
)
def test_nccl_is_refused_where_the_learner_lacks_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, vllm: bool, reason: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(f"{BUILD}.import_module", imports(vllm))
    config = RunConfig.model_validate({"model": {"build": "digits"}, "weights": {"transport": "nccl"}})
    with pytest.raises(ConfigError, match=reason):
        transport_names(config)
