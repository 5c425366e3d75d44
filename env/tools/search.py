"""Full-text search in a local corpus, by BM25 over an index that is built once on each machine."""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.base import expand_home
from slipstream.env.tools.schema import Tool, whole_schema

log = get_log("env.search")

_RECIPE: Final = 1
"""Number of the index's format; another one is built anew."""
_RECORD: Final = "record.json"


class Search:
    """The tool `search`: the passages of a corpus that fit a query best.

    Args:
        path: JSON lines, or a parquet file, of passages.
        text_key: the key of a passage's text, which is indexed.
        title_key: the key of its title, which is indexed and shown; unset: none.
        top_k: number of results.
        cache: folder of the index; unset: `$XDG_CACHE_HOME/slipstream/search`, under the home directory by default.

    Raises: ConfigError for a corpus that can't be read, or without the package bm25s.
    """

    resumable = True

    def __init__(
        self,
        path: str,
        text_key: str = "text",
        title_key: str | None = None,
        top_k: int = 3,
        cache: str | None = None,
    ) -> None:
        try:
            import bm25s
        except ImportError:
            raise ConfigError('tool search needs bm25s: pip install "slipstream[search]"') from None
        if not isinstance(top_k, int) or top_k < 1:
            raise ConfigError(f"tool search: top_k={top_k!r} must be a whole number of at least 1")
        self._library = bm25s
        corpus, keys = expand_home(Path(path)), [text_key, *([title_key] if title_key else [])]
        folder = _indexed(corpus, keys, _cache_folder(cache))
        self._index = bm25s.BM25.load(folder, mmap=True, load_corpus=True, show_progress=False)
        self._top_k = min(top_k, int(self._index.scores["num_docs"]))
        self._lock = threading.Lock()  # the corpus is read by seeking in one file
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        log.info("corpus indexed", path=str(corpus), passages=record["passages"], index=str(folder))
        described = Tool.from_function(self._search, name="search")
        parameters = described.schema["function"]["parameters"]
        about = f"Searches {record['passages']} passages and returns the {self._top_k} that fit best."
        self.tools = (Tool("search", whole_schema("search", about, parameters), described.call),)
        self.fingerprint: str = record["sha256"]  # all servers must search the same corpus

    async def open(self, episode: AsyncExitStack) -> Sequence[Tool]:
        """The same tool for every episode."""
        return self.tools

    def _search(self, query: str) -> str:
        """Searches.

        Args:
            query: words of the passage to find.
        """
        words = _words(self._library, [query])
        with self._lock:
            found, scores = self._index.retrieve(words, k=self._top_k, show_progress=False)
        passages = [passage for passage, score in zip(found[0], scores[0], strict=True) if score > 0]
        lines = [f"[{rank}] {_shown(passage)}" for rank, passage in enumerate(passages, start=1)]
        return "\n\n".join(lines) or "no passage has a word of the query"


def _shown(passage: dict[str, str]) -> str:
    return "\n".join(text for text in (passage.get("title"), passage["text"]) if text)


def _words(library: Any, texts: list[str]) -> Any:
    """Words of texts, also of one letter, without English stop words."""
    return library.tokenize(texts, token_pattern=r"(?u)\b\w+\b", return_ids=False, show_progress=False)


def _cache_folder(cache: str | None) -> Path:
    if cache is not None:
        return expand_home(Path(cache))
    return Path(os.environ.get("XDG_CACHE_HOME") or expand_home(Path("~/.cache"))) / "slipstream" / "search"


def _indexed(corpus: Path, keys: list[str], cache: Path) -> Path:
    """The folder of the corpus's index, which is built unless another process has built it. Raises: ConfigError."""
    try:
        stat = corpus.stat()
        identity = json.dumps([_RECIPE, str(corpus.resolve()), stat.st_size, stat.st_mtime_ns, keys])
        folder = cache / hashlib.sha256(identity.encode()).hexdigest()[:32]
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not (folder / _RECORD).is_file():
                _build(corpus, keys, folder)
    except OSError as error:
        raise ConfigError(f"tool search: {error.filename or corpus} can't be used: {error.strerror}") from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that other processes wait for, and that a killed one loses."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(corpus: Path, keys: list[str], folder: Path) -> None:
    """Writes the index. Raises: ConfigError, OSError."""
    import bm25s

    log.info("index is built", corpus=str(corpus))
    passages = [dict(zip(("text", "title"), (row[key] for key in keys), strict=False)) for row in _rows(corpus, keys)]
    if not passages:
        raise ConfigError(f"tool search: {corpus} holds no passages")
    index = bm25s.BM25()
    index.index(_words(bm25s, [_shown(passage) for passage in passages]), show_progress=False)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        new = Path(scratch) / "new"
        index.save(new, corpus=passages, show_progress=False)
        with corpus.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        record = {"sha256": digest, "passages": len(passages)}
        (new / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build that was interrupted
        new.rename(folder)


def _rows(corpus: Path, keys: list[str]) -> Iterator[dict[str, str]]:
    """The passages in order. Raises: ConfigError with the place of the first bad one; OSError."""
    for place, row in _parquet_rows(corpus, keys) if corpus.suffix == ".parquet" else _json_rows(corpus):
        bad = [key for key in keys if not isinstance(row, dict) or not isinstance(row.get(key), str)]
        if bad:
            raise ConfigError(f"tool search: {place} has no text under {', '.join(map(repr, bad))}")
        yield row


def _json_rows(corpus: Path) -> Iterator[tuple[str, Any]]:
    with corpus.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"{corpus}:{number}", json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"tool search: {corpus}:{number} is no JSON: {error}") from None


def _parquet_rows(corpus: Path, keys: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f'tool search: {corpus} needs pyarrow: pip install "slipstream[data]"') from None
    try:
        file = parquet.ParquetFile(corpus)
        missing = sorted(set(keys) - set(file.schema_arrow.names))
        if missing:
            raise ConfigError(f"tool search: {corpus} has no column {', '.join(missing)}")
        number = 0
        for batch in file.iter_batches(columns=keys):
            for row in batch.to_pylist():
                yield f"{corpus}, row {number}", row
                number += 1
    except pyarrow.ArrowException as error:
        raise ConfigError(f"tool search: {corpus} is no parquet file: {error}") from None
