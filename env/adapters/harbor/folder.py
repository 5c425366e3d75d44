"""A task folder of Harbor: task.toml, instruction.md, environment/, tests/, solution/.

Source: https://www.harborframework.com/docs/tasks, and harbor 0.25 (schema_version 1.4).
"""

import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError

BUILD_TIMEOUT_S: Final = 600.0
VERIFIER_TIMEOUT_S: Final = 600.0
"""Harbor's, for tasks that set none."""

_CANARY: Final = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_VARIABLE: Final = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZES: Final = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_UNSUPPORTED: Final = (
    "steps", "verifier.environment", "verifier.collect", "environment.gpus", "environment.tpu",
    "environment.mcp_servers", "environment.healthcheck", "environment.skills_dir", "environment.allowed_hosts",
    "agent.network_mode", "verifier.network_mode",
)  # fmt: skip
"""Keys of task.toml that ask for what is not done here."""


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """One task.

    Attributes:
        agent_timeout_s: None: none.
        image: built already; otherwise that of environment/Dockerfile.
        cpus, memory_mb, storage_mb: of the environment; None: no limit of the task's own.
        environment, verifier_environment, solution_environment: variables.
        workdir: None: the Dockerfile's.
        has_network: False where the task forbids it.
        agent_user, verifier_user: None: the image's.
    """

    name: str
    folder: Path
    instruction: str
    agent_timeout_s: float | None
    verifier_timeout_s: float
    build_timeout_s: float
    image: str | None
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    environment: Mapping[str, str]
    verifier_environment: Mapping[str, str]
    solution_environment: Mapping[str, str]
    workdir: str | None
    has_network: bool
    agent_user: str | None
    verifier_user: str | None

    @classmethod
    def read(cls, folder: Path) -> "HarborTask":
        """The task in a folder. Raises: ConfigError with the first reason why it can't be used."""
        try:
            given = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8") if not given.get("steps") else ""
            return cls._parsed(folder, given, _without_canary(instruction))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"task {folder.name}: {error}") from None

    @classmethod
    def _parsed(cls, folder: Path, given: Mapping[str, Any], instruction: str) -> "HarborTask":
        """Raises: ValueError, TypeError or AttributeError."""
        agent, verifier, environment = (given.get(name, {}) for name in ("agent", "verifier", "environment"))
        for key in _UNSUPPORTED:
            section, _, name = key.rpartition(".")
            if (given.get(section, {}) if section else given).get(name):
                raise ValueError(f"{key} of its task.toml is not supported")
        if verifier.get("environment_mode", "shared") != "shared":
            raise ValueError("verifier.environment_mode of its task.toml must be shared")
        if str(environment.get("os", "linux")).lower() != "linux":
            raise ValueError("environment.os of its task.toml must be linux")
        if any((folder / "environment" / f"docker-compose.{suffix}").exists() for suffix in ("yaml", "yml")):
            raise ValueError("its environment has services (docker-compose), which is not supported")
        image = environment.get("docker_image")
        for needed in ("tests/test.sh", *(() if image else ("environment/Dockerfile",))):
            if not (folder / needed).is_file():
                raise ValueError(f"it has no {needed}")
        network = environment.get("network_mode", "public" if environment.get("allow_internet", True) else "no-network")
        if network not in ("public", "no-network"):
            raise ValueError(f"environment.network_mode={network!r} of its task.toml must be public or no-network")
        return cls(
            name=str(given.get("task", {}).get("name", folder.name)),
            folder=folder,
            instruction=instruction,
            agent_timeout_s=_number(agent.get("timeout_sec")),
            verifier_timeout_s=_number(verifier.get("timeout_sec")) or VERIFIER_TIMEOUT_S,
            build_timeout_s=_number(environment.get("build_timeout_sec")) or BUILD_TIMEOUT_S,
            image=image,
            cpus=_number(environment.get("cpus")),
            memory_mb=_megabytes(environment, "memory"),
            storage_mb=_megabytes(environment, "storage"),
            environment=_variables(environment.get("env", {})),
            verifier_environment=_variables(verifier.get("env", {})),
            solution_environment=_variables(given.get("solution", {}).get("env", {})),
            workdir=environment.get("workdir"),
            has_network=network == "public",
            agent_user=_user(agent),
            verifier_user=_user(verifier),
        )

    @cached_property
    def content(self) -> str:
        """Hash of instruction, environment and tests, by which tasks are the same."""
        parts = [self.instruction, self.hash("environment"), self.hash("tests")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def hash(self, part: str = "") -> str:
        """Hash of the folder's files, or of those in a part of it."""
        digest = hashlib.sha256()
        for file in files_of(self.folder / part):
            name = file.relative_to(self.folder).as_posix()
            content = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
            digest.update(f"{name}\n{len(content)}\n{file.lstat().st_mode & 0o111}\n".encode() + content)
        return digest.hexdigest()


def task_folders(path: Path) -> list[Path]:
    """The folders of a data set, or the one task that `path` is. Raises: ConfigError when there is none."""
    if (path / "task.toml").is_file():
        return [path]
    found = sorted(each.parent for each in path.glob("*/task.toml"))
    if not found:
        raise ConfigError(f"env harbor: {path} has no folders with a task.toml")
    return found


def files_of(folder: Path) -> Iterator[Path]:
    """Files and links below a folder, in order."""
    return (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file())


def _without_canary(text: str) -> str:
    """The text without the marks of benchmarks at its beginning, which agents do not see."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0].strip())):
        lines.pop(0)
    return "\n".join(lines)


def _number(value: Any) -> float | None:
    """Raises: ValueError, TypeError."""
    if value is None:
        return None
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{value!r} in its task.toml must be above 0")
    return float(value)


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    """Raises: ValueError, TypeError."""
    old = environment.get(name)  # before schema 1.1, as a text
    if old is not None and f"{name}_mb" not in environment:
        return int(float(old.strip()[:-1]) * _SIZES[old.strip()[-1:].upper()])
    value = _number(environment.get(f"{name}_mb"))
    return None if value is None else int(value)


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Variables, with those of this process in the place of `${NAME}` and `${NAME:-default}`. Raises: ValueError."""
    found = {}
    for name, value in given.items():
        match = _VARIABLE.fullmatch(str(value))
        if match is not None and match[1] not in os.environ and match[2] is None:
            raise ValueError(f"the variable {match[1]} that its task.toml asks for is not set")
        found[name] = str(value) if match is None else os.environ.get(match[1], match[2] or "")
    return found


def _user(section: Mapping[str, Any]) -> str | None:
    user = section.get("user")
    return None if user is None else str(user)
