"""The reference of configuration keys and metrics: pages in Markdown, and keys on the terminal (`slipstream config`).

`python -m slipstream.tools.reference` writes the pages.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from inspect import cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.configs.runtime.errors import ConfigError, suggest
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import PluginSection, sections_in
from slipstream.learner.metrics.catalog import CATALOG, Metric

FOLDER = Path("docs/reference")
_CONFIGURATION = """\
# Configuration

All keys of a run file, generated from the schema by `python -m slipstream.tools.reference`. `null` switches an optional
key off. On the command line a key is `section.key=value`.
"""
_METRICS = """\
# Metrics

All metrics, generated from their catalogue by `python -m slipstream.tools.reference`. `metrics.jsonl` has one JSON
record per step and evaluation, `summary.json` is written at the end of the run. Means are over actions (generated
tokens) unless said otherwise, versions are policy versions, logarithms are natural. `<part>` in a name stands for any
text.
"""
_KINDS = {"step": "Steps", "eval": "Evaluations", "summary": "Summary"}
_WORDS = {int: "int", float: "float", bool: "bool", str: "text", Path: "path", dict: "mapping", NoneType: "null"}
_SECONDS = {"> 0", "≤ 1000000.0"}
"""The bounds of `configs.schema.base.Seconds`."""
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Attributes:
        default: as in the table; empty for a section.
        variants: names of the variants that have the key; empty where there is one kind of section.
    """

    name: str
    field: FieldInfo
    default: str
    variants: tuple[str, ...] = ()


def pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    configuration = "".join(_section(name, field) for name, field in RunConfig.model_fields.items())
    metrics = "".join(_metrics(_KINDS[kind], metrics) for kind, metrics in CATALOG.items())
    return {"configuration.md": _CONFIGURATION + configuration, "metrics.md": _METRICS + metrics}


@dataclass(frozen=True)
class Description:
    """One key as a user writes it.

    Attributes:
        path: dotted; the keys of a list's entries follow the list's own path.
        default: as JSON, or `required`.
        variants: names of the variants of its section that have it; empty where all have it.
    """

    path: str
    type: str
    default: str
    variants: tuple[str, ...]
    meaning: str


def descriptions() -> list[Description]:
    """All keys that are no sections, in the order of the schema."""
    return [key for name, field in RunConfig.model_fields.items() for key in _descriptions(name, field)]


def _descriptions(path: str, field: FieldInfo) -> Iterator[Description]:
    sections = sections_in(field.annotation)
    if len(sections) > 1:
        chosen = getattr(field.default, "name", sections[0].model_fields["name"].default)
        default = "required" if chosen is PydanticUndefined else json.dumps(chosen)
        meaning = _plain(field.description) or "Chooses the function; the other keys are its arguments."
        yield Description(f"{path}.name", " or ".join(map(_name, sections)), default, (), meaning)
    for key in _keys(sections, field.default):
        inner = f"{path}.{key.name}"
        if sections_in(key.field.annotation):
            yield from _descriptions(inner, key.field)
        else:
            variants = key.variants if len(key.variants) < len(sections) else ()
            default = key.default.strip("`")
            yield Description(inner, _type(key.field), default, variants, _plain(key.field.description))


