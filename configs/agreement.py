"""Settings on which the processes of a run must agree, because each reads a configuration of its own.

They may change when the run is restarted, except for those that the buffer's `identity` fixes.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.distill import DistillConfig

PRECISION: Final = "model.dtype"
"""The precision on a host: the only setting that the buffer may lack and the learner has."""
MOST_CHARACTERS: Final = 1000
"""Length of a value that is sent as it is."""


def server_settings(config: RunConfig) -> dict[str, str]:
    """Settings that rollout servers and buffer share: sampling, episodes, tools, rewards, and filters."""
    rollout = config.rollout
    settings = {
        **_shared_settings(config),
        "buffer.filters": ", ".join(str(chosen) for chosen in config.buffer.filters),
        **{f"rollout.sampling.{name}": str(value) for name, value in rollout.sampling},
        **{f"rollout.episode.{name}": str(value) for name, value in rollout.episode},
        "rollout.overlong": str(rollout.overlong),
        "rollout.min_episodes": str(rollout.fewest_episodes),
        "rollout.engine.max_model_len": str(rollout.engine.max_model_len),
        "eval.reward": config.eval.reward or "rewards",
        "env.tools": ", ".join(tool.name for tool in config.env.tools),
    }
    for number, tool in enumerate(config.env.tools):
        limits = f"deadline_s={tool.deadline_s:g}, max_output_characters={tool.max_output_characters}"
        settings[f"env.tools.{number}"] = f"{tool.name}: {limits}, options {_options(tool.options)}"
    for term in config.rewards:
        settings[f"rewards: {term.name}"] = f"function {term.function or term.name}, options {_options(term.options)}"
    return _shortened(settings)


def learner_settings(config: RunConfig) -> dict[str, str]:
    """Settings that the learner and the buffer share: order, place and content of the groups."""
    settings = {
        **_shared_settings(config),
        "buffer.sampler": str(config.buffer.sampler),
        "learner.groups_per_step": str(config.learner.groups_per_step),
        "weights.publish_every_steps": str(config.weights.publish_every_steps),
        "buffer.max_staleness": str(config.buffer.max_staleness),
        "rollout.sampling.temperature": str(config.rollout.sampling.temperature),
        "a greedy baseline in each group (learner.advantage: remax)": str(config.greedy_baseline),
    }
    return _shortened(settings)


def host_settings(config: RunConfig) -> dict[str, str]:
    """Settings that depend on the host, of a process that computes with the model: the buffer does not compute."""
    return {PRECISION: config.model.dtype_here}


def rank_settings(config: RunConfig) -> dict[str, str]:
    """Settings that all ranks of a learner share: they take each step together, each with a part of the weights."""
    return {
        "run.seed": str(config.run.seed),
        **host_settings(config),
        "model.lora": str(config.model.lora),
        **{f"learner.{name}": str(value) for name, value in config.learner},
        "run.name": config.run.name,
        "model.train_vision_encoder": str(config.model.train_vision_encoder),
    }


def rl_rank_settings(config: RunConfig) -> dict[str, str]:
    """Settings that all ranks of an RL training share."""
    return {
        **learner_settings(config),
        **rank_settings(config),
        **{f"algorithm of env {label}": str(each) for label, each in config.algorithms.items() if label},
        "rollout.sampling.max_tokens": str(config.rollout.sampling.max_tokens),
        "eval.tasks": str(config.eval.tasks),
    }


def find_difference(
    mine: Mapping[str, str], theirs: Mapping[str, str], where: str, descriptions: Mapping[str, str] | None = None
) -> str | None:
    """The first setting that differs, as text; None if all that both have are equal.

    Args:
        where: the place of `theirs`, for the text.
        descriptions: of settings whose names would not tell the keys that set them.
    """
    for name, value in mine.items():
        if name in theirs and theirs[name] != value:
            return f"{(descriptions or {}).get(name, name)} is {value!r}, but {theirs[name]!r} {where}"
    return None


def _shared_settings(config: RunConfig) -> dict[str, str]:
    return {
        "run.seed": str(config.run.seed),
        **({} if config.model.dtype == "auto" else {PRECISION: config.model.dtype}),
        "model.lora": str(config.model.lora),
        "rollout.group_size": str(config.rollout.group_size),
        "learner.distill": _distillation(config.learner.distill),
        "rewards": ", ".join(sorted(f"{reward.name}: {reward.weight}" for reward in config.rewards)),
    }


def _distillation(distill: DistillConfig | None) -> str:
    """The rollout servers' part in a distillation, without its models: the learner has these, by a path of its own."""
    if distill is None:
        return "none"
    keys = ("env", "url", "server", "context", "solution_reward")
    teachers = [", ".join(f"{key}={getattr(teacher, key)}" for key in keys) for teacher in distill.teachers]
    return f"top_k={distill.top_k}; {'; '.join(teachers)}"


def _options(options: Mapping[str, Any]) -> str:
    """Options by name: numbers as they are, all else by its hash, because it may be long or secret."""
    shown = {
        name: str(value) if isinstance(value, bool | int | float) else f"#{_digest(repr(value))}"
        for name, value in options.items()
    }
    return ", ".join(f"{name}={shown[name]}" for name in sorted(shown)) or "none"


def _shortened(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings with names and values of at most MOST_CHARACTERS characters; long ones end with their hash."""
    return {_short(name): _short(value) for name, value in settings.items()}


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 20]}… #{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
