"""Contents of wheel and sdist, and completeness of the pinned versions."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("learner", "rollout_servers", "models", "buffer", "rewards", "env", "sandbox", "configs", "tools")
SHIPPED = (".py", ".lua", ".yaml", ".typed", ".html", ".js", ".css", ".LICENSE")
NOT_SOURCES = (".*", "runs", "build", "dist", "__pycache__", "*.egg-info")
NOT_INSTALLED = {"slipstream", "torchvision", "torchaudio", "torchcodec", "triton"}
"""See the head of constraints.txt."""


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def files_of(folder: str) -> set[str]:
    """Files of a distribution below `folder`, as posix paths from the checkout's root."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.suffix in SHIPPED or path.name == "py.typed")
    return {path.relative_to(ROOT).as_posix() for path in paths}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    source = tmp_path_factory.mktemp("source")
    # From a copy, because setuptools also ships the files that an earlier build listed in *.egg-info.
    shutil.copytree(ROOT, source, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist_names(built: Path) -> set[str]:
    """Names in the sdist, without its top folder."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_has_all_files_of_a_package(wheel: zipfile.ZipFile, package: str) -> None:
    expected = {f"slipstream/{name}" for name in files_of(package)}
    assert f"slipstream/{package}/py.typed" in expected
    assert expected <= set(wheel.namelist())


def test_wheel_installs_only_the_packages(wheel: zipfile.ZipFile) -> None:
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert folders == {"slipstream", "slipstream-0.1.0.dist-info"}
    assert {name.split("/")[1] for name in wheel.namelist() if name.startswith("slipstream/")} == set(PACKAGES)


def test_sdist_has_tests_and_their_inputs(sdist_names: set[str]) -> None:
    expected = {"Makefile", "constraints.txt", "docker-compose.yml"}.union(
        *map(files_of, (*PACKAGES, "benchmarks", "tests"))
    )
    expected |= {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert expected <= sdist_names


def test_image_is_built_from_all_packages() -> None:
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert {*PACKAGES, "constraints.txt", "pyproject.toml", "setup.py"} <= kept


def test_wheel_has_the_console_scripts(wheel: zipfile.ZipFile) -> None:
    entry_points = ConfigParser()
    entry_points.read_string(wheel.read("slipstream-0.1.0.dist-info/entry_points.txt").decode())
    assert dict(entry_points["console_scripts"]) == project()["scripts"]


def pinned(environment: dict[str, str]) -> dict[str, str]:
    """Version of each package that constraints.txt installs in `environment`."""
    lines = (line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(environment)
    }


def closure(requirements: Iterable[str], environment: dict[str, str]) -> Iterator[Requirement]:
    """`requirements` and, by the metadata of installed packages, their own requirements."""
    pending = [Requirement(text) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        yield requirement
        for extra in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            inner = map(Requirement, requires(name))
            pending += [r for r in inner if not r.marker or r.marker.evaluate({**environment, "extra": extra})]


def requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # required elsewhere, such as on another Python
        return []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11.0", "3.11.7", "3.12.1", "3.13.0"])
def test_pins_satisfy_every_requirement(python: str, machine: str) -> None:
    version = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    here = {marker: str(value) for marker, value in default_environment().items()}
    environment = {**here, **version, "platform_machine": machine}
    pins = pinned(environment)
    extras = project()["optional-dependencies"]
    requested = [*project()["dependencies"], *extras["cpu"], *extras["dev"], *extras["swanlab"]]
    unmet = [
        f"{requirement} (pinned: {pins.get(name)})"
        for requirement in closure(requested, environment)
        if (name := canonicalize_name(requirement.name)) not in NOT_INSTALLED
        and not (name in pins and requirement.specifier.contains(pins[name].replace("2.13.0", "2.13.0+cpu")))
    ]
    assert unmet == []
