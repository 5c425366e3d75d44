"""Dockerfiles that only copy files and set variables: their tasks need no image."""

import json
import re
import shlex
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from slipstream.env.adapters.harbor.folder import HarborTask, files_of

PLAIN_IMAGES: Final = re.compile(r"(docker\.io/)?(library/)?(debian|ubuntu|python|buildpack-deps)(:[\w.-]+)?")
"""Images that have no more than this machine's own programs stand for."""
PROGRAMS: Final = "/usr/local/bin:/usr/bin"
IGNORED: Final = ("LABEL", "CMD", "EXPOSE", "MAINTAINER", "STOPSIGNAL")
SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "sys", "dev", "tests", "solution", "logs")
"""Folders of the root that a task's files can't be copied to."""
_INSTALLS: Final = re.compile(r"(^|[\s;&|(`])(apt|apt-get|apk|dnf|yum|pip3?|uvx?|curl|wget|npm|conda|docker)\s")
_CONTINUED: Final = re.compile(r"\\\s*\n")


class NeedsImage(Exception):
    """The reason why a task needs its image."""


@dataclass
class Recipe:
    """The steps of such a Dockerfile.

    Attributes:
        copies: files and folders, and where they come.
        workdirs: all that it has set; the last one is in force.
    """

    copies: list[tuple[Path, PurePosixPath]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    workdirs: list[PurePosixPath] = field(default_factory=list)

    @classmethod
    def of(cls, task: HarborTask) -> "Recipe":
        """Raises: NeedsImage."""
        if task.image is not None:
            raise NeedsImage(f"environment.docker_image={task.image} of its task.toml")
        if {task.agent_user, task.verifier_user} - {None, "root", "0"}:
            raise NeedsImage("a user of its own in its task.toml")
        for script in files_of(task.folder / "tests"):
            if script.suffix == ".sh" and (line := _installs(script)):
                raise NeedsImage(f"tests/{script.name} installs something: {line}")
        context = task.folder / "environment"
        if (context / ".dockerignore").exists():
            raise NeedsImage("environment/.dockerignore")
        recipe = cls()
        text = (context / "Dockerfile").read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        for line in _CONTINUED.sub(" ", "\n".join(lines)).splitlines():
            try:
                if line.strip():
                    recipe._apply(line.strip(), context)
            except (ValueError, TypeError):
                raise NeedsImage(f"its Dockerfile's line {line.strip()[:100]!r}, which can't be read") from None
        if task.workdir is not None:
            recipe._enter(task.workdir, "environment.workdir")
        if not recipe.workdirs:
            raise NeedsImage("its Dockerfile sets no WORKDIR")
        return recipe

    @property
    def workdir(self) -> PurePosixPath:
        """Working directory, the root before any was set."""
        return self.workdirs[-1] if self.workdirs else PurePosixPath("/")

    @property
    def tops(self) -> set[str]:
        """Folders of the root that it writes to."""
        paths = [*self.workdirs, *(destination for _, destination in self.copies)]
        return {path.parts[1] for path in paths if len(path.parts) > 1}

    def make(self, root: Path) -> None:
        """Copies the files into folders below `root`, and makes the working directories. Raises: OSError."""
        for workdir in self.workdirs:
            root.joinpath(*workdir.parts[1:]).mkdir(parents=True, exist_ok=True)
        for source, destination in self.copies:
            target = root.joinpath(*destination.parts[1:])
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def _apply(self, line: str, context: Path) -> None:
        """Raises: NeedsImage; ValueError or TypeError for an instruction that can't be read."""
        name, _, rest = line.partition(" ")
        name, rest = name.upper(), rest.strip()
        if name == "FROM" and (image := PLAIN_IMAGES.fullmatch(rest)) and not self.workdirs:
            if image[3] == "python" and shutil.which("python", path=PROGRAMS) is None:
                raise NeedsImage(f"its Dockerfile's line {line!r}, and this machine has no python in {PROGRAMS}")
        elif name == "WORKDIR" and "$" not in rest:
            self._enter(rest, line)
        elif name == "ENV" and "$" not in rest:
            self._set(rest)
        elif name in ("COPY", "ADD") and "$" not in rest:
            self._copy(rest, line, context, unpacks=name == "ADD")
        elif name not in IGNORED:
            raise NeedsImage(f"its Dockerfile's line {line[:100]!r}")

    def _set(self, rest: str) -> None:
        words = shlex.split(rest)
        if not words or "=" not in words[0]:  # the old form: one variable, and its value without quotes
            name, _, value = rest.partition(" ")
            if not value:
                raise ValueError("ENV without a value")
            words = [f"{name}={value.strip()}"]
        self.environment |= dict(word.split("=", 1) for word in words)

    def _enter(self, folder: str, line: str) -> None:
        self.workdirs.append(self._inside(PurePosixPath(self.workdir, folder.strip("\"'")), line))

    def _copy(self, rest: str, line: str, context: Path, *, unpacks: bool) -> None:
        *sources, target = _words(rest, line)
        base = PurePosixPath(self.workdir, target)
        found = [path for source in sources for path in _found(source, line, context)]
        if unpacks and any(path.is_file() and tarfile.is_tarfile(path) for path in found):
            raise NeedsImage(f"its Dockerfile's line {line[:100]!r}, which unpacks an archive")
        into = target.endswith(("/", "/.")) or target == "." or len(found) > 1 or base in self.workdirs
        for path in found:
            destination = base / path.name if into and path.is_file() else base
            self.copies.append((path, self._inside(destination, line)))

    @staticmethod
    def _inside(path: PurePosixPath, line: str) -> PurePosixPath:
        if ".." in path.parts or len(path.parts) < 2 or path.parts[1] in SYSTEM:
            raise NeedsImage(f"its Dockerfile's line {line[:100]!r}, which writes to {path}")
        return path


def _words(rest: str, line: str) -> list[str]:
    words: list[str] = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if not all(isinstance(word, str) for word in words):
        raise TypeError("a list of files has texts")
    if len(words) < 2 or any(word.startswith(("-", "<<")) or "://" in word for word in words):
        raise NeedsImage(f"its Dockerfile's line {line[:100]!r}")
    return words


def _found(source: str, line: str, context: Path) -> Sequence[Path]:
    found = [context] if source in (".", "./", "/") else sorted(context.glob(source.strip("/")))
    root = context.resolve()
    if not found or not all(path.resolve().is_relative_to(root) for path in found):
        raise NeedsImage(f"its Dockerfile's line {line[:100]!r}: there is no {source}")
    return found


def _installs(script: Path) -> str:
    """The first line of a script that needs the network; empty: none."""
    lines = (line.strip() for line in script.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((line[:100] for line in lines if not line.startswith("#") and _INSTALLS.search(f"{line} ")), "")
