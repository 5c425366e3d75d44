"""Task folders in Harbor's format, played by an agent whose commands run in the task's environment."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

import httpx

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.base import expand_home
from slipstream.env.adapters.harbor.folder import HarborTask, task_folders
from slipstream.env.adapters.harbor.places import (
    Place,
    docker_problem,
    in_docker,
    in_sandbox,
    remove_abandoned,
    sandbox_problem,
)
from slipstream.env.adapters.harbor.recipe import NeedsImage, Recipe
from slipstream.env.base import AgentEndpoint, AgentReward, EnvFailed, Split, Task
from slipstream.env.builtin.agent import AgentFailed, Command, checked_command

log = get_log("env.harbor")

Runtime = Literal["auto", "sandbox", "docker"]

HELD_OUT: Final = 4
"""One of so many tasks is held out where there is no folder of them."""
MOST_PROBLEMS: Final = 10
SHELL: Final = "SLIPSTREAM_SHELL"
"""The variable in which an agent finds the program that runs a command in its task's environment."""
REWARD: Final = "reward"


class Harbor:
    """Tasks in Harbor's format: an instruction, an environment, and tests that write the reward.

    The agent is a program of this machine, as that of env `agent`; the commands it gives to the program
    `$SLIPSTREAM_SHELL` run in the task's environment.

    Args:
        path: a folder of task folders, or one task.
        command: the agent's program and arguments.
        eval_path: folder of the held-out tasks; unset: every fourth task, by the hash of its content.
        runtime: `auto`: the sandbox for a task that needs nothing else, Docker for others. `sandbox` and `docker`
            refuse tasks that can't run there.
        reward_key: which of several rewards in a reward.json is the episode's; the others are metrics.
        agent_timeout_s: longest time of an agent, for tasks that allow more.
        skip_unusable: leave out the tasks that can't be used, instead of refusing to start.
        concurrency: episodes at a time, of each rollout server.

    Raises: ConfigError with the names of tasks that can't be used.
    """

    from_outside = False
    needs_reward = True

    def __init__(
        self,
        path: str,
        command: Sequence[str],
        eval_path: str | None = None,
        runtime: Runtime = "auto",
        reward_key: str = REWARD,
        agent_timeout_s: float | None = None,
        skip_unusable: bool = False,
        concurrency: int = 8,
    ) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ConfigError(f"env harbor: concurrency={concurrency!r} must be a whole number from 1")
        if agent_timeout_s is not None and not agent_timeout_s > 0:
            raise ConfigError(f"env harbor: agent_timeout_s={agent_timeout_s!r} must be above 0")
        self._agent = Command(checked_command("harbor", command), concurrency=concurrency, rewards={0: None})
        self._places = asyncio.Semaphore(concurrency)
        self._reward_key, self._agent_timeout_s = reward_key, agent_timeout_s
        self._catalog = catalog = Catalog(runtime)
        train = catalog.read(path)
        held_out = [] if eval_path is None else catalog.read(eval_path)
        problems = catalog.problems
        if problems and not skip_unusable:
            more = [f"env harbor: and {len(problems) - MOST_PROBLEMS} more"] * (len(problems) > MOST_PROBLEMS)
            raise ConfigError([*problems[:MOST_PROBLEMS], *more, "env harbor: skip_unusable: true leaves them out"])
        if problems:
            log.warning("tasks are left out", tasks=len(problems), first=problems[0])
        hashes = {task.content for task in held_out}
        if eval_path is None:
            hashes = {task.content for task in train if int(task.content[:8], 16) % HELD_OUT == 0}
            held_out = [task for task in train if task.content in hashes]
        self._tasks = {"train": [task for task in train if task.content not in hashes], "eval": held_out}
        if not self._tasks["train"]:
            raise ConfigError(f"env harbor: {path} has no task to train on, besides those held out (eval_path)")
        remove_abandoned()

    def size(self, split: Split) -> int:
        """Number of tasks in the split."""
        return len(self._tasks[split])

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`, whose prompt is its instruction. Raises: IndexError unless 0 <= index < size(split)."""
        if not 0 <= index < self.size(split):
            raise IndexError(f"env harbor: {split} task {index} does not exist; there are {self.size(split)}")
        found = self._tasks[split][index]
        return Task(found.instruction, "", {"task": found.name, "split": split, "index": index})

    def fingerprint(self) -> str:
        """Hash of all files of the tasks."""
        hashes = [[task.hash() for task in tasks] for tasks in self._tasks.values()]
        return hashlib.sha256(f"harbor 1 {self._reward_key} {hashes}".encode()).hexdigest()

    async def run_agent(self, task: Task, endpoint: AgentEndpoint) -> AgentReward:
        """Plays one episode. Raises: AgentFailed, EnvFailed, OSError when the agent can't be started."""
        harbor = self._tasks[task.info["split"]][task.info["index"]]
        limit_s = min(filter(None, (harbor.agent_timeout_s, self._agent_timeout_s)), default=None)
        async with self._places, self._catalog.place(harbor) as place:
            try:
                # As in Harbor, what an agent has done until its deadline is tested.
                async with asyncio.timeout(limit_s):
                    await self._agent(task, endpoint, {SHELL: place.shell})
            except TimeoutError:
                pass
            except AgentFailed:
                if not await _is_exhausted(endpoint):
                    raise
            return chosen(await place.rewards(), self._reward_key)


class Catalog:
    """Tasks, each with the place where it runs on this machine.

    Attributes:
        problems: why others can't be used.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Raises: ConfigError for an unknown runtime."""
        if runtime not in get_args(Runtime):
            raise ConfigError(f"env harbor: runtime={runtime!r} must be one of {', '.join(get_args(Runtime))}")
        self.problems: list[str] = []
        self._runtime = runtime
        self._recipes: dict[Path, Recipe | None] = {}
        self._docker_problem = cache(docker_problem)
        self._sandbox_problem = cache(sandbox_problem)

    def read(self, path: str) -> list[HarborTask]:
        """The usable tasks of a folder. Raises: ConfigError if it has none at all."""
        tasks = []
        for folder in task_folders(expand_home(Path(path)).absolute()):
            try:
                task = HarborTask.read(folder)
                self._recipes[folder] = self._recipe(task)
            except ConfigError as error:
                self.problems.append(f"env harbor: {error}")
            except OSError as error:
                self.problems.append(f"env harbor: task {folder.name}: {error}")
            else:
                tasks.append(task)
        return tasks

    def runtime(self, task: HarborTask) -> str:
        """`sandbox` or `docker`."""
        return "docker" if self._recipes[task.folder] is None else "sandbox"

    def place(self, task: HarborTask) -> AbstractAsyncContextManager[Place]:
        """The environment of an episode."""
        recipe = self._recipes[task.folder]
        return in_docker(task) if recipe is None else in_sandbox(task, recipe)

    def _recipe(self, task: HarborTask) -> Recipe | None:
        """The steps by which the sandbox makes a task's environment; None: it runs in Docker. Raises: ConfigError."""
        reason = ""
        if self._runtime != "docker":
            try:
                recipe = Recipe.of(task)
            except NeedsImage as error:
                reason = f"it needs its image, for {error}"
            else:
                if not (problem := self._sandbox_problem()):
                    return recipe
                reason = f"the sandbox can't be used: {problem}"
        problem = "" if self._runtime == "sandbox" else self._docker_problem()
        if problem or self._runtime == "sandbox":
            raise ConfigError(f"task {task.folder.name}: {'; '.join(filter(None, (reason, problem)))}")
        return None


def chosen(rewards: Mapping[str, float], key: str) -> AgentReward:
    """The reward of an episode among those of its tests. Raises: EnvFailed."""
    key = key if len(rewards) > 1 else next(iter(rewards))
    if key not in rewards:
        raise EnvFailed(f"the tests gave the rewards {', '.join(rewards)}; name one by reward_key")
    return AgentReward(rewards[key], {name: value for name, value in rewards.items() if name != key})


async def _is_exhausted(endpoint: AgentEndpoint) -> bool:
    """True if a budget ended the session: an agent whose calls are refused may end as it likes."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as client:
        try:
            shown = (await client.get(endpoint.session_url)).raise_for_status().json()
        except httpx.HTTPError as error:
            raise EnvFailed(f"the gateway does not answer: {error}") from None
    return shown["limit"] is not None
