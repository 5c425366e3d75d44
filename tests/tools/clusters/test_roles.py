"""The table of roles: who runs on which nodes, with what, and what is refused."""

from functools import partial
from pathlib import Path

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.passwords import LEARNERS_SECRETS
from slipstream.tools.clusters.roles import (
    Role,
    cluster_roles,
    cluster_settings,
    rank_environment,
    server_nodes,
)
from tests.tools.run_command import DEMO, demo_config

TP4 = "rollout.engine.options={tensor_parallel_size: 4}"


def table(*overrides: str, nodes: int = 1, gpus: int = 0, cpus: int | None = None) -> dict[str, Role]:
    """The roles of the demo by name."""
    config = demo_config(Path("folder"), *overrides)
    return {role.name: role for role in cluster_roles(config, nodes=nodes, gpus_per_node=gpus, cpus_per_node=cpus)}


@pytest.mark.parametrize(
    ("overrides", "nodes", "gpus", "servers", "ranks", "places"),
    [
        ([], 1, 0, (1, 1, 0), (1, 1, 0), [0]),
        ([], 3, 0, (2, 2, 0), (1, 1, 0), [1, 2]),
        (["learner.ranks=2"], 3, 0, (1, 1, 0), (2, 2, 0), [2]),
        (["rollout.servers=3"], 2, 0, (3, 1, 0), (1, 1, 0), [1, 1, 1]),
        ([], 1, 8, (4, 1, 1), (4, 1, 1), [0] * 4),
        ([], 4, 8, (16, 2, 1), (16, 2, 1), [2, 3] * 8),
        (["learner.ranks=4"], 2, 8, (12, 2, 1), (4, 1, 1), [1] * 8 + [0] * 4),
        ([TP4], 2, 8, (2, 1, 4), (8, 1, 1), [1, 1]),
        ([TP4, "rollout.servers=1"], 2, 8, (1, 1, 4), (8, 1, 1), [1]),
    ],
)
def test_processes_nodes_and_gpus(
    overrides: list[str],
    nodes: int,
    gpus: int,
    servers: tuple[int, int, int],
    ranks: tuple[int, int, int],
    places: list[int],
) -> None:
    roles = table(*overrides, nodes=nodes, gpus=gpus)
    assert list(roles) == ["redis", "buffer", "rollout", "learner"]
    rollout, learner = roles["rollout"], roles["learner"]
    assert (rollout.processes, rollout.nodes, rollout.gpus) == servers
    assert (learner.processes, learner.nodes, learner.gpus) == ranks
    assert server_nodes(list(roles.values()), nodes=nodes, gpus_per_node=gpus) == places


@pytest.mark.parametrize(
    ("nodes", "gpus", "cpus", "server", "rank"),
    [(1, 0, None, 1, 1), (1, 0, 10, 4, 4), (2, 0, 10, 8, 8), (2, 4, 34, 8, 8), (2, 4, None, 4, 4)],
)
def test_cores_are_divided(nodes: int, gpus: int, cpus: int | None, server: int, rank: int) -> None:
    roles = table(nodes=nodes, gpus=gpus, cpus=cpus)
    assert (roles["rollout"].cpus, roles["learner"].cpus) == (server, rank)
    assert roles["learner"].environment == {"OMP_NUM_THREADS": str(rank)}


def test_ports_secrets_and_state() -> None:
    key = "rewards=[{name: judge, options: {endpoint: 'https://a', model: b, prompt: c, api_key_variable: JUDGES_KEY}}]"
    roles = table(key, "learner.ranks=2")
    assert roles["redis"].ports == {"redis.port": 6399}
    assert roles["buffer"].ports == {"buffer.bind": 5555}
    assert {"weights.control_port", "weights.stream_port", "MASTER_PORT"} <= roles["learner"].ports.keys()
    assert {name: role.secrets for name, role in roles.items()} == {
        "redis": ("SLIPSTREAM_REDIS_PASSWORD",),
        "buffer": ("SLIPSTREAM_REDIS_PASSWORD",),
        "rollout": ("JUDGES_KEY",),
        "learner": tuple(sorted(LEARNERS_SECRETS)),
    }
    assert [name for name, role in roles.items() if role.keeps_state] == ["redis", "learner"]
    assert "redis" not in table("redis.url=redis://elsewhere:6379/0")


def test_notice_prolongs_grace() -> None:
    assert [table(f"rollout.notice_s={notice}")["rollout"].grace_s for notice in (0, 110)] == [30, 120]


def test_settings_lead_to_the_hosts() -> None:
    settings_of = partial(cluster_settings, redis_host="store", buffer_host="store", learner_host="train")
    settings = settings_of(load_config(DEMO), ports={"redis.port": 7000, "buffer.bind": 7001})
    config = load_config(DEMO, settings)
    assert config.redis.url == "redis://store:7000/0"
    assert (config.buffer.bind, config.buffer.endpoint) == ("tcp://0.0.0.0:7001", "tcp://store:7001")
    assert (config.weights.bind, config.weights.host) == ("0.0.0.0", "train")
    assert config.rollout.notice_s == 20
    external = load_config(DEMO, ["redis.url=redis://elsewhere:6379/0", "rollout.notice_s=90"])
    again = load_config(DEMO, settings_of(external, bind=None))
    assert (again.redis.url, again.rollout.notice_s) == (None, 90)
    assert (again.buffer.bind, again.weights.bind) == ("tcp://store:5555", "train")


def test_rank_environment_is_torchruns() -> None:
    assert rank_environment(rank=5, ranks=8, per_node=4, host="train", port=29500) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "train",
        "MASTER_PORT": "29500",
    }


@pytest.mark.parametrize(
    ("overrides", "nodes", "gpus", "words"),
    [
        ([TP4], 2, 2, ["engine of 4 GPUs", "have 2"]),
        ([], 1, 1, ["1 + 1 GPUs", "have 1"]),
        (["learner.ranks=16"], 2, 8, ["1 + 16 GPUs", "have 16"]),
        (["learner.ranks=8", "rollout.servers=9"], 2, 8, ["9 + 8 GPUs", "room for 8 servers"]),
        (["learner.ranks=4"], 4, 3, ["learner.ranks=4", "multiple of its 3"]),
        (["learner.ranks=3"], 2, 8, ["learner.ranks=3", "= 32 "]),
        (["learner.ranks=3"], 2, 0, ["learner.ranks=3", "= 32 "]),
        (["buffer.bind=ipc:///tmp/buffer"], 1, 0, ["buffer.bind=ipc:///tmp/buffer"]),
    ],
)
def test_what_cannot_work_is_refused_with_numbers(
    overrides: list[str], nodes: int, gpus: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        table(*overrides, nodes=nodes, gpus=gpus)
    assert all(word in str(refused.value) for word in words), refused.value
