"""Builds the env that a configuration names."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.configs.plugins import find_plugin
from slipstream.configs.runtime.errors import ConfigError, format_error_with_location
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.base import LONGEST_FINGERPRINT, MOST_TASKS, Env, Split
from slipstream.env.builtin.digits import Digits
from slipstream.env.builtin.jsonl import Rows

BUILT_IN = {"digits": Digits, "jsonl": Rows}

_METHODS = ("size", "task", "fingerprint")
_SPLITS: tuple[Split, ...] = ("train", "eval")


def build_env(config: EnvConfig) -> Env:
    """The env `config.name`, made with `config.options`.

    Raises: ConfigError for an unknown name, options the factory does not take, a result that is no Env, or one of more
        than `MOST_TASKS` tasks, or without a fingerprint of its tasks, and for whatever factory and env raise.
    """
    factory = find_plugin("env", config.name, BUILT_IN)
    if not callable(factory):
        raise ConfigError(
            f"env {config.name!r} is a {type(factory).__name__}; name a class or function that makes an Env"
        )
    _check_options(config, factory)
    with _plugin_errors(config, factory):
        env: Env = factory(**config.options)
    missing = [method for method in _METHODS if not callable(getattr(env, method, None))]
    if missing:
        raise ConfigError(
            f"env {config.name!r} made a {type(env).__name__} without the method {', '.join(missing)}; "
            "an Env has size(split), task(split, index) and fingerprint()"
        )
    with _plugin_errors(config, factory):
        for split in _SPLITS:
            _check_size(config, split, env.size(split))
        _check_fingerprint(config, env.fingerprint())
    return env


@contextmanager
def _plugin_errors(config: EnvConfig, factory: Any) -> Iterator[None]:
    """Around user code, which may raise anything. Raises: ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything, a sys.exit() too
        where = getattr(factory, "__module__", "")
        raise ConfigError(
            f"env {config.name!r} with env.options={config.options}: {format_error_with_location(error, where)}"
        ) from error


def _check_size(config: EnvConfig, split: Split, size: object) -> None:
    if not isinstance(size, int) or not 0 <= size <= MOST_TASKS:
        raise ConfigError(
            f"env {config.name!r} has size({split!r})={size!r}; it must be a whole number from 0 to {MOST_TASKS}"
        )


def _check_fingerprint(config: EnvConfig, fingerprint: object) -> None:
    if not isinstance(fingerprint, str):
        raise ConfigError(f"env {config.name!r} has fingerprint()={repr(fingerprint)[:200]}; it must be a text")
    if len(fingerprint) > LONGEST_FINGERPRINT:
        raise ConfigError(
            f"env {config.name!r} has a fingerprint() of {len(fingerprint)} characters, more than "
            f"{LONGEST_FINGERPRINT}; return its hash, such as hashlib.sha256(text.encode()).hexdigest()"
        )


def _check_options(config: EnvConfig, factory: Any) -> None:
    """Before the call: a TypeError from inside the factory is no wrong option."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some built-in callables have none; the call itself decides
        return
    try:
        signature.bind(**config.options)
    except TypeError as error:
        by_name = [
            name
            for name, each in signature.parameters.items()
            if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        ]
        raise ConfigError(
            f"env.options of {config.name!r}: {error}; it accepts {', '.join(by_name) or 'no options'}"
        ) from None
