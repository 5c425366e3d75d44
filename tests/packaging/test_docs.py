"""README and docs: links, anchors, commands and keys exist."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import sections_at
from slipstream.tools.cli import COMMANDS

CHECKOUT = Path(__file__).parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.parent.name != "reference"]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = "|".join(RunConfig.model_fields)
KEY = re.compile(rf"(?<![\w/.<-])(?:{SECTIONS})(?:\.(?!md\b)[a-z_]\w*)+(?![\w/-]|\.\w)")
FILES = {"buffer.key", "learner.key", "rollout.key", "buffer.key_secret", "learner.key_secret", "rollout.key_secret"}
FILES |= {"run.json", "model.safetensors", "learner.cli"}


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(CHECKOUT)) for page in pages]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(path: str) -> bool:
    """True for a key of the schema, and for all below `options`."""
    sections: list[type[BaseModel]] = [RunConfig]
    keys = path.split(".")
    for place, key in enumerate(keys):
        if not any(key in section.model_fields for section in sections):
            return False
        if key == "options":
            return True
        sections = sections_at(key, sections)
        if not sections:
            return place == len(keys) - 1
    return True


def paths(values: Any, prefix: str = "") -> Iterator[str]:
    """The dotted paths of a YAML block."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{prefix}{key}"
            if key != "options":
                yield from paths(value, f"{prefix}{key}.")
    elif isinstance(values, list):
        for value in values:
            yield from paths(value, prefix)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_and_anchors_exist(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("page", WRITTEN, ids=names(WRITTEN))
def test_named_keys_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    refused = [text for kind, text in BLOCK.findall(text) if kind == "console" and "error:" in text]
    for block in refused:
        text = text.replace(block, "")
    named = set(KEY.findall(text)) - FILES
    blocks = [yaml.safe_load(block) for kind, block in BLOCK.findall(text) if kind == "yaml"]
    named |= {path for block in blocks for path in paths(block) if path != "extends"}
    assert sorted(path for path in named if not exists(path)) == []


@pytest.mark.parametrize("page", WRITTEN, ids=names(WRITTEN))
def test_named_commands_exist(page: Path) -> None:
    named = re.findall(r"(?:`|\$ |bin/)slipstream ([a-z]+)", page.read_text(encoding="utf-8"))
    assert set(named) <= set(COMMANDS)
