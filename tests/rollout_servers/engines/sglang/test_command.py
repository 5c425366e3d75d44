"""Command lines, ports and consoles of servers."""

import socket
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.engines.sglang.server import command_line_flags, free_port, server_command


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({"tensor_parallel_size": 2}, ["--tensor-parallel-size", "2"]),
        (
            {"gpu_memory_utilization": 0.8, "model": "/a model"},
            ["--gpu-memory-utilization", "0.8", "--model", "/a model"],
        ),
        ({"hf_overrides": {"rope_theta": 1e6}}, ["--hf-overrides", '{"rope_theta": 1000000.0}']),
        ({"middleware": ["a", "b"]}, ["--middleware", "a", "b"]),
        ({"cuda_graph_bs_decode": (1, 2)}, ["--cuda-graph-bs-decode", "1", "2"]),
        ({"quantization": None, "enable_metrics": False}, []),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"seed": 0}, ["--seed", "0"]),
    ],
)
def test_argument_becomes_flag_of_its_kind(arguments: dict[str, Any], flags: list[str]) -> None:
    assert command_line_flags(arguments) == flags


def test_server_listens_on_loopback_whatever_its_flags(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"dir": tmp_path, "name": "a-run"},
            "model": {"path": "/a/model"},
        }
    )
    command = server_command(
        config,
        name="a server",
        python="/a/python",
        module="a.server",
        flags=["--host", "0.0.0.0", "--port", "1"],
        environment={},
        health="/health",
    )
    port = command.port
    assert command.arguments[:3] == ["/a/python", "-m", "a.server"]
    assert command.arguments[-4:] == ["--host", "127.0.0.1", "--port", str(port)], "the last of two counts"
    assert command.console.parent == tmp_path / "a-run" / "logs"
    assert command.console.name.endswith(f"-{port}.engine.console"), "no other engine of this host has the port"


def test_free_port_has_no_listener() -> None:
    ports = {free_port() for _ in range(10)}
    assert len(ports) > 5
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_ports_with_a_listener_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr("random.sample", lambda *_: [port])
        with pytest.raises(EngineError):
            free_port()
    assert free_port() == port
