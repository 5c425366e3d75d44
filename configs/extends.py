"""A run's YAML over the one that it extends: mappings are merged, lists and single values replaced."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from slipstream.configs.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import at_home, sections_at
from slipstream.configs.schema.named import NamedSection
from slipstream.configs.schema.run import RunSection
from slipstream.configs.yaml_text import YamlError, read_yaml

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
        base = chain[-1].parent / _at_home(extended, chain[-1])
        tree = _read_file(base, wanted_by=chain[-1])
        chain.append(base)
        if base.resolve() in [path.resolve() for path in chain[:-1]]:
            raise ConfigError(f"configuration files extend each other in a circle: {' -> '.join(map(str, chain))}")
        trees.append(tree)
    merged = trees.pop()
    while trees:
        merged = _over(merged, trees.pop(), [RunConfig])
    return merged


def _at_home(extended: str, file: Path) -> Path:
    try:
        return at_home(Path(extended))
    except ValueError as error:
        raise ConfigError(f"{file}: extends {extended}: {error}") from None


def _over(base: Any, own: Any, sections: Sequence[type[BaseModel]]) -> Any:
    """One value over another at the same key, which is to hold one of `sections` (none: anything).

    A section that is chosen by its name keeps nothing of a base with another name, whose keys it may not know.
    """
    default = _default_name(sections)
    if default is not None:
        base, own = spelt_out(base, sections), spelt_out(own, sections)
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


def spelt_out(value: Any, sections: Sequence[type[BaseModel]]) -> Any:
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
