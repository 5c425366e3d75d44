"""Environments of tasks, in which commands of agents and tests run: the sandbox, or a container of Docker."""

import asyncio
import json
import math
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from slipstream.env.adapters.harbor.folder import HarborTask
from slipstream.env.adapters.harbor.recipe import Recipe
from slipstream.env.base import EnvFailed
from slipstream.sandbox.process import SandboxUnavailable
from slipstream.sandbox.workspace import Workspace, WorkspaceLimits, opened_workspace

WRITABLE: Final = ("home", "mnt", "opt", "root", "srv", "tmp", "var")
"""Folders of the sandbox's root, besides those of the task."""
SHOWN_CHARACTERS: Final = 500
LARGEST_REWARD_BYTES: Final = 1 << 16
OTHER_S: Final = 120.0
"""Deadline of Docker's other commands, and time that a container lives beyond the task's deadlines."""
DAY_S: Final = 86_400.0
"""Longest life of a container whose task limits no agent."""

_PREFIX: Final = "slipstream-harbor-"
_SCRIPTS: Final = {"tests": "test.sh", "solution": "solve.sh"}
_TEST: Final = "exec /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"
_SOLVE: Final = "exec /solution/solve.sh"


class Place(Protocol):
    """The environment of one episode.

    Attributes:
        shell: a program of this machine that runs its arguments in the environment.
    """

    shell: str

    async def solve(self) -> None:
        """Runs the task's solution. Raises: EnvFailed."""
        ...

    async def rewards(self) -> Mapping[str, float]:
        """Runs the tests, once the agent has ended; what they have written. Raises: EnvFailed."""
        ...


class SandboxPlace:
    """Folders of this machine, in a sandbox for each command."""

    def __init__(self, task: HarborTask, recipe: Recipe, workspace: Workspace, folder: Path) -> None:
        self._task, self._recipe, self._workspace, self._folder = task, recipe, workspace, folder
        files = folder / "files"
        recipe.make(files)
        self._folders = {f"/{name}": files / name for name in sorted({*WRITABLE, *recipe.tops})}
        for path in self._folders.values():
            path.mkdir(parents=True, exist_ok=True)
        (self._folders["/tmp"]).chmod(0o1777)
        workspace.own(files)
        (self.shell,) = self._script("shell", self._new("/logs", "agent-logs", ["agent", "artifacts", "verifier"]), {})

    async def solve(self) -> None:
        """Runs the task's solution. Raises: EnvFailed."""
        solution = await asyncio.to_thread(self._copied, "solution")
        command = self._script("solve", {"/solution": solution}, self._task.solution_environment)
        await succeed([*command, "sh", "-c", _SOLVE], self._task.agent_timeout_s or DAY_S, "its solution")

    async def rewards(self) -> Mapping[str, float]:
        """Runs the tests; what the agent has left in /logs is not theirs. Raises: EnvFailed."""
        tests = await asyncio.to_thread(self._copied, "tests")
        logs = self._new("/logs", "logs", ["agent", "artifacts", "verifier"])
        command = self._script("test", {**logs, "/tests": tests}, self._task.verifier_environment)
        await run([*command, "sh", "-c", _TEST], self._task.verifier_timeout_s, "the tests")
        return read_rewards(logs["/logs"] / "verifier")

    def _script(self, name: str, more: Mapping[str, Path], environment: Mapping[str, str]) -> list[str]:
        variables = {**self._recipe.environment, **self._task.environment, **environment}
        return self._workspace.script(
            name, writable={**self._folders, **more}, workdir=str(self._recipe.workdir), environment=variables
        )

    def _new(self, inside: str, name: str, folders: Sequence[str]) -> dict[str, Path]:
        path = self._folder / name
        for folder in folders:
            (path / folder).mkdir(parents=True)
        self._workspace.own(path)
        return {inside: path}

    def _copied(self, name: str) -> Path:
        """A copy of a part of the task. Raises: EnvFailed."""
        path = self._folder / name
        try:
            shutil.copytree(self._task.folder / name, path, symlinks=True)
            (path / _SCRIPTS[name]).chmod(0o755)
            self._workspace.own(path)
        except OSError as error:
            raise EnvFailed(f"{name}/ of the task can't be copied: {error}") from None
        return path


