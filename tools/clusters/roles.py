"""The table of a run's roles on a cluster: processes, nodes, resources, environment, ports. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.tools.launch.placement import Role as RoleName
from slipstream.tools.launch.placement import mesh_unit, rank_problems
from slipstream.tools.launch.ports import needed_ports
from slipstream.tools.launch.secrets import needed_by

RENDEZVOUS: Final = "MASTER_PORT"
RENDEZVOUS_PORT: Final = 29500
"""Port of the store of several learner ranks: torchrun's default."""
CPUS_PER_GPU: Final = 4
"""Cores of a process for each of its GPUs, where the size of the nodes is not given."""
GRACE_S: Final = 30.0
"""Time that Redis, the buffer and a rollout server need at most to end in order, a rollout server besides its notice
where that is longer than NOTICE_S."""
NOTICE_S: Final = 20.0
"""`rollout.notice_s` on clusters, where it is not set."""
LEAST_SHARED_BYTES: Final = 2 << 30
"""Shared memory of NCCL, of torch and of small models."""
HOST_BYTES: Final = 4 << 30
"""Memory of a process with torch, without the weights."""
MODULES: Final[Mapping[RoleName, str]] = {
    "redis": "slipstream.tools.clusters.redis_server",
    "buffer": "slipstream.buffer.cli",
    "rollout": "slipstream.rollout_servers.cli",
    "learner": "slipstream.learner.cli",
}
"""Module of each role, for `python -P -m MODULE CONFIG key.path=value …`; images have the last three as programs."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """Processes of one kind; all figures but `processes` and `nodes` are those of one process."""

    name: RoleName
    """Also the name of the program in the images, but for Redis."""
    processes: int = 1
    """In all: rollout servers, or learner ranks."""
    nodes: int = 1
    """Nodes over which they are spread: of the learner equally many on each."""
    gpus: int = 0
    cpus: int = 1
    least_memory_bytes: int | None = None
    """Memory of the host that it surely needs; None: not known."""
    shared_memory_bytes: int | None = None
    """Largest contents of /dev/shm, on its node; None: not known. Redis and buffer have none."""
    environment: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    """Environment variables with secrets that it may need, and that no other role gets unless it lists them."""
    ports: Mapping[str, int]
    """Ports on which its first process listens, by configuration key; `MASTER_PORT` is that of several ranks."""
    grace_s: float = GRACE_S
    """Time between SIGTERM and SIGKILL: of a learner, for its step and the checkpoint."""
    keeps_state: bool = False
    """True if it must find its files again when it is started on another node."""

    @property
    def module(self) -> str:
        """The module that Python runs."""
        return MODULES[self.name]

    @property
    def per_node(self) -> int:
        """Processes on each of its nodes, at most."""
        return -(-self.processes // self.nodes)


def cluster_roles(
    config: RunConfig,
    *,
    nodes: int,
    gpus_per_node: int = 0,
    cpus_per_node: int | None = None,
    weight_bytes: int | None = None,
) -> tuple[Role, ...]:
    """The roles of a run on so many equal nodes, in the order of their start; Redis is left out with a `redis.url`.

    Redis and buffer share a node; a learner's ranks fill whole nodes or are on one, and rollout servers get the rest.

    Args:
        cpus_per_node: but for two, of Redis and buffer, divided among the GPUs, or without GPUs among the rollout
            servers and ranks of a node; None: CPUS_PER_GPU for each GPU, or one for each process.
        weight_bytes: size of the model's weights; None: not known.

    Raises: ConfigError with all that can't work.
    """
    if not config.uses_buffer:
        raise ConfigError(
            f"clusters are given the processes of RL; learner.trainer={config.learner.trainer.name} needs only the "
            "learner: start it with torchrun"
        )
    servers, ranks, learner_nodes = (
        _divide_gpus(config, nodes, gpus_per_node) if gpus_per_node else _divide_nodes(config, nodes)
    )
    per_server, per_rank = (config.rollout.engine.gpus, 1) if gpus_per_node else (0, 0)
    others = nodes - learner_nodes
    are_beside = servers > others * (gpus_per_node // per_server) if per_server else not others
    rollout_nodes = min(servers, others + are_beside)
    if gpus_per_node:
        cpus_per_gpu = CPUS_PER_GPU if cpus_per_node is None else max(1, (cpus_per_node - 2) // gpus_per_node)
        server_cpus, rank_cpus = per_server * cpus_per_gpu, per_rank * cpus_per_gpu
    else:
        on_node = [-(-servers // rollout_nodes), -(-ranks // learner_nodes)]
        server_cpus, rank_cpus = (
            max(1, ((cpus_per_node or 1) - 2) // (sum(on_node) if are_beside else count)) for count in on_node
        )
    ports, shared = _ports(config), None
    if weight_bytes is not None:
        shared = LEAST_SHARED_BYTES + 2 * weight_bytes
    roles = [
        Role(name="buffer", environment={}, secrets=needed_by("buffer", config), ports=ports["buffer"]),
        Role(
            name="rollout",
            processes=servers,
            nodes=rollout_nodes,
            gpus=per_server,
            cpus=server_cpus,
            least_memory_bytes=None if weight_bytes is None else HOST_BYTES + 2 * weight_bytes,
            shared_memory_bytes=shared,
            environment={"OMP_NUM_THREADS": str(server_cpus)},
            secrets=needed_by("rollout", config),
            ports={},
            grace_s=GRACE_S - NOTICE_S + _notice_s(config),
        ),
        Role(
            name="learner",
            processes=ranks,
            nodes=learner_nodes,
            gpus=per_rank,
            cpus=rank_cpus,
            # Two versions for the servers; without GPUs also weights, gradients and optimizer in float32.
            least_memory_bytes=None if weight_bytes is None else HOST_BYTES + (4 if per_rank else 12) * weight_bytes,
            shared_memory_bytes=shared,
            environment={"OMP_NUM_THREADS": str(rank_cpus)},
            secrets=needed_by("learner", config),
            ports=ports["learner"] | ({RENDEZVOUS: RENDEZVOUS_PORT} if ranks > 1 else {}),
            grace_s=config.learner.wait_deadline_s,
            keeps_state=True,  # checkpoints, in a folder that all its nodes see
        ),
    ]
    if config.redis.url is None:
        redis = Role(
            name="redis",
            environment={},
            secrets=needed_by("redis", config),
            ports=ports["redis"],
            keeps_state=True,
        )
        roles.insert(0, redis)
    return tuple(roles)


def cluster_settings(
    config: RunConfig,
    *,
    redis_host: str,
    buffer_host: str,
    learner_host: str,
    bind: str | None = "0.0.0.0",
    ports: Mapping[str, object] | None = None,
) -> tuple[str, ...]:
    """The overrides `key.path=value` with which processes on several hosts find each other; the same for all of them.

    Args:
        redis_host: name or IPv4 address; in a script also a variable of the shell, as the others.
        bind: address on which buffer and learner listen; None: each on that of its host.
        ports: other ports than those of the configuration, by its keys (see `Role.ports`).
    """
    given = {key: port for role in _ports(config).values() for key, port in role.items()} | dict(ports or {})
    port = given.pop("buffer.bind")
    settings: dict[str, object] = {
        "buffer.bind": f"tcp://{bind or buffer_host}:{port}",
        "buffer.endpoint": f"tcp://{buffer_host}:{port}",
        "weights.bind": bind or learner_host,
        "weights.host": learner_host,
        "rollout.notice_s": _notice_s(config),
    }
    if "redis.port" in given:
        settings["redis.url"] = f"redis://{redis_host}:{given['redis.port']}/0"
    return tuple(f"{key}={value}" for key, value in (settings | given).items())


def rank_environment(*, rank: int, ranks: int, per_node: int, host: str, port: int) -> dict[str, str]:
    """The variables by which torch finds the other ranks of a learner, as torchrun sets them.

    Args:
        host: of rank 0.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _notice_s(config: RunConfig) -> float:
    return config.rollout.notice_s or NOTICE_S


