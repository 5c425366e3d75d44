"""The transports that a learner offers."""

from contextlib import closing
from pkgutil import resolve_name
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.weights import TRANSPORTS, Transport
from slipstream.learner.weights.fetch import StreamTransport
from slipstream.learner.weights.transports import build_transports, offered_transports
from tests.conftest import free_port

VLLM_PROCESS = {"name": "vllm", "core": "process"}
SGLANG = {"name": "sglang", "core": "process"}
BY_HOST = ("shm", "stream")
MODULE = "slipstream.learner.weights.broadcast"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, gpu: bool, vllm: bool) -> None:
    """A learner's host with or without a GPU and vLLM."""

    def import_module(name: str) -> None:
        if not vllm:
            raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(f"{MODULE}.import_module", import_module)


def names(transport: str, engine: dict[str, Any]) -> tuple[str, ...]:
    sections = {"rollout": {"engine": engine}, "weights": {"transport": transport}}
    config = RunConfig.model_validate({"model": {"build": "digits"}} | sections)
    offered = offered_transports(config.weights, run=config.run.name, direct=config.rollout.engine.direct)
    return tuple(each.name for each in offered)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("transport", "engine", "gpu", "vllm", "offered"),
    [
        ("auto", VLLM_PROCESS, True, True, ("nccl", *BY_HOST)), ("auto", VLLM_PROCESS, True, False, BY_HOST),
        ("auto", VLLM_PROCESS, False, True, ("shm", "gloo", "stream")),
        ("auto", {"name": "vllm", "core": "inline"}, True, True, BY_HOST), ("auto", SGLANG, True, True, BY_HOST),
        ("nccl", SGLANG, True, False, ("nccl_sglang", "stream")), ("stream", VLLM_PROCESS, True, True, ("stream",)),
        ("ipc", {"name": "hf"}, False, True, ("ipc", "shm")),
    ],
)  # fmt: skip
def test_offered_transports(transport: str, engine: dict[str, Any], offered: tuple[str, ...]) -> None:
    assert names(transport, engine) == offered


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_table_names_both_halves(transport: Transport) -> None:
    sender = resolve_name(transport.sender)
    assert hasattr(sender, "form" if transport.broadcast else "prepare")
    assert transport.direct == (transport.engine is not None)
    assert transport.direct or hasattr(resolve_name(str(transport.receiver)), "receive")
    assert (transport.broadcast or transport.on_device) == (transport.late is not None)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("gpu", "vllm"), [(False, True), (True, False)])
def test_nccl_needs_gpu_and_vllm() -> None:
    with pytest.raises(ConfigError, match=r"weights\.transport=nccl"):
        names("nccl", VLLM_PROCESS)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("transport", "gpu", "vllm", "differences"),
    [("auto", True, False, True), ("auto", False, False, False), ("stream", False, False, True)],
)
def test_stream_sends_differences_unless_beside_a_broadcast(transport: str, differences: bool) -> None:
    ports = {name: free_port() for name in ("store_port", "stream_port")}
    config = RunConfig.model_validate(
        {"model": {"build": "digits"}, "weights": {"transport": transport, "full_every": 7, **ports}}
    )
    with closing(build_transports(config)) as transports:
        stream = transports.fetched["stream"]
        assert isinstance(stream, StreamTransport)
        assert stream.full_every == (7 if differences else 1)
