"""Which ports a run needs."""

import socket

import pytest

from slipstream.configs import RunConfig
from slipstream.tools.launch.preflight import needed_ports, port_problems
from tests.conftest import free_port


@pytest.mark.parametrize(
    ("transport", "ports"),
    [
        ("auto", {"control_port", "store_port", "stream_port"}),
        ("gloo", {"control_port", "store_port", "stream_port"}),
        ("nccl", {"control_port", "store_port", "stream_port"}),
        ("stream", {"control_port", "stream_port"}),
        ("shm", {"control_port"}),
        ("file", {"control_port"}),
    ],
)
def test_of_the_weight_channels_ports_only_those_are_needed_that_the_transport_listens_on(
    transport: str, ports: set[str]
) -> None:
    config = RunConfig.model_validate({"model": {"build": "digits"}, "weights": {"transport": transport}})
    keys = {key for key, _, _ in needed_ports(config) if key.startswith("weights.")}
    assert keys == {f"weights.{port}" for port in ports}


def test_another_port_for_the_buffer_is_one_to_listen_on_and_to_ask() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = RunConfig.model_validate({
            "model": {"build": "digits"},
            "redis": {"port": free_port()},
            "buffer": {"bind": f"tcp://127.0.0.1:{port}"},
            "weights": {"transport": "shm", "control_port": port},
        })  # fmt: skip
        problems = port_problems(config)
        weights = config.model_copy(update={"buffer": config.buffer.model_copy(update={"bind": "ipc:///tmp/x"})})
        assert port_problems(weights)[0].endswith("names it) or choose another port")
    assert problems[0].startswith(f"buffer.bind: port {port} on 127.0.0.1 is busy; ")
    assert problems[0].endswith("names it) or choose another port, in buffer.endpoint too")
