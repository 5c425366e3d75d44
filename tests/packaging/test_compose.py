"""docker-compose.yml: its commands exist, its settings load, and each profile starts what belongs to it."""

import ast
import json
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.load import load_config

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
# As compose does with variables that are not set.
TEXT = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
PROCESSES = sorted(set(SERVICES) - {"redis"})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = PROJECT["project"]["scripts"]


@pytest.mark.parametrize("service", PROCESSES)
def test_service_runs_a_script_with_valid_settings(service: str) -> None:
    script, *options = SERVICES[service]["entrypoint"]
    config_path, *overrides = SERVICES[service]["command"]
    assert script in SCRIPTS
    assert options == ([] if script == "learner" else ["--until-finished"])
    config = load_config(ROOT / config_path, overrides)
    assert config.redis.url == "redis://redis:6379/0"
    assert config.buffer.endpoint == "tcp://buffer:5555"
    assert config.weights.host == "learner"


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_profile_has_all_processes_at_the_hosts_of_the_settings(profile: str) -> None:
    names, started = {"redis"}, []
    for name in PROCESSES:
        if profile in SERVICES[name]["profiles"]:
            started.append(SERVICES[name]["entrypoint"][0])
            names |= {name, *SERVICES[name].get("networks", {}).get("default", {}).get("aliases", [])}
    assert sorted(started) == ["buffer", "learner", "rollout"]
    assert {"redis", "buffer", "learner"} <= names


def test_no_port_is_published_to_the_host() -> None:
    assert not [name for name, service in SERVICES.items() if "ports" in service or "network_mode" in service]


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_service_returns_after_a_failure_alone(service: str) -> None:
    assert SERVICES[service]["restart"].startswith("on-failure")


@pytest.mark.parametrize("service", [name for name in PROCESSES if "learner" not in name])
def test_health_check_asks_the_buffer(service: str) -> None:
    kind, *command = SERVICES[service]["healthcheck"]["test"]
    words = command[0].split() if kind == "CMD-SHELL" else command
    script, config_path, endpoint, ping = words
    assert script == "buffer"
    assert load_config(ROOT / config_path, [endpoint]).buffer.endpoint.endswith(":5555")
    assert ping == ("--ping=rollout-$$(hostname)-" if "rollout" in service else "--ping")


def test_requirements_of_the_buffer_are_what_it_imports() -> None:
    imported = set[str]()
    for file in (path for folder in ("buffer", "configs") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    owners = packages_distributions()
    needed = {owners[name][0].lower() for name in imported if name in owners} - {"slipstream", "torch", "pydantic_core"}
    assert needed | {"hiredis"} == set(PROJECT["dependency-groups"]["buffer"])  # hiredis: an extra of redis


def has_compose_plugin() -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None
        and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not has_compose_plugin(), reason="no docker compose plugin (.ci/run fetches one on Debian)")
@pytest.mark.parametrize(
    ("options", "started"),
    [
        ([], {"redis", "buffer", "rollout", "learner"}),
        (["--profile", "gpu"], {"redis", "buffer-gpu", "rollout-gpu", "learner-gpu"}),
    ],
)
def test_docker_compose_starts_one_profile(
    options: list[str], started: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPOSE_PROFILES", raising=False)
    command = ["docker", "compose", "--file", str(FILE), *options, "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["services"]) == started
