"""`slipstream k8s`: writes a run as a kustomize base, with the steps that start it."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from slipstream.configs import RunConfig
from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.network import is_loopback
from slipstream.tools.cli import at_least
from slipstream.tools.clusters.kubernetes_objects import KEYS, RUNS, Base
from slipstream.tools.clusters.roles import cluster_roles, cluster_settings

NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A name of a Service, which with the role's and the pod's ending has at most 63 characters."""
QUANTITY: Final = re.compile(r"[1-9]\d*(?:[KMGTP]i?)?")


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream k8s`; returns 0. Raises: ConfigError with all that can't work, before anything is written."""
    parser = run_parser("Write a run as a kustomize base, for kubectl apply -k.", prog="slipstream k8s")
    parser.add_argument("--image", required=True, help="image with the packages of every process")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="its files are written over")
    parser.add_argument("--nodes", type=at_least(1), required=True, help="nodes among which the run is divided")
    parser.add_argument("--gpus-per-node", type=at_least(0), default=0, metavar="N", help="default: none")
    parser.add_argument("--cpus-per-node", type=at_least(1), metavar="N")
    parser.add_argument(
        "--most-servers", type=at_least(1), metavar="N", help="KEDA scales the rollout servers up to so many"
    )
    parser.add_argument("--namespace", type=_name, default="default", metavar="NAME", help="default: default")
    parser.add_argument("--storage", type=_quantity, default="100Gi", help="of the run's folder (default: 100Gi)")
    parser.add_argument("--storage-class", metavar="NAME", help="one with ReadWriteMany (default: the cluster's)")
    arguments, config = read_run_arguments(parser, argv)
    if problems := _problems(config):
        raise ConfigError(problems)
    roles = cluster_roles(
        config, nodes=arguments.nodes, gpus_per_node=arguments.gpus_per_node, cpus_per_node=arguments.cpus_per_node
    )
    servers = next(role.processes for role in roles if role.name == "rollout")
    if arguments.most_servers is not None and arguments.most_servers < servers:
        raise ConfigError(
            f"--most-servers={arguments.most_servers} is less than the {servers} that the run begins with"
        )
    base = Base(
        config=load_config(arguments.config, [*arguments.overrides, *pod_settings(config)]),
        roles={role.name: role for role in roles},
        image=arguments.image,
        namespace=arguments.namespace,
        storage=arguments.storage,
        storage_class=arguments.storage_class,
        most_servers=arguments.most_servers,
    )
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name, text in base.files.items():
            (arguments.out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out={arguments.out} can't be written: {error.strerror}; name another folder") from None
    print("\n".join(base.steps(arguments.out)))
    return 0


def pod_settings(config: RunConfig) -> list[str]:
    """The overrides with which pods find each other, the run's folder and their keys."""
    name = config.run.name
    hosts = cluster_settings(
        config,
        redis_host=f"{name}-redis",
        buffer_host=f"{name}-buffer",
        learner_host=f"{name}-learner-0.{name}-learner",
    )
    return [*hosts, f"run.dir={RUNS}", f"security.keys={KEYS}"]


def _problems(config: RunConfig) -> list[str]:
    """Settings that can't work in pods."""
    problems, name, path, url = [], config.run.name, config.model.path, urlsplit(config.redis.url or "")
    if not NAME.fullmatch(name):
        problems.append(
            f"run.name={name} must be a name for Kubernetes: up to 40 lower-case letters, digits and -, the first a "
            "letter; set run.name"
        )
    if path is not None and not path.is_relative_to(RUNS) and (path.is_absolute() or path.is_dir()):
        problems.append(
            f"model.path={path} is a folder of this machine, which pods don't see: name a model of a hub, or copy it "
            f"to the run's volume and name {RUNS}/{path.name}"
        )
    if url.scheme == "unix" or (url.hostname and is_loopback(url.hostname)):
        problems.append(f"redis.url={config.redis.url} is on this machine; name one that pods reach, or leave it out")
    if config.weights.transport == "shm":
        problems.append("weights.transport=shm: pods don't share memory; leave it out")
    return problems


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text} is no name of a namespace")
    return text


def _quantity(text: str) -> str:
    if not QUANTITY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text} is no size such as 100Gi")
    return text
