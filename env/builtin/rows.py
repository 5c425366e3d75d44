"""Rows of files and data sets as tasks: a prompt, its answer, and everything else as `info`."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import msgspec

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.env.base import Split, Task
from slipstream.env.images import MARK, count_places, has_marks
from slipstream.models.row_sources import Row, RowSource, open_sources, plain, value_at

log = get_log("env.rows")

PROMPT_KEYS = ("prompt", "messages", "question", "problem")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "ground_truth", "solution", "completion")
"""Keys by which rows are recognised, the first that a source's first row has: of verl, of TRL, of common data sets."""
IMAGE_KEYS = ("images", "image")
"""Keys of a row's images, if they hold bytes or paths as `datasets` has them; texts only count under `image_key`."""

PLACEHOLDER = "{prompt}"

_SHOWN_PROBLEMS = 20  # a file of another format has one problem per line
_LARGEST_EXACT = 2.0**53
_encoder = msgspec.json.Encoder(order="sorted")

Paths = str | Path | Sequence[str | Path]


class Rows:
    """One task per row, in the order of the files.

    A prompt is a text or a list of chat messages. An answer is a text, a number (its text) or a list (its JSON text).
    All other keys become the task's `info`, without those of value None, which unified columns add. Images are read
    when a task is played; they belong to the places `<image>` of the prompt, or stand before it.

    Args:
        path: a JSON-lines or parquet file, a pattern of files, a folder that `datasets` saved, the name of a data set
            on the hub, or a list of these.
        split: of a folder with splits or a data set of the hub; unset: `train`.
        subset: configuration of a data set of the hub, such as `main` for `openai/gsm8k`.
        eval_path: held-out rows, as `path`.
        eval_split: split of held-out rows, in `eval_path` (unset: `test`) or else in `path`.
        eval_rows: instead of both: hold out that many rows at the end of `path`.
        prompt_key: key of the prompt; dots lead into nested rows. Unset: one of `PROMPT_KEYS`. In a list under
            `messages`, a last message of the assistant is the answer.
        answer_key: key of the answer, as `prompt_key`; unset: one of `ANSWER_KEYS`.
        image_key: key of an image or a list of images; unset: one of `IMAGE_KEYS`, or none.
        template: text around a prompt, or around its last message, such as "Question: {prompt}\\nAnswer:".
        system: system message before a prompt, which becomes a chat if it is a text.
        chat: make a chat of a prompt that is a text.

    Raises: ConfigError with file and line or row of every malformed or leaked row, or for options that exclude each
        other.
    """

    def __init__(  # noqa: PLR0913  (options of the configuration)
        self,
        path: Paths,
        *,
        split: str | None = None,
        subset: str | None = None,
        eval_path: Paths | None = None,
        eval_split: str | None = None,
        eval_rows: int = 0,
        prompt_key: str | None = None,
        answer_key: str | None = None,
        image_key: str | None = None,
        template: str | None = None,
        system: str | None = None,
        chat: bool = False,
    ) -> None:
        _check_options(eval_path, eval_split, eval_rows, template)
        keys = _Keys(prompt_key, answer_key, image_key)
        shape = _Shape(template, system, chat)
        rows = _Rows(open_sources(_listed(path), subset=subset, split=split, default_split="train"), keys, shape)
        if not 0 <= eval_rows < max(len(rows), 1):
            raise ConfigError(f"env rows: eval_rows={eval_rows} must leave train rows; {path} has {len(rows)}")
        train = _Part(rows, range(len(rows) - eval_rows))
        held_out = _Part(rows, range(len(train.rows), len(rows)))
        if eval_path is not None or eval_split is not None:
            paths = _listed(path if eval_path is None else eval_path)
            others = _Rows(open_sources(paths, subset=subset, split=eval_split, default_split="test"), keys, shape)
            held_out = _Part(others, range(len(others)))
            if not others:
                raise ConfigError(f"env rows: {', '.join(paths)} holds no rows to evaluate")
        if not train.rows:
            raise ConfigError(f"env rows: {path} holds no rows")
        self._parts: dict[Split, _Part] = {"train": train, "eval": held_out}
        self._fingerprint = _check(train, held_out)
        log.info("rows read", train=len(train.rows), eval=len(held_out.rows), **rows.keys_of_first)

    def size(self, split: Split) -> int:
        """Number of rows in the split."""
        return len(self._parts[split].rows)

    def task(self, split: Split, index: int) -> Task:
        """The row at `index`.

        Raises: IndexError unless 0 <= index < size(split).
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"env rows: {split} row {index} does not exist; there are {self.size(split)}")
        part = self._parts[split]
        return part.of.task(part.rows[index])

    def fingerprint(self) -> str:
        """Hash of the tasks in their order; not of paths or formats, because hosts may differ in them."""
        return self._fingerprint


@dataclass(frozen=True)
class _Keys:
    """Keys of prompt, answer and images.

    None: still to be found, no key of the answer but the last of the `messages`, or each row's own key of images.
    """

    prompt: str | None
    answer: str | None
    images: str | None

    def of_source(self, source: RowSource) -> "_Keys":
        """The keys of a source, by its first row that is not malformed. Raises: ConfigError if that has none."""
        malformed: list[str] = []
        for index, row in enumerate(source.scan()):
            if isinstance(row, ValueError):
                malformed.append(f"env rows: {source.place(index)}: {row}")
                continue
            prompt = self.prompt or next((key for key in PROMPT_KEYS if value_at(row, key) is not None), None)
            answer = self.answer or next((key for key in ANSWER_KEYS if value_at(row, key) is not None), None)
            if prompt is not None and (answer is not None or prompt == "messages"):
                return _Keys(prompt, answer, self.images)
            what, known = ("prompt", PROMPT_KEYS) if prompt is None else ("answer", ANSWER_KEYS)
            unknown = (
                f"env rows: {source.place(index)}: no {what} under {', '.join(known)}; set env.options.{what}_key to "
                f"one of its keys: {', '.join(row) or 'it has none'}"
            )
            raise ConfigError([*malformed[:_SHOWN_PROBLEMS], unknown])
        return self


@dataclass(frozen=True)
class _Shape:
    """Changes of a prompt."""

    template: str | None
    system: str | None
    chat: bool

    def task(self, row: Row, keys: _Keys) -> Task:
        """The task of a row. Raises: ValueError for a malformed one."""
        assert keys.prompt is not None, "every well-formed row of a source has been tried"
        image_key = keys.images or next((key for key in IMAGE_KEYS if _is_images(row.get(key))), None)
        images = () if image_key is None else _images(value_at(row, image_key))
        prompt, last = _prompt(plain(_required(row, keys.prompt), images=True)), None
        if count_places(prompt) > len(images):
            raise ValueError(f"its prompt has more places for images than the {len(images)} images of the row")
        if image_key is None and has_marks(prompt) and (unused := next(filter(row.get, IMAGE_KEYS), None)):
            raise ValueError(
                f"its prompt has {MARK}, but {unused}={_short(row[unused])} is not read: where texts are the paths of "
                f"images, set env.options.image_key={unused}"
            )
        answer = None if keys.answer is None else _answer(plain(_required(row, keys.answer)))
        row = plain({key: value for key, value in row.items() if key not in (keys.prompt, image_key)})
        if keys.prompt == "messages" and not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            *prompt, last = prompt
        if answer is not None:
            reference = answer
        elif last is not None and isinstance(last["content"], str):
            reference = last["content"]
        else:
            raise ValueError("its messages don't end with one of the assistant, which would be the answer")
        if not prompt:
            raise ValueError("its messages hold no prompt")
        info = {key: value for key, value in row.items() if key != keys.answer}
        return Task(prompt=self._shaped(prompt), reference=reference, info=info, images=images)

    def _shaped(self, prompt: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if self.template is not None:
            if isinstance(prompt, str):
                prompt = self.template.replace(PLACEHOLDER, prompt)
            else:
                text = prompt[-1].get("content", "")
                if not isinstance(text, str):
                    raise ValueError("env.options.template needs a last message whose content is a text")
                text = self.template.replace(PLACEHOLDER, text)
                prompt = [*prompt[:-1], {**prompt[-1], "content": text}]
        if isinstance(prompt, str) and (self.chat or self.system is not None):
            prompt = [{"role": "user", "content": prompt}]
        if self.system is not None and not isinstance(prompt, str):
            prompt = [{"role": "system", "content": self.system}, *prompt]
        return prompt


class _Rows:
    """The rows of several sources, one behind the other, as tasks."""

    def __init__(self, sources: Sequence[RowSource], keys: _Keys, shape: _Shape) -> None:
        """Raises: ConfigError if the keys of a source are not found."""
        self._sources = [(source, keys.of_source(source)) for source in sources]
        self._ends = list(accumulate(len(source) for source in sources))
        self._shape = shape

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def keys_of_first(self) -> dict[str, str | None]:
        """Keys of the first source."""
        keys = self._sources[0][1]
        return {"prompt_key": keys.prompt, "answer_key": keys.answer}

    def task(self, index: int) -> Task:
        """The task of a row. Raises: ValueError for a malformed one."""
        source, keys, row = self._located(index)
        return self._shape.task(source.row(row), keys)

    def place(self, index: int) -> str:
        """File and line, or file and index of a row."""
        source, _, row = self._located(index)
        return source.place(row)

    def scan(self) -> Iterator[Task | ValueError]:
        """All tasks, with an error in the place of a malformed row; faster than one by one."""
        for source, keys in self._sources:
            for row in source.scan():
                try:
                    yield row if isinstance(row, ValueError) else self._shape.task(row, keys)
                except ValueError as error:
                    yield error

    def _located(self, index: int) -> tuple[RowSource, _Keys, int]:
        number = bisect_right(self._ends, index)
        source, keys = self._sources[number]
        return source, keys, index - self._ends[number] + len(source)


@dataclass(frozen=True)
class _Part:
    """A split: some rows of `of`."""

    of: _Rows
    rows: range

    def scan(self) -> Iterator[tuple[int, Task | ValueError]]:
        """Number and task of each row."""
        return zip(self.rows, islice(self.of.scan(), self.rows.start, self.rows.stop), strict=True)


def _check(train: _Part, held_out: _Part) -> str:
    """The fingerprint of the tasks. Raises: ConfigError for malformed rows and for train prompts that are held out."""
    digest = hashlib.sha256(f"rows {len(train.rows)} {len(held_out.rows)}".encode())
    problems, places = list[str](), dict[bytes, str]()
    for part in (held_out, train):
        for index, task in part.scan():
            try:
                if isinstance(task, ValueError):
                    raise task
                prompt = _encoder.encode([task.prompt, task.images] if task.images else task.prompt)
                digest.update(prompt + _encoder.encode([task.reference, task.info]))
                identity = hashlib.blake2b(prompt, digest_size=16).digest()
                if part is held_out:
                    places[identity] = part.of.place(index)
                elif identity in places:
                    raise ValueError(f"the prompt is also held out at {places[identity]}; remove one of the two rows")
            # Of the encoder: lone surrogates, too many levels.
            except (ValueError, RecursionError) as error:
                problems.append(f"env rows: {part.of.place(index)}: {error}")
    if len(problems) > _SHOWN_PROBLEMS:
        problems[_SHOWN_PROBLEMS:] = [f"env rows: and {len(problems) - _SHOWN_PROBLEMS} more rows"]
    if problems:
        raise ConfigError(problems)
    return digest.hexdigest()


def _check_options(eval_path: Paths | None, eval_split: str | None, eval_rows: int, template: str | None) -> None:
    """Raises: ConfigError for options that exclude each other."""
    if not isinstance(eval_rows, int):
        raise ConfigError(f"env rows: eval_rows={eval_rows!r} must be a whole number")
    if eval_rows and (eval_path is not None or eval_split is not None):
        raise ConfigError(f"env rows: eval_rows={eval_rows} excludes eval_path and eval_split; give one of them")
    if template is not None and PLACEHOLDER not in template:
        raise ConfigError(f"env rows: template={template!r} needs {PLACEHOLDER} where the row's prompt belongs")


def _listed(paths: Paths) -> list[str]:
    return [str(paths)] if isinstance(paths, str | Path) else list(map(str, paths))


def _required(row: Row, key: str) -> Any:
    """Raises: ValueError if there is no value."""
    value = value_at(row, key)
    if value is None:
        raise ValueError(f"has no {key!r}; its keys are {sorted(row)}")
    return value


def _prompt(value: Any) -> str | list[dict[str, Any]]:
    """Raises: ValueError for what is neither a text nor chat messages."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) and "role" in each for each in value):
        raise ValueError(f"its prompt must be a text or chat messages with 'role' and 'content', not {_short(value)}")
    for message in value:
        parts = message.get("content")
        if isinstance(parts, list) and all(isinstance(part, dict) and "type" in part for part in parts):
            continue
        texts = [message["role"], message.get("content", "" if message.get("tool_calls") else None)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"a message needs the texts 'role' and 'content': {_short(message)}")
    return value


def _answer(value: Any) -> str:
    """An answer as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[-1], dict) and "content" in value[-1]:
        return str(value[-1]["content"])  # a completion as messages
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
        return str(int(value))  # a column of integers that lacks some is one of floats
    return json.dumps(value, ensure_ascii=False)


def _short(value: Any) -> str:
    return repr(value)[:200]


def _is_images(value: Any) -> bool:
    """True for an image or a list of images as `datasets` and verl have them."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, bytes) or (isinstance(first, Mapping) and not {"bytes", "path"}.isdisjoint(first))


def _images(value: Any) -> tuple[Any, ...]:
    """Images of a row; none for None. Raises: ValueError for what can't be one."""
    images = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    for image in images:
        if not isinstance(image, str) and not _is_images(image):
            raise ValueError(f"an image must be bytes or a path, not {_short(image)}")
    return images
