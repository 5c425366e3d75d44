"""What becomes of a run folder that is already there: refused, moved aside, or continued."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream.buffer.identity import of_config, require_same
from slipstream.configs import RunConfig
from slipstream.configs.paths import RunFolder
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.yaml_text import YamlError, read_yaml


def read_summary(folder: RunFolder) -> Any:
    """The run's figures; None as long as it isn't finished, also when a crash left half of them."""
    try:
        return json.loads(folder.summary.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def finished_problems(config: RunConfig, *, fresh: bool) -> list[str]:
    """Why the run's folder must not be used as it is: it holds a finished run."""
    folder = RunFolder.of(config)
    if fresh or read_summary(folder) is None:
        return []
    model = f"model.path={folder.export}" + (" model.build=null" if config.model.build else "")
    return [
        f"{folder.root} holds a finished run: add --fresh to move it aside and start over, "
        f"run.name=<other> to keep it (with {model} to train its model further), "
        f"or see it with `slipstream summary {folder.root}`"
    ]


def open_folder(config: RunConfig, *, fresh: bool) -> str:
    """Makes the run folder and writes the resolved configuration; returns in words what was done.

    Raises: ConfigError when that can't be done there, or the run that is there was begun with other settings.
    """
    folder = RunFolder.of(config)
    if fresh and folder.root.exists():
        aside = move_aside(folder.root)
        folder.create(config)
        return f"a fresh run in {folder.root} (the old folder is now {aside})"
    if not folder.config.exists():
        folder.create(config)
        return f"a new run in {folder.root}"
    changed = changed_keys(folder.config, config)
    folder.create(config)
    words = f"continues the unfinished run in {folder.root}"
    return f"{words}, with another {', '.join(changed)}" if changed else words


def move_aside(root: Path) -> Path:
    """Renames a folder to the first free `<name>.<n>`.

    Raises: ConfigError when that can't be done.
    """
    number = 1
    while (aside := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    try:
        return root.rename(aside)
    except OSError as error:
        raise ConfigError(f"{root} can't be renamed to {aside}: {error.strerror}; move it yourself") from None


def changed_keys(written: Path, config: RunConfig) -> list[str]:
    """Key paths whose value differs between a written configuration and `config`; none if an empty file is left of it.

    Raises: ConfigError when it is no configuration, or `config` is not one that the run can be continued with.
    """
    try:
        before = read_yaml(written.read_text(encoding="utf-8")) or {}
    except (YamlError, UnicodeDecodeError):
        before = None
    if not isinstance(before, dict):
        raise ConfigError(f"{written} is no configuration; delete it to continue the run with the one that you name")
    if not before:
        return []
    with suppress(ValidationError):  # of another release: the buffer will judge
        begun = RunConfig.model_validate(before)
        require_same(config, {**of_config(begun), "env": begun.env.name})
    flat, now = _flat(before), _flat(config.model_dump(mode="json"))
    return sorted(key for key in flat.keys() | now.keys() if flat.get(key) != now.get(key))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        leaves.update(inner)
    return leaves
