"""docker-compose.yml: its commands exist, and its settings load."""

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.load import load_config

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
PROCESSES = sorted(set(SERVICES) - {"redis"})
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("service", PROCESSES)
def test_service_runs_a_script_with_valid_settings(service: str) -> None:
    command: list[str] = SERVICES[service]["entrypoint"] + SERVICES[service]["command"]
    script, config_path, *overrides = command
    assert script in SCRIPTS
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


def has_compose_plugin() -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None
        and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not has_compose_plugin(), reason="no docker compose plugin (.ci/run fetches one on Debian)")
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_docker_compose_accepts_the_file(profile: str) -> None:
    command = ["docker", "compose", "--file", str(FILE), "--profile", profile, "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