@asynccontextmanager
async def in_sandbox(task: HarborTask, recipe: Recipe) -> AsyncIterator[Place]:
    """The task's environment in the sandbox. Raises: EnvFailed."""
    limits = WorkspaceLimits(
        cpus=task.cpus,
        memory_bytes=WorkspaceLimits.memory_bytes if task.memory_mb is None else task.memory_mb << 20,
        file_bytes=WorkspaceLimits.file_bytes if task.storage_mb is None else task.storage_mb << 20,
    )
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    with ExitStack() as stack:
        making: asyncio.Future[SandboxPlace] | None = None
        try:
            try:
                folder.chmod(0o711)
                (folder / "workspace").mkdir()
                workspace = stack.enter_context(opened_workspace(folder / "workspace", limits))
                making = asyncio.ensure_future(asyncio.to_thread(SandboxPlace, task, recipe, workspace, folder))
                place = await asyncio.shield(making)
            except (OSError, SandboxUnavailable) as error:
                raise EnvFailed(f"its files can't be made: {error}") from error
            yield place
        finally:
            if making is not None:
                await asyncio.wait([making])  # a cancelled episode's thread goes on writing
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def sandbox_problem() -> str:
    """Why no command can run in the sandbox; empty if one can."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        try:
            with opened_workspace(Path(folder), WorkspaceLimits()) as workspace:
                command = workspace.script("try", writable={}, workdir="/", environment={})
                done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=OTHER_S, check=False)
        except (OSError, SandboxUnavailable, subprocess.TimeoutExpired) as error:
            return str(error)
    return "" if done.returncode == 0 else done.stderr.strip()[-SHOWN_CHARACTERS:]


def docker_problem() -> str:
    """Why Docker can't be used; empty if it can."""
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=OTHER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"docker can't be used: {error}"
    return "" if done.returncode == 0 else f"docker can't be used: {done.stderr.strip()[-SHOWN_CHARACTERS:]}"


def remove_abandoned() -> None:
    """Removes the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


class DockerPlace:
    """A container."""

    def __init__(self, task: HarborTask, container: str, folder: Path) -> None:
        self._task, self._container, self._folder = task, container, folder
        path = folder / "shell"
        path.write_text(f'#!/bin/sh\nexec {shlex.join(self._exec(task.agent_user, {}))} "$@"\n')
        path.chmod(0o755)
        self.shell = str(path)

    async def solve(self) -> None:
        """Runs the task's solution. Raises: EnvFailed."""
        await self._copy("solution")
        command = self._exec(self._task.agent_user, self._task.solution_environment)
        await succeed([*command, "sh", "-c", _SOLVE], self._task.agent_timeout_s or DAY_S, "its solution")

    async def rewards(self) -> Mapping[str, float]:
        """Runs the tests. Raises: EnvFailed."""
        prepare = "rm -rf /tests /logs/verifier && mkdir -p /logs/verifier && chmod 777 /logs/verifier"
        await succeed([*self._exec("root", {}), "sh", "-c", prepare], OTHER_S, "docker exec")
        await self._copy("tests")
        command = self._exec(self._task.verifier_user, self._task.verifier_environment)
        await run([*command, "sh", "-c", _TEST], self._task.verifier_timeout_s, "the tests")
        await succeed(["docker", "cp", f"{self._container}:/logs/verifier", str(self._folder)], OTHER_S, "docker cp")
        return read_rewards(self._folder / "verifier")

    def _exec(self, user: str | None, environment: Mapping[str, str]) -> list[str]:
        variables = [f"--env={name}={value}" for name, value in environment.items()]
        return ["docker", "exec", "-i", *([] if user is None else ["--user", user]), *variables, self._container]

    async def _copy(self, name: str) -> None:
        copy = ["docker", "cp", str(self._task.folder / name), f"{self._container}:/{name}"]
        await succeed(copy, OTHER_S, "docker cp")
        readable = f"chmod -R a+rX /{name} && chmod a+x /{name}/{_SCRIPTS[name]}"
        await succeed([*self._exec("root", {}), "sh", "-c", readable], OTHER_S, "docker exec")


_building: dict[str, asyncio.Lock] = {}


