"""Prompt/answer rows of a JSON-lines file."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.base import expand_home
from slipstream.env.base import Split, Task

_SHOWN_PROBLEMS = 20  # a file of another format has one problem per line


class Rows:
    """One task per line of `path`, in the order of the file; blank lines are skipped.

    Args:
        path: lines such as `{"prompt": "2+2=", "answer": "4"}`. A prompt is a text or a list of chat messages
            with `role` and `content`, an answer is a text; a row's other keys become the task's `info`.
        eval_path: a file of held-out rows.
        prompt_key: the key of the prompt.
        answer_key: the key of the answer.
        eval_rows: instead of `eval_path`: hold out that many rows at the end of `path`.

    Raises: ConfigError with the line number of every malformed or leaked row, or for options that exclude each other.
    """

    def __init__(
        self,
        path: str | Path,
        eval_path: str | Path | None = None,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        eval_rows: int = 0,
    ) -> None:
        if not isinstance(eval_rows, int):
            raise ConfigError(f"env jsonl: eval_rows={eval_rows!r} must be a whole number")
        if eval_rows and eval_path is not None:
            raise ConfigError(f"env jsonl: give eval_path={str(eval_path)!r} or eval_rows={eval_rows}, not both")
        if prompt_key == answer_key:
            raise ConfigError(f"env jsonl: prompt_key and answer_key are both {prompt_key!r}")
        keys = (prompt_key, answer_key)
        problems: list[str] = []
        digest = hashlib.sha256(json.dumps(["jsonl", 1, *keys, eval_rows]).encode())
        train = _read(Path(path), keys, problems, digest)
        held_out = [] if eval_path is None else _read(Path(eval_path), keys, problems, digest)
        _refuse(problems)
        if not 0 <= eval_rows < max(len(train), 1):
            raise ConfigError(f"env jsonl: eval_rows={eval_rows} must leave train rows; {path} has {len(train)}")
        if eval_path is not None and not held_out:
            raise ConfigError(f"env jsonl: {eval_path} holds no rows")
        if eval_rows:
            train, held_out = train[:-eval_rows], train[-eval_rows:]
        if not train:
            raise ConfigError(f"env jsonl: {path} holds no rows")
        _refuse(_leaks(train, held_out))
        self._tasks: dict[Split, list[Task]] = {
            "train": [task for _, task in train],
            "eval": [task for _, task in held_out],
        }
        self._fingerprint = digest.hexdigest()

    def size(self, split: Split) -> int:
        """Number of rows in the split."""
        return len(self._tasks[split])

    def task(self, split: Split, index: int) -> Task:
        """The row at `index`.

        Raises: IndexError unless 0 <= index < size(split).
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"env jsonl: {split} row {index} does not exist; there are {self.size(split)}")
        return self._tasks[split][index]

    def fingerprint(self) -> str:
        """Hash of the files' bytes and of the options; not of paths, because hosts may differ in them."""
        return self._fingerprint


_Located = tuple[str, Task]  # "file:line" and its task


def _read(path: Path, keys: tuple[str, str], problems: list[str], digest: "hashlib._Hash") -> list[_Located]:
    """The file's tasks; adds bad lines to `problems`, and all bytes to `digest`."""
    located = []
    digest.update(b"\0file\0")
    try:
        with expand_home(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if not line.strip():
                    continue
                try:
                    located.append((f"{path}:{number}", _task(line, *keys)))
                except ValueError as error:
                    problems.append(f"env jsonl: {path}:{number}: {error}")
    except OSError as error:
        problems.append(f"env jsonl: {path} can't be read: {error.strerror}")
    except ValueError as error:  # not a path, such as one with a null byte
        problems.append(f"env jsonl: {path} can't be read: {error}")
    return located


def _task(line: bytes, prompt_key: str, answer_key: str) -> Task:
    """Raises: ValueError for a malformed line."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be an object such as {{{prompt_key!r}: …}}, not {type(row).__name__}")
    missing = [key for key in (prompt_key, answer_key) if key not in row]
    if missing:
        raise ValueError(f"has no {' and no '.join(map(repr, missing))}; its keys are {sorted(row)}")
    prompt, answer = row.pop(prompt_key), row.pop(answer_key)
    if not isinstance(answer, str):
        raise ValueError(f"{answer_key!r} must be a text, not {answer!r}")
    if not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_message, prompt)))):
        raise ValueError(f"{prompt_key!r} must be a text or chat messages with 'role' and 'content'")
    return Task(prompt=prompt, reference=answer, info=row)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and {"role", "content"} <= value.keys()
        and all(isinstance(text, str) for text in value.values())
    )


def _leaks(train: list[_Located], held_out: list[_Located]) -> Iterator[str]:
    """A problem for each train row whose prompt is held out too."""
    places = {_identity(task): place for place, task in held_out}
    for place, task in train:
        twin = places.get(_identity(task))
        if twin is not None:
            yield f"env jsonl: {place}: the prompt is also held out at {twin}; remove one of the two rows"


def _identity(task: Task) -> str:
    return json.dumps(task.prompt, sort_keys=True)


def _refuse(problems: Iterator[str] | list[str]) -> None:
    found = list(problems)
    if len(found) > _SHOWN_PROBLEMS:
        found[_SHOWN_PROBLEMS:] = [f"env jsonl: and {len(found) - _SHOWN_PROBLEMS} more lines"]
    if found:
        raise ConfigError(found)
