"""Names of the schema and of the registries are the same, and each names something that exists."""

from typing import get_args

import pytest

from slipstream.configs.registry import Registry
from slipstream.configs.schema.advantages import ADVANTAGES
from slipstream.configs.schema.losses import LOSSES
from slipstream.configs.schema.rollout import EngineConfig
from slipstream.configs.schema.tracking import TrackingConfig
from slipstream.configs.schema.trainers import TRAINERS
from slipstream.configs.schema.weights import TRANSPORTS, TransportName
from slipstream.env.adapters.textarena import OPPONENTS
from slipstream.env.registry import ENVS, TOOLS
from slipstream.learner.metrics.trackers import DESTINATIONS
from slipstream.rewards.registry import REWARDS
from slipstream.rollout_servers.engines.registry import ENGINES

SENDERS = Registry("sender", {name: transport.sender for name, transport in TRANSPORTS.items()})
RECEIVERS = Registry("receiver", {name: kind.receiver for name, kind in TRANSPORTS.items() if kind.receiver})
REGISTRIES = (
    ADVANTAGES, DESTINATIONS, ENGINES, ENVS, LOSSES, OPPONENTS, RECEIVERS, REWARDS, SENDERS, TOOLS, TRAINERS,
)  # fmt: skip
NAMES = [(registry, name) for registry in REGISTRIES for name in registry.built_in]


@pytest.mark.parametrize(("registry", "name"), NAMES, ids=[f"{registry.kind} {name}" for registry, name in NAMES])
def test_each_name_has_an_implementation(registry: Registry, name: str) -> None:
    assert callable(registry.load(name))


def test_schema_and_registries_have_the_same_names() -> None:
    engines = {name.partition("/")[0] for name in ENGINES.built_in}
    assert engines == set(get_args(EngineConfig.model_fields["name"].annotation))
    others = {"names", "samples", "project", "price_per_gpu_hour", "trace", "prometheus"}
    assert set(DESTINATIONS.built_in) == set(TrackingConfig.model_fields) - others
    assert {transport.key for transport in TRANSPORTS.values()} == set(get_args(TransportName))
