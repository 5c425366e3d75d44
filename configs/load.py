"""Reads a run's YAML, applies `key.path=value` overrides, and reports every mistake at once."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slipstream.configs.errors import ConfigError
from slipstream.configs.passwords import redacted
from slipstream.configs.schema import RunConfig


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run's configuration.

    Args:
        path: the YAML file of the run.
        overrides: `key.path=value` texts, applied in order; the value is read as YAML.

    Raises: ConfigError, with one line for each mistake in the file and in the overrides, and no password in any.
    """
    try:
        return _load(path, overrides)
    except ConfigError as error:
        raise ConfigError([redacted(problem) for problem in error.problems]) from None


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    problems: list[str] = []
    tree = _read_yaml(path)
    for text in overrides:
        problem = _apply_override(tree, text)
        if problem:
            problems.append(problem)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            problems.extend(_describe(detail).splitlines())  # combinations come as one error with a line each
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def closest(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)`, or an empty text when nothing is close."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not a {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], text: str) -> str | None:
    """Writes one override into `tree`; returns what is wrong with it, if anything is."""
    key_path, sign, value_text = text.partition("=")
    if not sign or not key_path:
        return f"override {text!r} must look like key.path=value"
    try:
        value = yaml.safe_load(value_text)
    except yaml.YAMLError:
        return f"override {text!r}: the value is not valid YAML"
    *parents, last = key_path.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            return f"override {text!r}: {parent!r} is not a section"
        node = child
    node[last] = value
    return None


def _describe(detail: ErrorDetails) -> str:
    """One validation error as `key.path: what is wrong`."""
    location = [str(part) for part in detail["loc"]]
    key_path = ".".join(location)
    if detail["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        return f"{key_path}: unknown key{closest(location[-1], known) or '; known: ' + ', '.join(known)}"
    message = detail["msg"].removeprefix("Value error, ")
    if not key_path:
        return message
    given = "" if isinstance(detail["input"], Mapping) else f" (given: {detail['input']!r})"
    return f"{key_path}: {message}{given}"


def _known_keys(section_path: Sequence[str]) -> list[str]:
    """Keys of the section at `section_path`, following models through lists and unions."""
    model: type[BaseModel] = RunConfig
    for part in section_path:
        field = model.model_fields.get(part)
        if field is None:  # an index into a list of sections
            continue
        inner = _section_in(field.annotation)
        if inner is not None:
            model = inner
    return list(model.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        inner = _section_in(argument)
        if inner is not None:
            return inner
    return None
