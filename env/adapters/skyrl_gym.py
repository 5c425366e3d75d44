"""Envs of skyrl-gym over the rows of a JSON-lines file, as SkyRL itself has them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.configs.runtime.errors import ConfigError, suggest
from slipstream.configs.schema.base import expand_home
from slipstream.env.adapters.base import Prompt, ThreadedSession, fingerprint, require
from slipstream.env.base import Split, Task, Turn

_MOST_PROBLEMS = 20


class SkyrlGym:
    """One env per row; the row's keys but `prompt` are the env's `extras`.

    Answers are trained on as they were generated: `postprocessed_action` of a step is ignored.

    Args:
        path: lines with `prompt` (chat messages), `env_class` and what the env wants, such as `reward_spec`.
        eval_path: a file of held-out rows.
        env: the id of the env for rows without `env_class`.
        env_config: attributes of the env's configuration, such as `search_url`.

    Raises: ConfigError with the line number of every malformed row.
    """

    @staticmethod
    def choices() -> tuple[str, list[str]]:
        """An option, and its values that the package offers. Raises: ConfigError when it is not installed."""
        return "env", sorted(require("skyrl_gym", "skyrl_gym.envs.registration").registry)

    def __init__(
        self,
        path: str,
        eval_path: str | None = None,
        env: str | None = None,
        env_config: Mapping[str, Any] | None = None,
    ) -> None:
        require("skyrl_gym")
        self._config = dict(env_config or {})
        problems: list[str] = []
        self._rows = {
            "train": _read(Path(path), env, problems),
            "eval": [] if eval_path is None else _read(Path(eval_path), env, problems),
        }
        if not self._rows["train"] and not problems:
            problems.append(f"env skyrl_gym: {path} holds no rows")
        prompts = {json.dumps(row["prompt"]) for row in self._rows["eval"]}
        leaked = sum(json.dumps(row["prompt"]) in prompts for row in self._rows["train"])
        if leaked:
            problems.append(f"env skyrl_gym: {leaked} prompts of {path} are in {eval_path} too; remove them from one")
        if problems:
            more = [f"env skyrl_gym: and {len(problems) - _MOST_PROBLEMS} more"] * (len(problems) > _MOST_PROBLEMS)
            raise ConfigError(problems[:_MOST_PROBLEMS] + more)
        rows = hashlib.sha256(json.dumps(self._rows, sort_keys=True).encode()).hexdigest()
        self._fingerprint = fingerprint("skyrl-gym", [rows, self._config])

    def size(self, split: Split) -> int:
        """Number of rows in the split."""
        return len(self._rows[split])

    def task(self, split: Split, index: int) -> Task:
        """The row at `index`. Raises: IndexError unless 0 <= index < size(split)."""
        if not 0 <= index < self.size(split):
            raise IndexError(f"env skyrl_gym: {split} row {index} does not exist; there are {self.size(split)}")
        row = self._rows[split][index]
        spec = row.get("reward_spec") or row.get("reward_model") or {}
        truth = spec.get("ground_truth", "") if isinstance(spec, dict) else ""
        return Task(row["prompt"], truth if isinstance(truth, str) else json.dumps(truth), row)

    def fingerprint(self) -> str:
        """Hash of the package's version, the rows and the configuration."""
        return self._fingerprint

    def session(self, task: Task) -> ThreadedSession:
        """The env of the task's row."""
        return ThreadedSession(_Episode(task.info, self._config))


def _read(path: Path, env: str | None, problems: list[str]) -> list[dict[str, Any]]:
    """The rows; adds bad lines to `problems`."""
    known = list(require("skyrl_gym", "skyrl_gym.envs.registration").registry)
    rows = []
    try:
        lines = expand_home(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        problems.append(f"env skyrl_gym: {path} can't be read: {error}")
        return []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            row, problem = _row(line, env, known)
            if problem:
                problems.append(f"env skyrl_gym: {path}:{number}: {problem}")
            rows.append(row)
    return rows


def _row(line: str, env: str | None, known: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The row, and its problem or an empty text."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return {}, f"not valid JSON: {error}"
    if not isinstance(row, dict) or not _is_chat(row.get("prompt")):
        return {}, "must be an object with 'prompt', a list of messages with 'role' and 'content'"
    row.setdefault("env_class", env)
    if row["env_class"] not in known:
        name = str(row["env_class"])
        return (
            row,
            f"env_class={name!r} is no env of the package{suggest(name, known) or '; known: ' + ', '.join(known)}",
        )
    return row, ""


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


class _Episode:
    """One episode, as a `Game`."""

    def __init__(self, row: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._row = row
        self._config = config
        self._env: Any = None

    def reset(self) -> Prompt:
        extras = {key: value for key, value in self._row.items() if key != "prompt"}
        self._env = require("skyrl_gym").make(
            self._row["env_class"], env_config=SimpleNamespace(**self._config), extras=extras
        )
        messages, _ = self._env.init(list(self._row["prompt"]))
        return list(messages)

    def step(self, text: str) -> Turn:
        output = self._env.step(text)
        done = bool(output["done"])
        metrics = _numbers(self._env.get_metrics()) if done else {}
        return Turn(list(output["observations"]), float(output["reward"]), done=done, metrics=metrics)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
