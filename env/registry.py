"""Builds the env that a configuration names, and its tools."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pydantic import ValidationError

from slipstream.configs.registry import Registry
from slipstream.configs.runtime.errors import ConfigError, format_error_with_location, suggest
from slipstream.configs.schema.run import EnvConfig, MixedEnvConfig, ToolConfig
from slipstream.env.base import LONGEST_FINGERPRINT, MOST_TASKS, Env, Split, gives_rewards, has_sessions, runs_agents
from slipstream.env.builtin.agent import AgentTasks, Command, RunAgent, checked_command, in_threads, rewards_by_code
from slipstream.env.builtin.mix import Mix, MixWithSessions, Part
from slipstream.env.tools.schema import SharedTools, Tool, Toolbox
from slipstream.env.tools.session import LimitedToolbox, ToolEnv


def mixed(envs: Sequence[Mapping[str, Any]]) -> Mix:
    """The env `mix` of the envs with these configurations. Raises: ConfigError."""
    configs = [MixedEnvConfig.model_validate(each) for each in envs]
    labels = Counter(config.label or config.name for config in configs)
    twice = sorted(label for label, count in labels.items() if count > 1)
    if twice:
        raise ConfigError(f"env mix: more than one env has the label {', '.join(twice)}; give each a label of its own")
    parts = [Part(config.label or config.name, build_env(config), config.weight) for config in configs]
    if any(runs_agents(part.env) for part in parts):
        raise ConfigError("env mix: agents play no part of a mixture; make the mixture the tasks of env agent")
    return MixWithSessions(parts) if any(has_sessions(part.env) for part in parts) else Mix(parts)


def agents(
    tasks: Mapping[str, Any],
    command: Sequence[str] | None = None,
    function: str | None = None,
    exit_rewards: Mapping[Any, Any] | None = None,
    needs_reward: bool = True,
    concurrency: int = 16,
) -> AgentTasks:
    """The env `agent`: the tasks of the env with the configuration `tasks`, played by a command or a function
    (`module:attribute`), or by agents that open their sessions themselves. Raises: ConfigError.
    """
    config = EnvConfig.model_validate(tasks)
    if command is not None and function is not None:
        raise ConfigError("env agent: give command or function, not both; with neither agents come from outside")
    program = None if command is None else checked_command("agent", command)
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigError(f"env agent: concurrency={concurrency!r} must be a whole number from 1")
    run: RunAgent | None = None
    if program is not None:
        run = Command(program, concurrency=concurrency, rewards=rewards_by_code(exit_rewards))
    elif function is not None:
        found = AGENTS.load(function)
        run = found if inspect.iscoroutinefunction(found) else in_threads(found, concurrency=concurrency)
    elif exit_rewards is not None:
        raise ConfigError("env agent: exit_rewards are those of a command; give one")
    identity = [command, function, exit_rewards, needs_reward]
    return AgentTasks(build_env(config), run, identity=identity, needs_reward=needs_reward)


AGENTS: Final = Registry("agent", {})
ENVS: Final = Registry(
    "env",
    {
        "agent": f"{__name__}:agents",
        "colours": "slipstream.env.builtin.colours:Colours",
        "digits": "slipstream.env.builtin.digits:Digits",
        "gymnasium": "slipstream.env.adapters.gymnasium:Gymnasium",
        "harbor": "slipstream.env.adapters.harbor.env:Harbor",
        "lookup": "slipstream.env.builtin.lookup:Lookup",
        "mix": f"{__name__}:mixed",
        "openenv": "slipstream.env.adapters.openenv:OpenEnv",
        "reasoning_gym": "slipstream.env.adapters.reasoning_gym:ReasoningGym",
        "rows": "slipstream.env.builtin.rows:Rows",
        "skyrl_gym": "slipstream.env.adapters.skyrl_gym:SkyrlGym",
        "textarena": "slipstream.env.adapters.textarena:Textarena",
        "verifiers": "slipstream.env.adapters.verifiers:Verifiers",
    },
)
TOOLS: Final = Registry(
    "tool",
    {
        "calculator": "slipstream.env.tools.calculator:calculator",
        "mcp": "slipstream.env.tools.mcp:Mcp",
        "python": "slipstream.env.tools.python:Python",
        "search": "slipstream.env.tools.search:Search",
    },
)

_OPTIONS = {"env": "env.options", "tool": "env.tools, options"}
_METHODS = ("size", "task", "fingerprint")
_OF_AGENTS = ("from_outside", "needs_reward")
_SPLITS: tuple[Split, ...] = ("train", "eval")


def env_factory(name: str) -> Callable[..., Any]:
    """The class or function that makes an env. Raises: ConfigError when there is none."""
    factory = ENVS.load(name)
    if not callable(factory):
        raise ConfigError(f"env {name!r} is a {type(factory).__name__}; name a class or function that makes an Env")
    found: Callable[..., Any] = factory
    return found


def check_env_options(config: EnvConfig) -> None:
    """Checks name and options of an env, which is not made. Raises: ConfigError."""
    _check_options("env", config.name, env_factory(config.name), config.options)


def build_env(config: EnvConfig) -> Env:
    """The env `config.name`, made with `config.options`, with `config.tools`.

    Raises: ConfigError for an unknown name, options the factory does not take, a result that is no Env, or one of more
        than `MOST_TASKS` tasks, or without a fingerprint of its tasks, for tools that can't be used, and for whatever
        factory and env raise.
    """
    factory = env_factory(config.name)
    env: Env = _made("env", config.name, factory, config.options)
    missing = [method for method in _METHODS if not callable(getattr(env, method, None))]
    if missing:
        raise ConfigError(
            f"env {config.name!r} made a {type(env).__name__} without the method {', '.join(missing)}; "
            "an Env has size(split), task(split, index) and fingerprint()"
        )
    if runs_agents(env) and (lacking := [name for name in _OF_AGENTS if not hasattr(env, name)]):
        raise ConfigError(
            f"env {config.name!r} made a {type(env).__name__} with run_agent, but without {' and '.join(lacking)}; see "
            "AgentEnv in env/base.py"
        )
    with _plugin_errors("env", config.name, factory, config.options):
        for split in _SPLITS:
            _check_size(config, split, env.size(split))
        _check_fingerprint(config, env.fingerprint())
    return add_tools(env, config)


def add_tools(env: Env, config: EnvConfig) -> Env:
    """The env with the tools `config.tools`. Raises: ConfigError for tools that can't be used."""
    if not config.tools:
        return env
    if gives_rewards(env):
        raise ConfigError(
            f"env.tools: env {config.name!r} has sessions or agents, which run their own tools; remove env.tools"
        )
    return ToolEnv(env, build_tools(config.tools))


