"""`slipstream ray`: a run on an existing Ray cluster, whose actors hold its processes."""

import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.cli import at_least
from slipstream.tools.clusters import ray_holder
from slipstream.tools.clusters.ray_run import RayRun
from slipstream.tools.clusters.roles import Role, cluster_roles
from slipstream.tools.launch.preflight import prepare_shared_folder
from slipstream.tools.launch.screens import make_screen
from slipstream.tools.summary import report

CONNECT_S: Final = 5.0


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream ray`; returns the learner's exit code, or 128 + the number of the signal that ended the run.

    Raises: ConfigError, before anything is started, for what can't work; SlipstreamError when there is no cluster.
    """
    parser = run_parser("Run all processes on an existing Ray cluster.", prog="slipstream ray")
    parser.add_argument("--address", default="auto", help="of the cluster (default: the one that this node belongs to)")
    parser.add_argument("--nodes", type=at_least(1), metavar="N", help="default: all with as many GPUs as the largest")
    parser.add_argument("--gpus-per-node", type=at_least(0), metavar="N", help="default: all of a node")
    parser.add_argument("--cpus-per-node", type=at_least(1), metavar="N", help="default: as many as the smallest has")
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="interpreter on the nodes (default: this one)"
    )
    parser.add_argument("--plain", action="store_true", help="print lines instead of a live table")
    arguments, config = read_run_arguments(parser, argv)
    ray = _connect(arguments.address)
    try:
        nodes, gpus, cpus = cluster_size(ray.nodes(), arguments.nodes, arguments.gpus_per_node, arguments.cpus_per_node)
        roles = cluster_roles(config, nodes=nodes, gpus_per_node=gpus, cpus_per_node=cpus)
        _require_cores(roles, ray.cluster_resources().get("CPU", 0))
        print(prepare_shared_folder(config), flush=True)
        with StopSignals() as signals:
            code = RayRun(
                ray, config, roles, signals, make_screen(plain=arguments.plain), python=arguments.python
            ).run()
    finally:
        ray.shutdown()  # ends the actors, and these what they hold
    if code == 0:
        report(config.paths)
    return code


def _connect(address: str) -> Any:
    """The library, connected. Raises: ConfigError."""
    try:
        import ray
        from ray import cloudpickle
    except ImportError:
        raise ConfigError("`slipstream ray` needs the library of the cluster: pip install 'slipstream[ray]'") from None
    cloudpickle.register_pickle_by_value(ray_holder)
    try:
        host, _, port = address.partition(":")
        if port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="warning", namespace="slipstream")
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"--address={address}: no Ray cluster answers ({error}); start one (`ray start --head`), or name it"
        ) from None
    return ray


def _require_cores(roles: Sequence[Role], cores: float) -> None:
    needed = {role.name: role.processes * role.cpus for role in roles}
    if sum(needed.values()) > cores:
        each = ", ".join(f"{name} {count}" for name, count in needed.items())
        raise ConfigError(
            f"the run needs {sum(needed.values())} cores ({each}), and the cluster has {cores:g}: add nodes, or lower "
            "rollout.servers or learner.ranks"
        )


def cluster_size(
    nodes: Sequence[Mapping[str, Any]], count: int | None, gpus: int | None, cpus: int | None
) -> tuple[int, int, int]:
    """Nodes, GPUs and cores of a node: as given, else those of the nodes with the most GPUs."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    most = max((int(node.get("GPU", 0)) for node in resources), default=0) if gpus is None else gpus
    chosen = [node for node in resources if node.get("GPU", 0) >= most and node.get("CPU", 0) >= 1]
    if not chosen or (count or 1) > len(chosen):
        raise ConfigError(
            f"--nodes={count or 1} with --gpus-per-node={most}: of the cluster's {len(resources)} nodes {len(chosen)} "
            "have as many GPUs and a core: lower one of them, or add nodes"
        )
    return count or len(chosen), most, cpus or int(min(node["CPU"] for node in chosen))
