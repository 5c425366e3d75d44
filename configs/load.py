"""Loading of a run's configuration: YAML, `extends`, `key.path=value` overrides, and all mistakes at once."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slipstream.configs.foreign_keys import foreign_key
from slipstream.configs.paths import RunPaths, unwritable_error
from slipstream.configs.runtime.errors import ConfigError, suggest
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.passwords import redact
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import NamedSection, UserPath, expand_home, names_of, sections_at
from slipstream.configs.schema.learner import OptimizerConfig
from slipstream.configs.schema.run import RunSection
from slipstream.configs.yaml_text import YamlError, read_yaml, write_yaml

EXTENDS: Final = "extends"
"""The key for the path of another YAML file, relative to the file that names it."""


def read_tree(path: Path) -> dict[str, Any]:
    """The content of a YAML file, merged over that of the file it extends, and so on.

    Raises: ConfigError when one of them can't be read, or they extend each other in a circle.
    """
    chain, trees = [path], [_read_file(path)]
    while (extended := trees[-1].pop(EXTENDS, None)) is not None:
        if not isinstance(extended, str):
            raise ConfigError(f"{chain[-1]}: extends must be the path of one YAML file (given: {extended!r})")
        base = chain[-1].parent / _expand_home(extended, chain[-1])
        tree = _read_file(base, extended_by=chain[-1])
        chain.append(base)
        if base.resolve() in [path.resolve() for path in chain[:-1]]:
            raise ConfigError(f"configuration files extend each other in a circle: {' -> '.join(map(str, chain))}")
        trees.append(tree)
    merged = trees.pop()
    while trees:
        merged = _merge(merged, trees.pop(), [RunConfig])
    return merged


def _expand_home(extended: str, file: Path) -> Path:
    try:
        return expand_home(Path(extended))
    except ValueError as error:
        raise ConfigError(f"{file}: extends {extended}: {error}") from None


def _merge(base: Any, own: Any, sections: Sequence[type[BaseModel]]) -> Any:
    """Merges a value over that of the base at the same key, whose value is one of `sections` (empty: anything).

    A section with a name replaces one with another name, because it may lack its keys.
    """
    default = _default_name(sections)
    if default is not None:
        base, own = expand_name(base, sections), expand_name(own, sections)
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    if default is not None and own.get("name", base.get("name", default)) != base.get("name", default):
        return own
    merged = dict(base)
    for key, value in own.items():
        merged[key] = _merge(base[key], value, sections_at(key, sections)) if key in base else value
    return merged


def _default_name(sections: Sequence[type[BaseModel]]) -> str | None:
    """The default of the key `name`; None for sections without variants: all optimizers have the same keys."""
    names = [section.model_fields["name"].default for section in sections if "name" in section.model_fields]
    return names[0] if names and not {RunSection, OptimizerConfig} & set(sections) else None


def expand_name(value: Any, sections: Sequence[type[BaseModel]]) -> Any:
    """`{name: rloo}` for `rloo`, where the schema allows the short form."""
    is_named = bool(sections) and issubclass(sections[0], NamedSection)
    return {"name": value} if is_named and isinstance(value, str) else value


def _read_file(path: Path, *, extended_by: Path | None = None) -> dict[str, Any]:
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        suffix = f", which {extended_by} extends" if extended_by else ""
        raise ConfigError(f"there is no configuration file {path}{suffix}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not a possible path
        raise ConfigError(f"{path} can't be read: {error}") from None
    except YamlError as error:
        where = path if error.line is None else f"{path}:{error.line}"
        raise ConfigError(f"{where}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not a {type(tree).__name__}")
    return tree


_AUTO, _NUMBER = ("literal['auto']", "literal['auto','all']"), "constrained-int"
"""pydantic's names of the branches of keys that are `auto` or a number."""
_NOT_A_SECTION: Final = frozenset({"model_type", "model_attributes_type"})
_YAML_MESSAGES: Final = {
    **dict.fromkeys((*_NOT_A_SECTION, "dict_type"), "must be a mapping of keys"),
    "tuple_type": "must be a list, such as [a, b]",
    "path_type": "must be a path",
    "string_type": "must be a text; quote what else would be a number or a switch",
    "union_tag_not_found": "must have a name",
}
"""Messages in terms of YAML by type of pydantic's error, whose own are in terms of Python."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads the run's configuration.

    Args:
        path: the YAML file of the run; with `extends: other.yaml` it holds only the differences to that file.
        overrides: `key.path=value` texts, applied in order; the value is read as YAML.

    Raises: ConfigError with one line per mistake in files and overrides, passwords redacted.
    """
    try:
        return _load(path, overrides)
    except ConfigError as error:
        raise ConfigError([redact(problem) for problem in error.problems]) from None


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    tree = read_tree(path)
    return _validated(tree, [problem for text in overrides if (problem := _apply_override(tree, text))])


