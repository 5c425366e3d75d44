"""Readers of rows: JSON lines and parquet files, folders of `datasets`, and data sets of the Hugging Face hub."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import msgspec

from slipstream.configs.runtime.errors import ConfigError, format_error
from slipstream.configs.schema.base import expand_home

Row = dict[str, Any]

_PARQUET_MAGIC = b"PAR1"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = {".json", ".jsonl", ".parquet"}
_BATCH_ROWS = 4096
_INSTALL = 'install it: pip install "slipstream[data]"'


class RowSource(Protocol):
    """The rows of a file or of a split; they stay encoded in memory, and a row is decoded when it is asked for."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def place(self, index: int) -> str:
        """File and line, or file and index of a row."""
        ...

    def row(self, index: int) -> Row:
        """The row at `index`. Raises: ValueError for a malformed one."""
        ...

    def scan(self) -> Iterator[Row | ValueError]:
        """All rows in their order, with an error in the place of a malformed one."""
        ...


@dataclass(frozen=True)
class JsonLines:
    """Rows of a JSON-lines file: the bytes of its lines that are not blank, and their numbers."""

    name: str
    lines: Sequence[bytes]
    numbers: Sequence[int]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lines)

    def place(self, index: int) -> str:
        """`file:line`; the first line is 1."""
        return f"{self.name}:{self.numbers[index]}"

    def row(self, index: int) -> Row:
        """The decoded line. Raises: ValueError."""
        return _decoded(self.lines[index])

    def scan(self) -> Iterator[Row | ValueError]:
        """All rows in their order, with an error in the place of a malformed one."""
        for line in self.lines:
            try:
                yield _decoded(line)
            except ValueError as error:
                yield error


def _decoded(line: bytes) -> Row:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be an object such as {{'prompt': …}}, not {type(row).__name__}")
    return row


class Batches:
    """Rows of a table of Arrow, as its record batches: one row takes about 20 µs."""

    def __init__(self, name: str, batches: Sequence[Any]) -> None:
        """`batches` are of `pyarrow.RecordBatch`."""
        self._name = name
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        """Number of rows."""
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> str:
        """`file[index]`; the first row is 0, as in every library that reads the file."""
        return f"{self._name}[{index}]"

    def row(self, index: int) -> Row:
        """The decoded row."""
        number = bisect_right(self._ends, index)
        batch = self._batches[number]
        row: Row = batch.slice(index - self._ends[number] + batch.num_rows, 1).to_pylist()[0]
        return row

    def scan(self) -> Iterator[Row | ValueError]:
        """All rows in their order, with an error in the place of a malformed one."""
        for batch in self._batches:
            yield from batch.to_pylist()


def open_sources(
    paths: Sequence[str], *, subset: str | None, split: str | None, default_split: str, what: str = "env rows"
) -> list[RowSource]:
    """The rows of files, patterns of files, folders of `datasets` and data sets of the hub, in this order.

    Args:
        subset: configuration of a data set of the hub.
        split: split of a folder with several, or of a data set of the hub; None: `default_split`.
        what: begins the problems: whose rows they are.

    Raises: ConfigError with one problem for each path that can't be read.
    """
    sources: list[RowSource] = []
    problems: list[str] = []
    for text in paths:
        try:
            path = expand_home(Path(text))
            if path.is_dir():
                sources.append(_folder(path, split, default_split))
            elif path.exists() or path.suffix in _FILE_SUFFIXES or not _HUB_NAME.fullmatch(text):
                sources += [_file(each) for each in _matching(path)]
            else:
                sources.append(_hub_split(text, subset, split or default_split))
        except ConfigError as error:
            problems += error.problems
        except OSError as error:
            problems.append(f"{text} can't be read: {error.strerror or error}")  # errors of libraries have no strerror
        except ValueError as error:  # not a path, such as one with a null byte
            problems.append(f"{text} can't be read: {error}")
    if problems:
        raise ConfigError([f"{what}: {problem}" for problem in problems])
    return sources


def _matching(path: Path) -> list[Path]:
    """The path itself, or the sorted files that match it as a pattern."""
    pattern = str(path)
    if path.exists() or not re.search(r"[*?[]", pattern):
        return [path]
    paths = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not paths:
        raise ConfigError(f"no file matches {pattern}")
    return paths


def _file(path: Path) -> RowSource:
    with path.open("rb") as file:
        if file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC:
            return _parquet(path)
        if path.suffix == ".parquet":
            raise ConfigError(f"{path} is no parquet file; give JSON lines the suffix .jsonl")
        file.seek(0)
        lines = [(line, number) for number, line in enumerate(file, start=1) if not line.isspace()]
    if path.suffix == ".json" and lines and lines[0][0].lstrip().startswith(b"["):
        raise ConfigError(f"{path} is one JSON array; write one row per line (`jq -c '.[]' FILE > rows.jsonl`)")
    return JsonLines(str(path), [line for line, _ in lines], [number for _, number in lines])


def _parquet(path: Path) -> RowSource:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} is a parquet file, for which pyarrow is missing; {_INSTALL}") from None
    try:
        return Batches(str(path), list(parquet.ParquetFile(path).iter_batches(_BATCH_ROWS)))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} can't be read as parquet: {error}") from error


def _folder(path: Path, split: str | None, default_split: str) -> RowSource:
    """A folder as `save_to_disk` writes it."""
    if not (path / "state.json").exists() and not (path / "dataset_dict.json").exists():
        raise ConfigError(
            f"{path} is a folder, but none that `datasets` saved (save_to_disk); name its files, such as "
            f"{path}/*.parquet"
        )
    saved = _datasets().load_from_disk(str(path))
    if not isinstance(saved, dict):
        if split is not None:
            raise ConfigError(f"{path} has no splits; remove split={split!r}")
        return _table(str(path), saved)
    chosen = split or default_split
    if chosen not in saved:
        raise ConfigError(f"{path} has no split {chosen!r}; it has {', '.join(saved)}")
    return _table(f"{path} {chosen}", saved[chosen])


def _hub_split(name: str, subset: str | None, split: str) -> RowSource:
    load = _datasets().load_dataset
    try:
        found = load(name, subset, split=split)
    # Named and raised again: errors of the library, of its file formats and of its HTTP client have no common class.
    except Exception as error:
        raise ConfigError(
            f"{name} is no file here, and can't be loaded from the hub with split={split!r} and subset={subset!r}: "
            f"{' '.join(format_error(error).split())}; without a network, load it elsewhere and name its files"
        ) from error
    return _table(f"{name} {split}", found)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"folders and hub names of data sets need `datasets`; {_INSTALL}") from None
    datasets.disable_progress_bars()
    return datasets


def _table(name: str, dataset: Any) -> RowSource:
    return Batches(name, dataset.with_format("arrow")[:].to_batches(_BATCH_ROWS))


def value_at(row: Row, key: str) -> Any:
    """The value under a key, which may lead into nested rows; None if there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def plain(value: Any, *, images: bool = False) -> Any:
    """The value without Nones in mappings, as JSON can hold it: dates become texts.

    Raises: ValueError for bytes, unless `images` are allowed.
    """
    match value:
        case str() | bool() | int() | float() | None:
            return value
        case dict():
            return {key: plain(each, images=images) for key, each in value.items() if each is not None}
        case list() | tuple():
            return [plain(each, images=images) for each in value]
        case bytes() if images:
            return value
        case bytes():
            raise ValueError("it holds bytes: leave their column out, or name it as env.options.image_key")
    return msgspec.to_builtins(value)
