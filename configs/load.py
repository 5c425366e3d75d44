"""Reads a run's YAML, applies `key.path=value` overrides, and reports every mistake at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slipstream.configs.paths import RunPaths, unwritable_error
from slipstream.configs.runtime.errors import ConfigError, suggest
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.passwords import redact
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import PLUGIN, NamedSection, PluginSection, UserPath, expand_home, sections_at
from slipstream.configs.schema.run import RunSection
from slipstream.configs.yaml_text import YamlError, read_yaml, write_yaml

EXTENDS: Final = "extends"
"""The key for the path of another YAML file, relative to the file that names it."""


def read_tree(path: Path) -> dict[str, Any]:
    """What a YAML file says, over what the file says that it extends, and so on.

    Raises: ConfigError when one of them can't be read, or they extend each other in a circle.
    """
    chain, trees = [path], [_read_file(path)]
    while (extended := trees[-1].pop(EXTENDS, None)) is not None:
        if not isinstance(extended, str):
            raise ConfigError(f"{chain[-1]}: extends must be the path of one YAML file (given: {extended!r})")
        base = chain[-1].parent / _expand_home(extended, chain[-1])
        tree = _read_file(base, wanted_by=chain[-1])
        chain.append(base)
        if base.resolve() in [path.resolve() for path in chain[:-1]]:
            raise ConfigError(f"configuration files extend each other in a circle: {' -> '.join(map(str, chain))}")
        trees.append(tree)
    merged = trees.pop()
    while trees:
        merged = _over(merged, trees.pop(), [RunConfig])
    return merged


def _expand_home(extended: str, file: Path) -> Path:
    try:
        return expand_home(Path(extended))
    except ValueError as error:
        raise ConfigError(f"{file}: extends {extended}: {error}") from None


def _over(base: Any, own: Any, sections: Sequence[type[BaseModel]]) -> Any:
    """One value over another at the same key, which is to hold one of `sections` (none: anything).

    A section that is chosen by its name keeps nothing of a base with another name, whose keys it may not know.
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
        merged[key] = _over(base[key], value, sections_at(key, sections)) if key in base else value
    return merged


def _default_name(sections: Sequence[type[BaseModel]]) -> str | None:
    """The name of a section that gives none; None if the sections are not chosen by name, as the run's is not."""
    names = [section.model_fields["name"].default for section in sections if "name" in section.model_fields]
    return names[0] if names and RunSection not in sections else None


def expand_name(value: Any, sections: Sequence[type[BaseModel]]) -> Any:
    """`{name: rloo}` for `rloo`, where that may stand for it."""
    may_be_a_name = bool(sections) and issubclass(sections[0], NamedSection)
    return {"name": value} if may_be_a_name and isinstance(value, str) else value


def _read_file(path: Path, *, wanted_by: Path | None = None) -> dict[str, Any]:
    try:
        tree = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        wanting = f", which {wanted_by} extends" if wanted_by else ""
        raise ConfigError(f"there is no configuration file {path}{wanting}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:  # it is no UTF-8, or no path of a file
        raise ConfigError(f"{path} can't be read: {error}") from None
    except YamlError as error:
        where = path if error.line is None else f"{path}:{error.line}"
        raise ConfigError(f"{where}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not a {type(tree).__name__}")
    return tree


_NO_SECTION: Final = frozenset({"model_type", "model_attributes_type"})
_IN_YAML: Final = {
    **dict.fromkeys((*_NO_SECTION, "dict_type"), "must be a mapping of keys"),
    "tuple_type": "must be a list, such as [a, b]",
    "path_type": "must be a path",
    "string_type": "must be a text; quote what else would be a number or a switch",
    "union_tag_not_found": "must have a name",
}
"""What pydantic says in the words of Python, by its kind of error."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run's configuration.

    Args:
        path: the YAML file of the run; with `extends: other.yaml` it holds only what differs from that file.
        overrides: `key.path=value` texts, applied in order; the value is read as YAML.

    Raises: ConfigError, with one line for each mistake in the file and in the overrides, and no password in any.
    """
    try:
        return _load(path, overrides)
    except ConfigError as error:
        raise ConfigError([redact(problem) for problem in error.problems]) from None


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    tree = read_tree(path)
    problems = [problem for text in overrides if (problem := _apply_override(tree, text))]
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
    """Writes one override into `tree`; returns what is wrong with it, if anything is."""
    key_path, sign, value_text = text.partition("=")
    keys = key_path.split(".")
    if not sign or not all(keys):
        return f"override {text!r} must look like key.path=value"
    if keys == [EXTENDS]:
        return f"override {text!r}: {EXTENDS} stands in the file alone"
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
            what = "is a list: give it whole" if isinstance(child, list) else "is not a section"
            return f"override {text!r}: {parent!r} {what}"
        node[parent] = child
        node = child
    node[last] = value_text.strip() if isinstance(value, bool | int | float) and _is_text(last, sections) else value
    return None


def _is_text(key: str, sections: Sequence[type[BaseModel]]) -> bool:
    """Whether the key's value is a text or a path: of `run.name="123"` a shell leaves no quotes."""
    fields = [section.model_fields[key] for section in sections if key in section.model_fields]
    return any(field.annotation in (str, str | None, Path, UserPath | None) for field in fields)


def _describe(detail: ErrorDetails) -> str:
    """One validation error as `key.path: what is wrong`."""
    location = [str(part) for part in detail["loc"]]
    sections, shown = _follow(location)
    key_path = ".".join(shown)
    if detail["type"] == "extra_forbidden":
        known = sorted({name for section in sections for name in section.model_fields})
        return f"{key_path}: unknown key{suggest(location[-1], known) or '; known: ' + ', '.join(known)}"
    if detail["type"] == "union_tag_invalid":
        tags = [tag for section in sections for tag in _tags(section)]
        word = str(detail["ctx"]["tag"])
        return f"{key_path}.name: unknown {word!r}{suggest(word, tags) or '; known: ' + ', '.join(tags)}"
    message = _IN_YAML.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    if detail["type"] in _NO_SECTION:
        fields = sections[0].model_fields
        message += f", such as {{{'name' if 'name' in fields else next(iter(fields))}: …}}"
    if not key_path:
        return message
    return f"{key_path}: {message}{_given(detail['input'])}"


def _given(value: Any) -> str:
    if isinstance(value, Mapping):
        return ""
    if isinstance(value, bool):
        return f" (given: {str(value).lower()}; YAML reads on, yes, off and no so, too)"
    return f" (given: {'null' if value is None else repr(value)})"


def _follow(location: Sequence[str]) -> tuple[list[type[BaseModel]], list[str]]:
    """The sections that the last key of a location may be in, and the location as a user writes it.

    pydantic names the member of a union in between: `filters.0.pf_ppo.keep` is `filters.0.keep`.
    """
    sections: list[type[BaseModel]] = [RunConfig]
    shown: list[str] = []
    for part in location:
        tagged = [section for section in sections if part in _tags(section)]
        if tagged:
            sections = tagged
            continue
        shown.append(part)
        sections = sections_at(part, sections) or sections  # an index into a list stays in its sections
    return sections, shown


def _tags(section: type[BaseModel]) -> tuple[str, ...]:
    """What the key `name` may be, for a section that is chosen by it."""
    field = section.model_fields.get("name")
    if field is not None and get_origin(field.annotation) is Literal:
        return get_args(field.annotation)
    return (PLUGIN,) if issubclass(section, PluginSection) else ()
