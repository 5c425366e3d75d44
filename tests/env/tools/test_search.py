"""Search in a corpus: results, the index on disk, bad corpora."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.tools import search
from slipstream.env.tools.search import Search

ROWS = [
    {"title": "Ulm", "text": "Ulm is a city on the Danube; its minster has the tallest steeple."},
    {"title": "Bonn", "text": "Bonn is a city on the Rhine, where Beethoven was born."},
    {"title": "Vitamin C", "text": "An acid in lemons."},
    {"title": "Rhine", "text": "The Rhine is a river that flows through Bonn and Cologne."},
]


def written(path: Path, rows: list[Any] = ROWS) -> Path:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


async def found(box: Search, query: str) -> str:
    return await box.tools[0].call({"query": query})


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.parquet"])
async def test_best_passages_come_first(tmp_path: Path, name: str) -> None:
    box = Search(str(written(tmp_path / name)), title_key="title", top_k=2, cache=str(tmp_path))
    result = await found(box, "Which river flows through Bonn?")
    assert result.startswith("[1] Rhine\nThe Rhine is a river")
    assert result.count("[2] Bonn\n") == 1
    assert "[3]" not in result
    assert (await found(box, "vitamin c")).startswith("[1] Vitamin C\n")


@pytest.mark.parametrize("query", ["", "?!", "zebra", "the"])
async def test_query_without_a_known_word_finds_nothing(tmp_path: Path, query: str) -> None:
    box = Search(str(written(tmp_path / "corpus.jsonl")), top_k=99, cache=str(tmp_path))
    assert "[1]" not in await found(box, query)


async def test_index_is_built_once_for_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    build = search._build

    def counted(corpus: Path, *rest: Any) -> None:
        built.append(corpus)
        build(corpus, *rest)

    monkeypatch.setattr(search, "_build", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = written(tmp_path / "corpus.jsonl")
    boxes = [Search(str(corpus)) for _ in range(2)]
    assert len(built) == 1
    assert boxes[0].fingerprint == boxes[1].fingerprint
    written(corpus, ROWS[:2])
    os.utime(corpus, ns=(0, 0))
    other = Search(str(corpus))
    assert (len(built), other.fingerprint == boxes[0].fingerprint) == (2, False)
    assert "Vitamin" not in await found(other, "acid in lemons")
    assert "acid" in await found(boxes[0], "acid in lemons")
    assert list((tmp_path / "slipstream" / "search").glob("*/record.json"))


async def test_interrupted_build_is_repeated(tmp_path: Path) -> None:
    corpus = written(tmp_path / "corpus.jsonl")
    Search(str(corpus), cache=str(tmp_path / "cache"))
    (record,) = (tmp_path / "cache").glob("*/record.json")
    record.unlink()
    assert "Rhine" in await found(Search(str(corpus), cache=str(tmp_path / "cache")), "river")


@pytest.mark.parametrize(
    ("rows", "options", "part"),
    [
        ([], {}, "no passages"),
        ([*ROWS, "{"], {}, "corpus.jsonl:5"),
        ([*ROWS, {"text": 3}], {}, "corpus.jsonl:5"),
        ([*ROWS, "[]"], {}, "corpus.jsonl:5"),
        (ROWS, {"text_key": "body"}, "'body'"),
        (ROWS, {"top_k": 0}, "top_k=0"),
    ],
    ids=["empty", "no JSON", "no text", "no object", "key", "top_k"],
)
def test_unusable_corpus_is_refused(tmp_path: Path, rows: list[Any], options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        Search(str(written(tmp_path / "corpus.jsonl", rows)), cache=str(tmp_path / "cache"), **options)


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        Search(str(tmp_path / "none.jsonl"), cache=str(tmp_path))
    with pytest.raises(ConfigError, match="body"):
        Search(str(written(tmp_path / "corpus.parquet")), text_key="body", cache=str(tmp_path))
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"bad\.parquet"):
        Search(str(tmp_path / "bad.parquet"), cache=str(tmp_path))