def _ports(config: RunConfig) -> dict[RoleName, dict[str, int]]:
    """Ports by role and configuration key."""
    bind = urlsplit(config.buffer.bind)
    if bind.scheme != "tcp":
        raise ConfigError(f"buffer.bind={config.buffer.bind}: other hosts need an address such as tcp://0.0.0.0:5555")
    ports: dict[RoleName, dict[str, int]] = {"redis": {}, "buffer": {}, "learner": {}}
    roles: Mapping[str, RoleName] = {"redis": "redis", "buffer": "buffer", "weights": "learner"}
    for key, _, port in needed_ports(config):
        ports[roles[key.partition(".")[0]]][key] = port
    return ports


# --- division of the nodes --------------------------------------------------------------------------------------------


def _divide_nodes(config: RunConfig, nodes: int) -> tuple[int, int, int]:
    """Rollout servers, learner ranks and nodes of the learner without GPUs. Raises: ConfigError."""
    ranks = mesh_unit(config.learner) if config.learner.ranks == "auto" else config.learner.ranks
    if problems := rank_problems(config.learner, ranks):
        raise ConfigError(problems)
    most = max(1, nodes - (1 if config.rollout.servers == "auto" else min(config.rollout.servers, nodes - 1)))
    learner_nodes = max(count for count in range(1, most + 1) if ranks % count == 0)
    servers = max(1, nodes - learner_nodes) if config.rollout.servers == "auto" else config.rollout.servers
    return servers, ranks, learner_nodes


