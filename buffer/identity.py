"""What makes a run this run: fixed in Redis by who comes first, and everybody who comes later must fit."""

from collections.abc import Mapping

from slipstream.buffer.wire.messages import LearnerHello, ServerHello
from slipstream.configs import RunConfig
from slipstream.configs.errors import ConfigError

OF_A_SERVER = ("env", "env_fingerprint", "train_tasks", "eval_tasks", "tokenizer_fingerprint")


def of_config(config: RunConfig) -> dict[str, str]:
    """What the configuration fixes: where the groups lie, the order of the tasks, and what comes with each group.

    Of the rewards only the names of those that are trained on: their weights may change.
    """
    trained = sorted(reward.name for reward in config.rewards if reward.weight)
    return {
        "buffer.shards": str(config.buffer.shards),
        "run.seed": str(config.run.seed),
        "a greedy baseline in each group (learner.advantage: remax)": str(config.greedy_baseline),
        "the list of rewards with a weight": ", ".join(trained),
    }


def of_server(hello: ServerHello) -> dict[str, str]:
    """What a server fixes: the tasks and the tokens."""
    return {name: str(getattr(hello, name)) for name in OF_A_SERVER}


def of_learner(hello: LearnerHello) -> dict[str, str]:
    """What a learner fixes, if it says so: the model that the run starts from."""
    if not hello.model_fingerprint:
        return {}
    return {"the hash of the model's config.json and weights (model.path, model.build)": hello.model_fingerprint}


def difference(mine: Mapping[str, str], fixed: Mapping[str, str]) -> str | None:
    """The first difference in words, None if there is none. What a run has never fixed fits."""
    for name, value in mine.items():
        if name in fixed and fixed[name] != value:
            return f"{name} is {value!r}, but {fixed[name]!r} since the run began"
    return None


def require_same(config: RunConfig, fixed: Mapping[str, str]) -> None:
    """Raises: ConfigError when the run was begun with other settings than these."""
    found = difference(of_config(config), fixed)
    if found:
        raise ConfigError(f"run {config.run.name!r}: {found}; restore it, or choose another run.name")