def count_keys() -> int:
    """Number of distinct key paths that are no sections; a key that several variants share counts once."""
    return len({path for name, field in RunConfig.model_fields.items() for path in _paths(name, field)})


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream config`; returns 0. Raises: ConfigError for an unknown key."""
    parser = argparse.ArgumentParser(
        prog="slipstream config", description="List the keys of a run's configuration with their types and defaults."
    )
    parser.add_argument("--key", metavar="KEY", help="only this key, or the keys of this section, such as learner.loss")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args(argv)
    selected = _selected(descriptions(), arguments.key)
    if arguments.json:
        print(json.dumps([asdict(key) for key in selected], indent=2, ensure_ascii=False))
        return 0
    for key in selected:
        of = f", of {', '.join(key.variants)}" if key.variants else ""
        default = key.default if key.default == "required" else f"default {key.default}"
        print(f"{key.path}  ({key.type}, {default}{of})")
        print(textwrap.fill(key.meaning, 100, initial_indent="    ", subsequent_indent="    "))
    return 0


def _selected(keys: Sequence[Description], wanted: str | None) -> Sequence[Description]:
    """Raises: ConfigError."""
    found = [key for key in keys if wanted is None or f"{key.path}.".startswith(f"{wanted}.")]
    if not found:
        paths = [key.path for key in keys]
        parts = sorted({*paths, *(path.rpartition(".")[0] for path in paths)})
        raise ConfigError(f"--key {wanted}: there is no such key{suggest(str(wanted), parts)}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: writes all pages into the checkout in the working directory."""
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.tools.reference",
        description=f"Write the reference of configuration keys and metrics into {FOLDER} of the working directory.",
    )
    parser.parse_args(argv)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{FOLDER}: {count_keys()} keys\n")


def _metrics(title: str, metrics: Iterable[Metric]) -> str:
    rows = [
        f"| {', '.join(f'`{name}`' for name in metric.names)} | {metric.unit} | {_prose(metric.meaning)} |"
        for metric in metrics
    ]
    return "\n".join([f"\n## {title}\n", "| metric | unit | |", "|---|---|---|", *rows]) + "\n"


def _paths(path: str, field: FieldInfo) -> Iterator[str]:
    sections = sections_in(field.annotation)
    if not sections:
        yield path
    for section in sections:
        for name, inner in section.model_fields.items():
            yield from _paths(f"{path}.{name}", inner)


def _section(path: str, field: FieldInfo) -> str:
    sections = sections_in(field.annotation)
    several = " (list)" if get_origin(field.annotation) is tuple else ""
    optional = " (optional)" if field.default is None else ""
    text = f"\n{'#' * min(4, path.count('.') + 2)} {path}{several}{optional}\n\n"
    if len(sections) == 1:
        text += f"{_prose(sections[0].__doc__)}\n\n"
    else:
        text += (f"{_prose(field.description)}\n\n" if field.description else "") + _variants(sections)
    keys = _keys(sections, field.default)
    if leaves := [key for key in keys if not sections_in(key.field.annotation)]:
        text += _table(leaves, len(sections))
    return text + "".join(_section(f"{path}.{key.name}", key.field) for key in keys if key not in leaves)


def _keys(sections: Sequence[type[BaseModel]], given: object) -> list[Key]:
    """Keys of all variants; one entry for those that several variants share. `given`: the default of the section."""
    if len(sections) == 1:
        values = given if isinstance(given, BaseModel) else None
        return [Key(name, field, _default(field, values, name)) for name, field in sections[0].model_fields.items()]
    found: dict[tuple[str, str], Key] = {}
    for section in sections:
        for name, field in section.model_fields.items():
            if name != "name":  # the variants have a table of their own
                default = _default(field, None, name)
                same = (name, f"{_type(field)} {default} {field.description}")
                before = found.get(same, Key(name, field, default))
                found[same] = Key(name, field, default, (*before.variants, _name(section)))
    return list(found.values())


def _name(section: type[BaseModel]) -> str:
    if issubclass(section, PluginSection):
        return "plug-in"
    return str(get_args(section.model_fields["name"].annotation)[0])


def _variants(sections: Sequence[type[BaseModel]]) -> str:
    rows = [f"| {_name(section)} | {_prose(section.__doc__)} |" for section in sections]
    return "\n".join(["| name | |", "|---|---|", *rows]) + "\n\n"


def _table(keys: Iterable[Key], variants: int) -> str:
    rows = []
    for key in keys:
        of = f"Of {', '.join(key.variants)}. " if 0 < len(key.variants) < variants else ""
        cells = f"`{key.name}`", _type(key.field), key.default, of + _prose(key.field.description)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]) + "\n"


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, kind)}"
        for bound in field.metadata
        for kind, sign in _BOUNDS.items()
        if getattr(bound, kind, None) is not None
    ]
    kind = _words(field.annotation)
    if set(bounds) >= _SECONDS:
        kind, bounds = "seconds", [bound for bound in bounds if bound not in _SECONDS]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is tuple:
        inner = [argument for argument in arguments if argument is not ...]
        return f"list of {_words(inner[0])}" if ... in arguments else f"[{', '.join(map(_words, inner))}]"
    if hasattr(annotation, "__metadata__"):
        return _words(arguments[0])
    return _WORDS.get(origin or annotation, str(annotation))


def _default(field: FieldInfo, values: BaseModel | None, name: str) -> str:
    """The default of a key, or its value in the default of its section."""
    if sections_in(field.annotation):
        return ""
    if field.default_factory is not None:
        return "`{}`"
    value = field.default if values is None else getattr(values, name)
    return "required" if value is PydanticUndefined else f"`{json.dumps(value, default=str, ensure_ascii=False)}`"


def _prose(text: str | None) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str | None) -> str:
    return " ".join(cleandoc(text or "").split())


if __name__ == "__main__":
    main()