def _divide_gpus(config: RunConfig, nodes: int, gpus_per_node: int) -> tuple[int, int, int]:
    """Rollout servers, learner ranks (a GPU each) and nodes of the learner. Raises: ConfigError."""
    learner, total = config.learner, nodes * gpus_per_node
    per_server = config.rollout.engine.gpus
    if per_server > gpus_per_node:
        raise ConfigError(
            f"rollout.engine.options: an engine of {per_server} GPUs must be on one node, and nodes have "
            f"{gpus_per_node}: lower tensor_parallel_size (or others), or name nodes with more"
        )
    wanted = config.rollout.servers
    possible = [
        (ranks, servers)
        for ranks in (range(1, total + 1) if learner.ranks == "auto" else [learner.ranks])
        if not rank_problems(learner, ranks)
        and (servers := _servers_beside(ranks, nodes, gpus_per_node, per_server)) >= (1 if wanted == "auto" else wanted)
    ]
    if not possible:
        raise ConfigError(_too_few(config, nodes, gpus_per_node, per_server))

    def cost(choice: tuple[int, int]) -> tuple[float, int]:
        """Unused GPUs with the distance from half of all, as `slipstream up` divides them."""
        ranks, servers = choice
        unused = total - ranks - per_server * (servers if wanted == "auto" else wanted)
        return unused + abs(ranks - total / 2) * (wanted == "auto" and learner.ranks == "auto"), unused

    ranks, servers = min(possible, key=cost)
    return servers if wanted == "auto" else wanted, ranks, -(-ranks // gpus_per_node)


def _servers_beside(ranks: int, nodes: int, gpus_per_node: int, per_server: int) -> int:
    """Rollout servers for which a learner leaves GPUs; -1 if its ranks are on unequal parts of nodes, or too many."""
    learner_nodes = -(-ranks // gpus_per_node)
    if learner_nodes > nodes or (learner_nodes > 1 and ranks % gpus_per_node):
        return -1
    beside = (learner_nodes * gpus_per_node - ranks) // per_server
    return beside + (nodes - learner_nodes) * (gpus_per_node // per_server)


def _too_few(config: RunConfig, nodes: int, gpus_per_node: int, per_server: int) -> list[str]:
    """The reasons why no division of the GPUs is possible."""
    learner, servers, total = config.learner, config.rollout.servers, nodes * gpus_per_node
    ranks = mesh_unit(learner) if learner.ranks == "auto" else learner.ranks
    if problems := rank_problems(learner, ranks):
        return problems
    nodes_of_ranks = -(-ranks // gpus_per_node)
    if nodes_of_ranks > 1 and ranks % gpus_per_node:
        return [
            f"learner.ranks={learner.ranks}: {ranks} ranks on more than one node must be a multiple of its "
            f"{gpus_per_node} GPUs"
        ]
    needed = 1 if servers == "auto" else servers
    return [
        f"rollout.servers={servers} with {per_server} GPUs each (rollout.engine.options) and "
        f"learner.ranks={learner.ranks} with {ranks} need {needed * per_server} + {ranks} GPUs, but {nodes} nodes "
        f"with {gpus_per_node} have {total}, of which the learner leaves room for "
        f"{max(0, _servers_beside(ranks, nodes, gpus_per_node, per_server))} servers: name more nodes, or lower them"
    ]


def server_nodes(roles: Sequence[Role], *, nodes: int, gpus_per_node: int) -> list[int]:
    """The node of each rollout server, by its number: after those of the learner, then beside it on the first.

    Redis and buffer are on node 0, as the learner's first rank.
    """
    rollout, learner = (next(role for role in roles if role.name == name) for name in ("rollout", "learner"))
    others = range(learner.nodes, nodes)
    room = len(others) * (gpus_per_node // rollout.gpus if rollout.gpus else rollout.processes)
    return [others[index % len(others)] if index < room else 0 for index in range(rollout.processes)]
