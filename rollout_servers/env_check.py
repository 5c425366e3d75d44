"""Settings of a run that its env contradicts."""

from slipstream.configs import RunConfig
from slipstream.configs.schema.run import ENV_SCORE
from slipstream.env.base import Env, has_sessions


def env_problems(config: RunConfig, env: Env) -> list[str]:
    """Reasons why a run of this configuration can't train on the tasks of `env`, found before an engine starts."""
    name, problems = config.env.name, []
    if not env.size("train"):
        problems.append(f"env {name!r} has no train tasks: correct env.options")
    judged = [chosen.score for chosen in config.buffer.filters if chosen.name == "dynamic_sampling"]
    if ENV_SCORE in judged and not has_sessions(env):
        problems.append(
            f"buffer.filters: dynamic_sampling judges the score {ENV_SCORE!r}, but env {name!r} has no sessions; name "
            "a reward term"
        )
    overlong, most = config.rollout.overlong, config.rollout.sampling.max_tokens
    if overlong is not None and overlong.cache_tokens > most and not has_sessions(env):
        problems.append(
            f"rollout.overlong.cache_tokens={overlong.cache_tokens} is more than rollout.sampling.max_tokens={most}, "
            f"and episodes of env {name!r} have one answer; lower it"
        )
    if has_sessions(env) and any(term.name == ENV_SCORE for term in config.rewards):
        problems.append(
            f"rewards: the name {ENV_SCORE!r} is taken by what the sessions of env {name!r} give; name the term "
            "otherwise"
        )
    return problems
