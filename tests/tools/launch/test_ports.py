"""Ports of a run: free ones are chosen, and busy ones are named."""

import socket
from pathlib import Path

import pytest

from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.tools.launch.ports import choose_port_base, is_confined, needed_ports, port_problems
from tests.conftest import free_port
from tests.tools.run_command import demo_config

BROADCAST_PORTS = {"control_port", "store_port", "stream_port"}


@pytest.mark.parametrize(
    ("transport", "ports"),
    [
        ("auto", BROADCAST_PORTS),
        ("gloo", BROADCAST_PORTS),
        ("nccl", BROADCAST_PORTS),
        ("stream", {"control_port", "stream_port"}),
        ("shm", {"control_port"}),
        ("file", {"control_port"}),
    ],
)
def test_transport_determines_the_weight_ports(transport: str, ports: set[str]) -> None:
    config = RunConfig.model_validate({"model": {"build": "digits"}, "weights": {"transport": transport}})
    keys = {key for key, _, _ in needed_ports(config)}
    assert keys == {"redis.port", "buffer.bind", *(f"weights.{port}" for port in ports)}


def test_busy_and_shared_ports_are_named_with_their_keys(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, redis = taken.getsockname()[1], free_port()
        overrides = [f"redis.port={redis}", f"buffer.bind=tcp://127.0.0.1:{port}", "weights.transport=shm"]
        busy, shared = port_problems(needed_ports(demo_config(tmp_path, *overrides, f"weights.control_port={redis}")))
    assert busy.startswith(f"buffer.bind: port {port} ")
    assert "buffer.endpoint" in busy
    assert shared.startswith(f"weights.control_port: port {redis} ")
    assert "redis.port" in shared


def test_base_determines_the_ports_that_are_not_given(tmp_path: Path) -> None:
    base = 20_000
    by_key = {key: port - base for key, _, port in needed_ports(demo_config(tmp_path, f"run.port_base={base}"))}
    assert list(by_key.values()) == [0, 1, 2, 3, 4]
    given = [f"run.port_base={base}", "redis.port=99", "buffer.bind=tcp://0.0.0.0:98", "weights={store_port: 97}"]
    config = demo_config(tmp_path, *given)
    assert [port for _, _, port in needed_ports(config)] == [99, 98, base + 2, 97, base + 4]
    assert config.buffer.endpoint == RunConfig.model_fields["buffer"].default.endpoint


def test_continued_run_has_its_ports_again_unless_they_are_busy(tmp_path: Path) -> None:
    folder = demo_config(tmp_path).paths
    base = choose_port_base(folder)
    begun = demo_config(tmp_path, f"run.port_base={base}")
    assert not port_problems(needed_ports(begun))
    create_run_folder(begun.paths, begun)
    assert choose_port_base(folder) == base
    with socket.create_server(("127.0.0.1", begun.weights.stream_port)):
        other = demo_config(tmp_path, f"run.port_base={choose_port_base(folder)}")
        assert not port_problems(needed_ports(other))


@pytest.mark.parametrize(
    ("override", "confined"),
    [
        ("run.name=mine", True),
        ("buffer.bind=ipc:///tmp/buffer", True),
        ("buffer.bind=tcp://0.0.0.0:5555", False),
        ("weights.bind=0.0.0.0", False),
    ],
)
def test_ports_are_chosen_only_on_loopback(tmp_path: Path, override: str, confined: bool) -> None:
    config = demo_config(tmp_path, override)
    assert is_confined(config.buffer, config.weights) == confined
