"""Checks of a run's plug-ins: settings that its env contradicts, and code that must be the same on all servers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from slipstream.configs import RunConfig
from slipstream.configs.registry import code_fingerprint
from slipstream.configs.schema.run import ENV_SCORE, EnvConfig, RewardConfig
from slipstream.env.base import Env, gives_rewards
from slipstream.env.registry import ENVS, TOOLS
from slipstream.rewards.registry import REWARDS

_TARGET: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def plugin_code(env: EnvConfig, rewards: Sequence[RewardConfig]) -> dict[str, str]:
    """Hash of the source of each module of the run's own envs, tools and rewards, by `code of <module>`.

    Raises: ConfigError for a plug-in that is not installed.
    """
    chosen = [
        (ENVS, env.name),
        *((TOOLS, tool.name) for tool in env.tools),
        *((REWARDS, term.function or term.name) for term in rewards),
    ]
    targets = {registry.resolve(name) for registry, name in chosen if name not in registry.built_in}
    options = [env.options, *(tool.options for tool in env.tools), *(term.options for term in rewards)]
    targets.update(_targets(options))
    modules = sorted({target.partition(":")[0] for target in targets})
    fingerprints = {module: code_fingerprint(module) for module in modules}
    return {f"code of {module}": fingerprint for module, fingerprint in fingerprints.items() if fingerprint}


def _targets(value: Any) -> Iterator[str]:
    """Each `module:attribute` inside options, such as the envs of a mixture and the rewards of `by_source`."""
    match value:
        case str() if _TARGET.fullmatch(value):
            yield value
        case Mapping():
            for inner in value.values():
                yield from _targets(inner)
        case list() | tuple():
            for inner in value:
                yield from _targets(inner)


def env_problems(config: RunConfig, env: Env) -> list[str]:
    """Reasons why a run of this configuration can't train on the tasks of `env`, found before an engine starts."""
    name, problems = config.env.name, []
    if not env.size("train"):
        problems.append(f"env {name!r} has no train tasks: correct env.options")
    judged = [chosen.score for chosen in config.buffer.filters if chosen.name == "dynamic_sampling"]
    if ENV_SCORE in judged and not gives_rewards(env):
        problems.append(
            f"buffer.filters: dynamic_sampling judges the score {ENV_SCORE!r}, but env {name!r} has no sessions; name "
            "a reward term"
        )
    overlong, most = config.rollout.overlong, config.rollout.sampling.max_tokens
    if overlong is not None and overlong.cache_tokens > most and not gives_rewards(env):
        problems.append(
            f"rollout.overlong.cache_tokens={overlong.cache_tokens} is more than rollout.sampling.max_tokens={most}, "
            f"and episodes of env {name!r} have one answer; lower it"
        )
    if gives_rewards(env) and any(term.name == ENV_SCORE for term in config.rewards):
        problems.append(
            f"rewards: the name {ENV_SCORE!r} is taken by what the sessions of env {name!r} give; name the term "
            "otherwise"
        )
    return problems
