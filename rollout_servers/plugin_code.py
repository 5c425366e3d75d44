"""The code of a run's plug-ins, which must be the same on all rollout servers."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from slipstream.configs import RunConfig
from slipstream.configs.registry import code_fingerprint
from slipstream.env.registry import ENVS, TOOLS
from slipstream.rewards.registry import REWARDS

_TARGET: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def plugin_code(config: RunConfig) -> dict[str, str]:
    """Hash of the source of each module of the run's own envs, tools and rewards, by `code of <module>`.

    Raises: ConfigError for a plug-in that is not installed.
    """
    rewards = (*config.rewards, *config.evaluated)
    chosen = [
        (ENVS, config.env.name),
        *((TOOLS, tool.name) for tool in config.env.tools),
        *((REWARDS, term.function or term.name) for term in rewards),
    ]
    targets = {registry.resolve(name) for registry, name in chosen if name not in registry.built_in}
    options = [config.env.options, *(tool.options for tool in config.env.tools), *(term.options for term in rewards)]
    targets.update(_targets(options))
    found = {target: code_fingerprint(target.partition(":")[0]) for target in sorted(targets)}
    return {f"code of {target.partition(':')[0]}": fingerprint for target, fingerprint in found.items() if fingerprint}


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