@asynccontextmanager
async def in_docker(task: HarborTask) -> AsyncIterator[Place]:
    """A container of the task's image, which is built first if there is none. Raises: EnvFailed."""
    image = task.image or await _built(task)
    container = f"{_PREFIX}{uuid.uuid4().hex[:16]}"
    # It ends by itself if this process can't end it.
    life_s = (task.agent_timeout_s or DAY_S) + task.verifier_timeout_s + 2 * OTHER_S
    options = [] if task.has_network else ["--network=none"]
    options += [] if task.cpus is None else [f"--cpus={task.cpus:g}"]
    options += [] if task.memory_mb is None else [f"--memory={task.memory_mb}m", f"--memory-swap={task.memory_mb}m"]
    options += [] if task.workdir is None else [f"--workdir={task.workdir}"]
    options += [f"--env={name}={value}" for name, value in task.environment.items()]
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        try:
            run_it = ["docker", "run", "--detach", "--rm", "--init", "--name", container, *options, image]
            await succeed([*run_it, "sh", "-c", f"sleep {math.ceil(life_s)}"], task.build_timeout_s, "docker run")
            make = "mkdir -p /logs/agent /logs/artifacts /logs/verifier && chmod 777 /logs/*"
            await succeed(["docker", "exec", "--user=root", container, "sh", "-c", make], OTHER_S, "docker exec")
            yield DockerPlace(task, container, Path(folder))
        finally:
            await run(["docker", "rm", "--force", "--volumes", container], OTHER_S, "docker rm")


async def _built(task: HarborTask) -> str:
    """The image of the task's Dockerfile. Raises: EnvFailed."""
    image = f"{_PREFIX}image:{(await asyncio.to_thread(task.hash, 'environment'))[:20]}"
    async with _building.setdefault(image, asyncio.Lock()):
        code, _ = await run(["docker", "image", "inspect", image], OTHER_S, "docker image inspect")
        if code != 0:
            command = ["docker", "build", "--quiet", "--tag", image, str(task.folder / "environment")]
            await succeed(command, task.build_timeout_s, "docker build")
    return image


async def run(command: Sequence[str], timeout_s: float, name: str) -> tuple[int, str]:
    """Exit code and the end of the output of a command. Raises: EnvFailed when it does not end in time, or start."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvFailed(f"{name} can't be started: {error}") from None
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        raise EnvFailed(f"{name} did not end within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None, "it has ended"
    return process.returncode, output.decode(errors="replace").strip()[-SHOWN_CHARACTERS:]


async def succeed(command: Sequence[str], timeout_s: float, name: str) -> None:
    """Runs a command. Raises: EnvFailed when it does not end in time, or with another code than 0."""
    code, output = await run(command, timeout_s, name)
    if code != 0:
        raise EnvFailed(f"{name} ended with code {code}: {output}")


def read_rewards(folder: Path) -> dict[str, float]:
    """Rewards by name, from reward.json or else reward.txt. Raises: EnvFailed."""
    for name in ("reward.json", "reward.txt"):
        text = _read(folder / name)
        if text is None:
            continue
        try:
            given = json.loads(text) if name.endswith("json") else float(text)
            rewards = {str(key): float(value) for key, value in given.items()} if isinstance(given, dict) else {}
            rewards = rewards if isinstance(given, dict) else {"reward": float(given)}
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise EnvFailed(f"the tests wrote {text[:100]!r} to {name}, which is no reward") from None
        if not rewards or not all(map(math.isfinite, rewards.values())):
            raise EnvFailed(f"the tests wrote {text[:100]!r} to {name}, which is no finite reward")
        return rewards
    printed = (_read(folder / "test-stdout.txt") or "").strip()[-SHOWN_CHARACTERS:]
    raise EnvFailed(f"the tests wrote neither reward.txt nor reward.json: {printed}")


def _read(path: Path) -> str | None:
    """The end of a file that a sandboxed program has written: no link is followed, no pipe read."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        return None
    with os.fdopen(number, "rb") as file:
        file.seek(max(0, os.fstat(number).st_size - LARGEST_REWARD_BYTES))
        return file.read(LARGEST_REWARD_BYTES).decode(errors="replace")
