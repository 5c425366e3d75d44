"""Which ports a run needs."""

import pytest

from slipstream.configs import RunConfig
from slipstream.tools.ports import needed_ports


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
