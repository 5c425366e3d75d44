"""Plays rollouts of one environment of `verifiers`, as a program in the Python that has its packages.

Requests and answers are lines of JSON on the standard streams; the first request has the environment's name and
arguments. It imports nothing of this project. Packages with a function `load_environment` are those of verifiers 0.1
to 0.3, all others tasksets of `verifiers.v1`.
"""

import asyncio
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, Protocol

BUDGET = "session_budget_exhausted"
"""Code of the gateway's refusal once the budget of an episode is used up: its end, and no failure."""
HELD_OUT = 4
"""One of so many rows is held out where an environment has no rows for evaluation."""
CLIENT_TIMEOUT_S = 3600.0

_reward_errors: ContextVar[list[str]] = ContextVar("reward_errors")


class Environment(Protocol):
    """One environment.

    Attributes:
        train, held_out: its rows; None: held-out rows are to be chosen from the others.
    """

    @property
    def train(self) -> Sequence[Any]: ...

    @property
    def held_out(self) -> Sequence[Any] | None: ...

    def content(self, row: Any) -> dict[str, Any]:
        """Plain values that tell rows apart."""
        ...

    def task(self, row: Any) -> dict[str, Any]:
        """`prompt`, `reference` and `info` of a row."""
        ...

    async def play(self, row: Any, model: Mapping[str, str]) -> dict[str, Any]:
        """`reward` and `metrics` of one rollout. Raises: whatever the environment raises, RuntimeError."""
        ...


class Classic:
    """An environment of `verifiers.load_environment`."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        import verifiers

        self._env = verifiers.load_environment(name, **arguments)
        rubrics = list(_rubrics(self._env))
        if any(getattr(rubric, "has_group_rewards", False) for rubric in rubrics):
            raise RuntimeError("its rewards compare the rollouts of a group; here each rollout is scored by itself")
        for rubric in rubrics:
            rubric.funcs[:] = [_noting_errors(function) for function in rubric.funcs]
        evaluation = self._env.eval_dataset_source is not None or self._env.eval_dataset is not None
        training = self._env.dataset_source is not None or self._env.dataset is not None
        self.train = self._env.get_dataset() if training else self._env.get_eval_dataset()
        self.held_out = self._env.get_eval_dataset() if training and evaluation else None

    def content(self, row: Any) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key != "example_id"}

    def task(self, row: Any) -> dict[str, Any]:
        info = row.get("info") or {}
        info = json.loads(info) if isinstance(info, str) else info
        return {"prompt": row["prompt"], "reference": str(row.get("answer") or ""), "info": info}

    async def play(self, row: Any, model: Mapping[str, str]) -> dict[str, Any]:
        errors: list[str] = []
        _reward_errors.set(errors)
        client = _client_class()(_openai().with_options(base_url=model["url"], api_key=model["key"]))
        state = await self._env.rollout(dict(row), client, model["name"], {})
        try:
            if (error := state.get("error")) is not None and not _is_budget(error):
                raise RuntimeError(f"the rollout failed: {_shown(error)}")
            await self._env.rubric.score_rollout(state)
        finally:
            await self._env.rubric.cleanup(state)
        if errors:
            raise RuntimeError(f"a reward function failed: {errors[0]}")
        return {"reward": state["reward"], "metrics": _numbers(state["metrics"] or {})}


class Taskset:
    """A taskset of `verifiers.v1`, played by the agent that the arguments describe: its section `env`."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        taskset = {**arguments.get("taskset", {}), "id": name}
        self._config = resolve_env_config({**arguments, "taskset": taskset})
        loaded = load_environment(self._config).taskset
        if not getattr(loaded, "bounded", not loaded.INFINITE):
            raise RuntimeError("it has infinitely many tasks, which can't be numbered")
        self.train = list(loaded)
        self.held_out = None
        self._keys = 0

    def content(self, row: Any) -> dict[str, Any]:
        return {key: value for key, value in row.data.model_dump(mode="json").items() if key != "idx"}

    def task(self, row: Any) -> dict[str, Any]:
        data = row.data.model_dump(mode="json", exclude_none=True)
        prompt = data.get("prompt") or ""
        return {"prompt": prompt, "reference": str(data.get("answer", "")), "info": {"name": data.get("name", "")}}

    async def play(self, row: Any, model: Mapping[str, str]) -> dict[str, Any]:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.utils.loaders import load_environment

        self._keys += 1
        variable = f"SLIPSTREAM_API_KEY_{self._keys}"  # verifiers' programs do not inherit variables of this form
        os.environ[variable] = model["key"]
        try:
            # One for each rollout: the clients of ended sessions would stay until the end of an environment.
            env = load_environment(self._config)
            client = EvalClientConfig(base_url=model["url"], api_key_var=variable)
            async with env.serving():
                episode = await env.run_episode(row, ModelContext(model=model["name"], client=client))
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(
                f"the rollout failed: {errors[-1].type}: {errors[-1].message}" if errors else "it failed"
            )
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1:
            raise RuntimeError(f"{len(trained)} agents are trained in an episode; one can be")
        rewards = {name: getattr(reward, "value", reward) for name, reward in trained[0].rewards.items()}
        return {"reward": trained[0].reward, "metrics": _numbers({**rewards, **trained[0].metrics})}