def _validated(tree: Mapping[str, Any], problems: Sequence[str] = ()) -> RunConfig:
    """Raises: ConfigError with the mistakes in the tree, besides those that are known already."""
    problems = list(problems)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        for detail in _one_of_each_union(error.errors(include_url=False)):
            problems.extend(_describe(detail).splitlines())  # combinations are one error with a line each
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def _carry_over(base: Any, own: Any, sections: Sequence[type[BaseModel]]) -> Any:
    """Merges as `_merge`; a section with another name keeps the keys of the one before that it has."""
    default = _default_name(sections)
    if default is not None:
        base, own = expand_name(base, sections), expand_name(own, sections)
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return own
    if default is not None and (name := own.get("name", base.get("name", default))) != base.get("name", default):
        kinds = [section for section in sections if name in names_of(section)]
        base = {key: value for key, value in base.items() if any(key in kind.model_fields for kind in kinds)}
    return base | {
        key: _carry_over(base[key], value, sections_at(key, sections)) if key in base else value
        for key, value in own.items()
    }


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A resolved configuration with some keys changed.

    A section that gets another name, such as another loss, keeps the keys of the one before that are not at their
    defaults, as far as it has them.

    Raises: ConfigError as `load_config`.
    """
    tree: dict[str, Any] = {}
    problems = [problem for text in overrides if (problem := _apply_override(tree, text))]
    if problems:
        raise ConfigError(problems)
    return _validated(_carry_over(config.model_dump(mode="json", exclude_defaults=True), tree, [RunConfig]))


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return write_yaml(config.model_dump(mode="json"))


def create_run_folder(paths: RunPaths, config: RunConfig) -> None:
    """Makes the run's folder and writes the resolved configuration into it, unless it is there already.

    Raises: ConfigError when that can't be done there.
    """
    text = dump_config(config).encode()
    try:
        paths.logs.mkdir(parents=True, exist_ok=True)
        if not paths.config.exists() or paths.config.read_bytes() != text:
            write_atomically(paths.config, [text])
    except OSError as error:
        raise unwritable_error(paths, error) from None


def _apply_override(tree: dict[str, Any], text: str) -> str | None:
    """Writes one override into `tree`; returns the problem, if there is one."""
    key_path, sign, value_text = text.partition("=")
    keys = key_path.split(".")
    if not sign or not all(keys):
        return f"override {text!r} must look like key.path=value"
    if keys == [EXTENDS]:
        return f"override {text!r}: {EXTENDS} is for files only"
    try:
        value = read_yaml(value_text)
    except YamlError as error:
        return f"override {text!r}: {error}"
    *parents, last = keys
    node = tree
    sections: list[type[BaseModel]] = [RunConfig]
    for parent in parents:
        sections = sections_at(parent, sections)
        child = expand_name(node.get(parent), sections)
        if child is None:
            child = {}
        if not isinstance(child, dict):
            what = "is a list: give the whole list" if isinstance(child, list) else "is not a section"
            return f"override {text!r}: {parent!r} {what}"
        node[parent] = child
        node = child
    node[last] = value_text.strip() if isinstance(value, bool | int | float) and _is_text(last, sections) else value
    return None


def _is_text(key: str, sections: Sequence[type[BaseModel]]) -> bool:
    """True if the key holds a text or a path: a shell removes the quotes of `run.name="123"`."""
    fields = [section.model_fields[key] for section in sections if key in section.model_fields]
    return any(field.annotation in (str, str | None, Path, UserPath | None) for field in fields)


def _one_of_each_union(details: Sequence[ErrorDetails]) -> Iterator[ErrorDetails]:
    """The errors, one where a key is `auto` or a number, of which each has its own: that of what was given."""
    for detail in details:
        *key, branch = detail["loc"] or ("",)
        if branch not in (*_AUTO, _NUMBER):
            yield detail
        elif (branch == _NUMBER) == (type(detail["input"]) in (int, float)):
            message = f"{detail['msg']} or a number" if branch in _AUTO else detail["msg"]
            yield {**detail, "loc": tuple(key), "msg": message}


def _describe(detail: ErrorDetails) -> str:
    """One validation error as `key.path: problem`."""
    location = [str(part) for part in detail["loc"]]
    sections, shown = _locate(location)
    key_path = ".".join(shown)
    if detail["type"] == "extra_forbidden":
        if answers := foreign_key(".".join(part for part in shown if not part.isdigit()), detail["input"]):
            return "\n".join(answers)
        known = sorted({name for section in sections for name in section.model_fields})
        return f"{key_path}: unknown key{suggest(location[-1], known) or '; known: ' + ', '.join(known)}"
    if detail["type"] == "union_tag_invalid":
        tags = [tag for section in sections for tag in names_of(section)]
        word = str(detail["ctx"]["tag"])
        return f"{key_path}.name: unknown {word!r}{suggest(word, tags) or '; known: ' + ', '.join(tags)}"
    message = _YAML_MESSAGES.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if detail["type"] in _NOT_A_SECTION:
        fields = sections[0].model_fields
        message += f", such as {{{'name' if 'name' in fields else next(iter(fields))}: …}}"
    if not key_path:
        return message
    return f"{key_path}: {message}{_given(detail['input'])}"


def _given(value: Any) -> str:
    if isinstance(value, Mapping):
        return ""
    if isinstance(value, bool):
        return f" (given: {str(value).lower()}; in YAML, on, yes, off and no are switches too)"
    return f" (given: {'null' if value is None else repr(value)})"


def _locate(location: Sequence[str]) -> tuple[list[type[BaseModel]], list[str]]:
    """The sections that may hold the last key of pydantic's location, and the location as a user writes it.

    pydantic adds the member of a union: `filters.0.pf_ppo.keep` is `filters.0.keep` in the file.
    """
    sections: list[type[BaseModel]] = [RunConfig]
    shown: list[str] = []
    for part in location:
        tagged = [section for section in sections if part in names_of(section)]
        if tagged:
            sections = tagged
            continue
        shown.append(part)
        sections = sections_at(part, sections) or sections  # an index into a list stays in its sections
    return sections, shown
