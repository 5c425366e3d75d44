"""Leaves out the tasks of an env whose prompts are too long for the engine."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.env.base import Env, Observation, Session, SessionEnv, Split, Task, has_sessions
from slipstream.env.images import has_images, separate_images
from slipstream.env.tools.session import ToolEnv
from slipstream.models.images import ImageError
from slipstream.models.tokenizer import PromptError, Tokenizer
from slipstream.rollout_servers.placeholders import ImagePlaceholders
from slipstream.rollout_servers.rollouts.conversation import ChatFormat

log = get_log("rollout.prompt_filter")

_MOST_TASKS: Final = 5_000_000  # some minutes
_MARGIN: Final = 16  # tokens that a tokenizer may add to each message
_SPLITS: Final[tuple[Split, ...]] = ("train", "eval")


def without_long_prompts(env: Env, tokenizer: Tokenizer, config: RolloutConfig) -> Env:
    """The env without the tasks whose prompts leave no room for `rollout.sampling.max_tokens`.

    All tasks are read. Of a session the task's prompt counts with the tools of `env.tools`, without what the session
    adds otherwise.

    Raises: ConfigError if the env has too many tasks to read, or if no train task is left.
    """
    limit = config.engine.max_model_len - config.sampling.max_tokens
    sizes = {split: env.size(split) for split in _SPLITS}
    if sum(sizes.values()) > _MOST_TASKS:
        raise ConfigError(
            f"rollout.skip_long_prompts reads all tasks, and the env has {sum(sizes.values())}, more than "
            f"{_MOST_TASKS}; unset it: tasks with prompts that are too long are dropped and counted as they come"
        )
    lengths = _Lengths(ChatFormat.of(tokenizer, config.episode), limit)
    kept = {split: array("q", (i for i in range(sizes[split]) if lengths.fits(env, split, i))) for split in _SPLITS}
    left_out = {split: sizes[split] - len(kept[split]) for split in _SPLITS}
    log.info("prompts that are too long left out", **left_out, train_kept=len(kept["train"]), limit=limit)
    if sizes["train"] and not kept["train"]:
        raise ConfigError(
            f"no train task is left: every prompt has more than {limit} tokens, which "
            "rollout.engine.max_model_len - rollout.sampling.max_tokens leaves; raise the first or lower the second"
        )
    if not any(left_out.values()):
        return env
    return ShortPromptsWithSessions(env, kept) if has_sessions(env) else ShortPrompts(env, kept)


class ShortPrompts:
    """The tasks of an env at some of its indices."""

    def __init__(self, env: Env, kept: Mapping[Split, "array[int]"]) -> None:
        """`kept` are the indices by split."""
        self._env = env
        self._kept = kept
        self.labels: Sequence[str] = getattr(env, "labels", ())
        """Of the parts, if the env is a mixture."""

    def size(self, split: Split) -> int:
        """Number of tasks in the split."""
        return len(self._kept[split])

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`."""
        return self._env.task(split, self._kept[split][index])

    def fingerprint(self) -> str:
        """Hash of the env's fingerprint and of the indices, on which the servers must agree."""
        digest = hashlib.sha256(self._env.fingerprint().encode())
        for split in _SPLITS:
            digest.update(f" {split} {self.size(split)} ".encode() + self._kept[split].tobytes())
        return digest.hexdigest()


class ShortPromptsWithSessions(ShortPrompts):
    """The same for an env with sessions."""

    _env: SessionEnv

    def session(self, task: Task) -> Session:
        """A session of the env."""
        return self._env.session(task)


class _Lengths:
    """Compares prompts with the limit. Few are tokenized: a text has at most as many tokens as bytes."""

    def __init__(self, format: ChatFormat, limit: int) -> None:
        self._format = format
        self._placeholders = ImagePlaceholders.of(format.tokenizer.model)
        self._limit = limit
        self._templates: dict[tuple[Any, ...], int] = {}

    def fits(self, env: Env, split: Split, index: int) -> bool:
        """True if the prompt has at most `limit` tokens. True where it fails: that is counted when it is played."""
        try:
            task = env.task(split, index)
            opening = env.opening(task) if isinstance(env, ToolEnv) else Observation(task.prompt)
            if self._placeholders is not None and (task.images or has_images(opening.messages)):
                messages, images = separate_images(opening.messages, task.images)
                tokens, _ = self._placeholders.expand(self._tokens(replace(opening, messages=messages)), images)
                return len(tokens) <= self._limit
            return self._most_tokens(opening) <= self._limit or len(self._tokens(opening)) <= self._limit
        except (PromptError, ImageError):
            return True
        except Exception as error:  # noqa: BLE001  (user code may raise anything)
            log.warning("task can't be read", split=split, index=index, error=repr(error)[:200])
            return True

    def _tokens(self, opening: Observation) -> list[int]:
        shown = self._format.for_template(opening)
        return self._format.tokenizer.encode(shown.messages, tools=shown.tools)

    def _most_tokens(self, opening: Observation) -> int:
        """An upper bound of the prompt's tokens."""
        if isinstance(opening.messages, str):
            return len(opening.messages.encode()) + _MARGIN
        texts = [message.get("content") for message in opening.messages]
        if not all(isinstance(text, str) for text in texts) or any(
            message.keys() - {"role", "content"} for message in opening.messages
        ):
            return self._limit + 1
        roles = tuple(message["role"] for message in opening.messages)
        if roles not in self._templates:
            empty = replace(opening, messages=[{"role": role, "content": ""} for role in roles])
            self._templates[roles] = len(self._tokens(empty))
        return self._templates[roles] + sum(len(str(text).encode()) + _MARGIN for text in texts)
