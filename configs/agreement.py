"""Settings on which the processes of a run must agree, because each reads a configuration of its own.

They may change when the run is restarted, except for those that the buffer's `identity` fixes.
"""

from collections.abc import Mapping, Sequence

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.schema.run import ModelConfig, RewardConfig, RunSection


def server_settings(config: RunConfig) -> dict[str, str]:
    """Settings that rollout servers and buffer share: sampling, rewards, and filters."""
    return {
        **_shared_settings(config.run, config.model, config.rollout, config.rewards),
        "buffer.filters": ", ".join(str(chosen) for chosen in config.buffer.filters),
        **{f"rollout.sampling.{name}": str(value) for name, value in config.rollout.sampling},
        "rollout.overlong": str(config.rollout.overlong),
        "eval.reward": config.eval.reward or "rewards",
    }


def learner_settings(config: RunConfig) -> dict[str, str]:
    """Settings that the learner and the buffer share: order, place and content of the groups."""
    return {
        **_shared_settings(config.run, config.model, config.rollout, config.rewards),
        "buffer.sampler": str(config.buffer.sampler),
        "learner.groups_per_step": str(config.learner.groups_per_step),
        "weights.publish_every_steps": str(config.weights.publish_every_steps),
        "buffer.max_staleness": str(config.buffer.max_staleness),
        "rollout.sampling.temperature": str(config.rollout.sampling.temperature),
        "a greedy baseline in each group (learner.advantage: remax)": str(config.greedy_baseline),
    }


def rank_settings(config: RunConfig) -> dict[str, str]:
    """Settings that all ranks of a learner share: they take each step together, each with a part of the weights."""
    return {
        **_model_settings(config.run, config.model),
        **{f"learner.{name}": str(value) for name, value in config.learner},
        "run.name": config.run.name,
        "model.train_vision_encoder": str(config.model.train_vision_encoder),
    }


def rl_rank_settings(config: RunConfig) -> dict[str, str]:
    """Settings that all ranks of an RL training share."""
    return {
        **learner_settings(config),
        **rank_settings(config),
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


def _shared_settings(
    run: RunSection, model: ModelConfig, rollout: RolloutConfig, rewards: Sequence[RewardConfig]
) -> dict[str, str]:
    return {
        **_model_settings(run, model),
        "rollout.group_size": str(rollout.group_size),
        "rewards": ", ".join(sorted(f"{reward.name}: {reward.weight}" for reward in rewards)),
    }


def _model_settings(run: RunSection, model: ModelConfig) -> dict[str, str]:
    return {"run.seed": str(run.seed), "model.dtype": model.dtype, "model.lora": str(model.lora)}