class Rows:
    """The rows of an environment by split: what is held out never occurs in the others."""

    def __init__(self, env: Environment) -> None:
        train = [_hash(env.content(row)) for row in env.train]
        if env.held_out is None:
            chosen = {each for each in train if int(each[:8], 16) % HELD_OUT == 0}
            held_out = [index for index, each in enumerate(train) if each in chosen]
            rows = env.train
        else:
            hashes = [_hash(env.content(row)) for row in env.held_out]
            chosen, held_out, rows = set(hashes), list(range(len(hashes))), env.held_out
        self._splits = {
            "train": (env.train, [index for index, each in enumerate(train) if each not in chosen]),
            "eval": (rows, held_out),
        }
        self.fingerprint = _hash([train, sorted(chosen)])
        self.sizes = {split: len(indices) for split, (_, indices) in self._splits.items()}

    def row(self, split: str, index: int) -> Any:
        """The row of a task."""
        rows, indices = self._splits[split]
        return rows[indices[index]]


def _rubrics(env: Any) -> Iterable[Any]:
    """All rubrics of an environment, those of groups included."""
    waiting = [env.rubric, *(each.rubric for each in getattr(env, "envs", ()))]
    while waiting:
        rubric = waiting.pop()
        yield rubric
        waiting += getattr(rubric, "rubrics", ())


def _noting_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function; verifiers logs what it raises, and takes 0 for its result."""

    @functools.wraps(function)
    async def noting(*arguments: Any, **keywords: Any) -> Any:
        try:
            result = function(*arguments, **keywords)
            return float(await result if inspect.isawaitable(result) else result)
        except Exception as error:  # raised again; it also fails the rollout (`play`)
            _reward_errors.get().append(f"{getattr(function, '__name__', function)}: {_shown(error)}")
            raise

    return noting


@functools.cache
def _client_class() -> Any:
    """The client of verifiers, for which an empty answer is an answer: the rubric scores it."""
    from verifiers.clients import OpenAIChatCompletionsClient

    class Client(OpenAIChatCompletionsClient):  # type: ignore[misc]
        async def raise_from_native_response(self, response: Any) -> None:
            """The gateway's answers are complete."""

        async def from_native_response(self, response: Any) -> Any:
            """The answer, whose text may be empty."""
            parsed = await super().from_native_response(response)
            if not parsed.message.content and not parsed.message.tool_calls:
                parsed.message.content = response.choices[0].message.content or ""
            return parsed

    return Client


@functools.cache
def _openai() -> Any:
    """One client, and so one pool of connections, for all rollouts."""
    from openai import AsyncOpenAI

    # Hundreds of rollouts begin at once: by default a connection must be there within 5 s.
    return AsyncOpenAI(base_url="http://unset", api_key="unset", timeout=CLIENT_TIMEOUT_S)


def _is_budget(error: BaseException) -> bool:
    """True for the gateway's refusal of a call, which ends the rollout."""
    chain: BaseException | None = error
    while chain is not None:
        if getattr(chain, "code", None) == BUDGET:
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _shown(error: BaseException) -> str:
    cause = error.__cause__
    return f"{type(error).__name__}: {error}" + (f" ({_shown(cause)})" if cause is not None else "")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _load(name: str, arguments: Mapping[str, Any]) -> Environment:
    module = importlib.import_module(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_"))
    return Classic(name, arguments) if hasattr(module, "load_environment") else Taskset(name, arguments)


class Worker:
    """Answers requests, many at a time."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def run(self, requests: Iterable[str]) -> None:
        """Answers until there are no more requests."""
        lines: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in requests:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, "")

        threading.Thread(target=read, daemon=True).start()
        if not self._open(json.loads(await lines.get())):
            return
        while line := await lines.get():
            self._begin(json.loads(line))
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def _open(self, settings: Mapping[str, Any]) -> bool:
        """Loads the environment."""
        try:
            self._env = _load(settings["environment"], settings["arguments"])
            self._rows = Rows(self._env)
        except Exception as error:  # noqa: BLE001  (a package may raise anything)
            self._send({"error": _shown(error)})
            return False
        described = {"fingerprint": _hash([version("verifiers"), settings, self._rows.fingerprint])}
        self._send({"result": {**described, "sizes": self._rows.sizes}})
        return True

    def _begin(self, request: Mapping[str, Any]) -> None:
        number = request["id"]
        if request["do"] == "stop":
            if number in self._playing:
                self._playing[number].cancel()
            return
        self._playing[number] = task = asyncio.create_task(self._answer(request))
        task.add_done_callback(lambda _: self._playing.pop(number))

    async def _answer(self, request: Mapping[str, Any]) -> None:
        try:
            row = self._rows.row(request["split"], request["index"])
            result = self._env.task(row) if request["do"] == "task" else await self._env.play(row, request["model"])
            self._send({"id": request["id"], "result": result})
        except Exception as error:  # noqa: BLE001  (a package may raise anything)
            self._send({"id": request["id"], "error": _shown(error)})

    def _send(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer, default=str) + "\n")
        self._answers.flush()


def main() -> None:
    """Reads requests from stdin; what packages print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asyncio.run(Worker(answers).run(sys.stdin))


if __name__ == "__main__":
    main()
