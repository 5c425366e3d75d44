"""Checks of the run folder, before `slipstream up` starts anything."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream.buffer.identity import config_identity, require_same_identity
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.model import ModelConfig
from slipstream.configs.schema.run import port_defaults
from slipstream.configs.yaml_text import YamlError, read_yaml
from slipstream.tools.keys import make_keys
from slipstream.tools.summary import read_summary


def finished_problems(folder: RunPaths, model: ModelConfig) -> list[str]:
    """One message if the folder holds a finished run."""
    if read_summary(folder) is None:
        return []
    trained = (
        f" (with model.path={folder.export}{' model.build=null' if model.build else ''} to train its model further)"
    )
    if model.lora is not None and model.lora.export == "adapter":
        trained = ""
    return [
        f"{folder.root} holds a finished run: add --fresh to move it aside and start over, "
        f"run.name=<other> to keep it{trained}, "
        f"or see it with `slipstream summary {folder.root}`"
    ]


def stored_problems(config: RunConfig) -> list[str]:
    """One message if an object store has checkpoints of the run, which a learner in a new folder would fetch.

    Raises: ConfigError when there is no client for the store, StoreError when it can't be read.
    """
    url = config.learner.checkpoint.upload
    if url is None:
        return []
    from slipstream.learner.upload import RunStore, stored_steps

    store = RunStore(url, run=config.run.name)
    steps = stored_steps(store)
    if not steps:
        return []
    return [
        f"--fresh: {store.url} has checkpoints of this run, of step {steps[-1]} at last, with which the learner "
        "would go on: remove them, or choose another run.name or learner.checkpoint.upload"
    ]


def prepare_folder(config: RunConfig, *, fresh: bool) -> str:
    """Makes the run folder and writes the resolved configuration; returns a description of what was done.

    Raises: ConfigError when that can't be done, or the folder holds a run that began with incompatible settings.
    """
    folder = config.paths
    if fresh and folder.root.exists():
        aside = _move_aside(folder.root)
        create_run_folder(folder, config)
        return f"a fresh run in {folder.root} (the old folder is now {aside})"
    if not folder.config.exists():
        create_run_folder(folder, config)
        return f"a new run in {folder.root}"
    before = _written_tree(folder.config)
    with suppress(ValidationError):  # written by another release: the buffer checks the identity
        if before:
            begun = RunConfig.model_validate(before)
            _require_same_trainer(begun, config)
            require_same_identity(config, {**config_identity(begun), "env": begun.env.name})
    old, new = _flat(before), _flat(config.model_dump(mode="json"))
    keys = (old.keys() | new.keys()) - {"run.port_base", *_flat(port_defaults(0))}
    changed = sorted(key for key in keys if before and old.get(key) != new.get(key))
    create_run_folder(folder, config)
    description = f"continues the unfinished run in {folder.root}"
    changes = ", ".join(f"{key} ({old.get(key)!r} before, {new.get(key)!r} now)" for key in changed)
    return f"{description}, with another {changes}" if changed else description


def _require_same_trainer(begun: RunConfig, config: RunConfig) -> None:
    """Raises: ConfigError when the run began with another kind of training, whose steps its checkpoints count."""
    before, now = begun.learner.trainer.name, config.learner.trainer.name
    if before != now:
        raise ConfigError(
            f"learner.trainer={now}: the unfinished run in {config.paths.root} is one of {before}; choose another "
            "run.name, or add --fresh to move it aside and start over"
        )


def prepare_shared_folder(config: RunConfig) -> str:
    """As `prepare_folder`, for a run on several hosts: with `security.keys` unset, keys are made in the folder.

    Raises: ConfigError, also for a finished run.
    """
    if problems := finished_problems(config.paths, config.model):
        raise ConfigError(problems)
    description = prepare_folder(config, fresh=False)
    keys = keys_folder(config)
    if config.security.keys is None and not keys.exists():
        make_keys(keys)
    return description


def keys_folder(config: RunConfig) -> Path:
    """The folder of the keys of a run on several hosts."""
    return config.security.keys or config.paths.root.absolute() / "keys"


def _move_aside(root: Path) -> Path:
    """Renames a folder to the first free `<name>.<n>`. Raises: ConfigError when that can't be done."""
    number = 1
    while (aside := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    try:
        return root.rename(aside)
    except OSError as error:
        raise ConfigError(f"{root} can't be renamed to {aside}: {error.strerror}; move it yourself") from None


def _written_tree(file: Path) -> dict[str, Any]:
    """The content of the written configuration; empty if a full disk left an empty file.

    Raises: ConfigError when the file is no configuration.
    """
    try:
        tree = read_yaml(file.read_text(encoding="utf-8")) or {}
    except (YamlError, UnicodeDecodeError):
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is no configuration; delete it to continue the run with the one that you name")
    return tree


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by their dotted key path."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        leaves.update(inner)
    return leaves