def build_tools(configs: tuple[ToolConfig, ...]) -> list[LimitedToolbox]:
    """The tools in order. Raises: ConfigError for one that can't be used, and for two of the same name."""
    toolboxes = [LimitedToolbox(_toolbox(config), config) for config in configs]
    names = Counter(limited.tool.name for toolbox in toolboxes for limited in toolbox.tools)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise ConfigError(f"env.tools: more than one tool has the name {', '.join(twice)}; each needs one of its own")
    return toolboxes


def _toolbox(config: ToolConfig) -> Toolbox:
    """A class is made with the options; a function, or a Tool, is the tool itself. Raises: ConfigError."""
    found = TOOLS.load(config.name)
    if isinstance(found, type):
        found = _made("tool", config.name, found, config.options)
    elif config.options:
        raise ConfigError(f"env.tools: {config.name!r} is a {type(found).__name__}, which has no options")
    if isinstance(found, Tool):
        return SharedTools([found])
    if hasattr(found, "tools") and callable(getattr(found, "open", None)):
        toolbox: Toolbox = found
        return toolbox
    if not callable(found):
        raise ConfigError(f"env.tools: {config.name!r} is a {type(found).__name__}; name a function, a Tool or a class")
    return SharedTools([Tool.from_function(found)], resumable=bool(getattr(found, "resumable", False)))


def _made(kind: str, name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """The result of the factory for the options. Raises: ConfigError for wrong options, and whatever it raises."""
    _check_options(kind, name, factory, options)
    with _plugin_errors(kind, name, factory, options):
        return factory(**options)


@contextmanager
def _plugin_errors(kind: str, name: str, factory: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Around user code, which may raise anything. Raises: ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except ValidationError as error:  # of a configuration within the options
        problems = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        raise ConfigError([f"{kind} {name!r}, {key}: {problem}" for key, problem in problems]) from None
    except (Exception, SystemExit) as error:  # user code may raise anything, a sys.exit() too
        where = getattr(factory, "__module__", "")
        raise ConfigError(
            f"{kind} {name!r} with {_OPTIONS[kind]}={options}: {format_error_with_location(error, where)}"
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


def _check_options(kind: str, name: str, factory: Any, options: Mapping[str, Any]) -> None:
    """Before the call: a TypeError from inside the factory is no wrong option."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some built-in callables have none; the call itself decides
        return
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    known = [option for option, each in signature.parameters.items() if each.kind not in variadic]
    accepts = f"it accepts {', '.join(known) or 'no options'}"
    if not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        # First of all: a misspelt option may be the one that seems to be missing.
        unknown = [
            f"there is no option {option!r}{suggest(option, known)}" for option in options if option not in known
        ]
        if unknown:
            raise ConfigError(f"{_OPTIONS[kind]} of {name!r}: {', '.join(unknown)}; {accepts}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"{_OPTIONS[kind]} of {name!r}: {error}; {accepts}") from None
