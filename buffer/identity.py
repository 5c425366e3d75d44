"""Who belongs to a run: what makes it this run is fixed in Redis by who comes first, and everybody who comes later must
fit; what its processes must agree on besides, the buffer's present configuration says.
"""

from collections.abc import Mapping

from slipstream.buffer.wire.messages import LearnerHello, ServerHello
from slipstream.configs import RunConfig, agreement
from slipstream.configs.runtime.errors import ConfigError

_TASKS = "env.options and the files that the env reads"
SERVER_IDENTITY_KEYS = {
    "env": "env.name",
    "env_fingerprint": f"the hash of the env's tasks (env_fingerprint: {_TASKS})",
    "train_tasks": f"the number of tasks to train on (train_tasks: {_TASKS})",
    "eval_tasks": f"the number of held-out tasks (eval_tasks: {_TASKS})",
    "tokenizer_fingerprint": "the hash of the tokenizer (tokenizer_fingerprint: model.path, model.build)",
}
"""What a server fixes: its names in Redis, and where a user sets it."""


def config_identity(config: RunConfig) -> dict[str, str]:
    """What the configuration fixes: the order of the tasks, and what comes with each group.

    Of the rewards only the names of those that are trained on: their weights may change.
    """
    trained = sorted(reward.name for reward in config.rewards if reward.weight)
    return {
        "run.seed": str(config.run.seed),
        "a greedy baseline in each group (learner.advantage: remax)": str(config.greedy_baseline),
        "the list of rewards with a weight": ", ".join(trained),
    }


def server_identity(hello: ServerHello) -> dict[str, str]:
    """What a server fixes: the tasks and the tokens."""
    return {name: str(getattr(hello, name)) for name in SERVER_IDENTITY_KEYS}


def learner_identity(hello: LearnerHello) -> dict[str, str]:
    """What a learner fixes, if it says so: the model that the run starts from."""
    if not hello.model_fingerprint:
        return {}
    return {"the hash of the model's config.json and weights (model.path, model.build)": hello.model_fingerprint}


def wrong_run_error(config: RunConfig, who: str, run: str) -> str:
    """Why somebody who has come to the wrong buffer is refused."""
    own = config.run.name
    return f"this buffer serves run {own!r}, the {who} is of run {run!r}; correct run.name or buffer.endpoint"


def find_difference(mine: Mapping[str, str], theirs: Mapping[str, str], where: str) -> str | None:
    """The first difference in words, None if there is none. What one of the two doesn't say fits."""
    for name, value in mine.items():
        if name in theirs and theirs[name] != value:
            return f"{SERVER_IDENTITY_KEYS.get(name, name)} is {value!r}, but {theirs[name]!r} {where}"
    return None


def identity_change(mine: Mapping[str, str], fixed: Mapping[str, str]) -> str | None:
    """The first difference from what the run was begun with, and what to do; None if there is none."""
    found = find_difference(mine, fixed, "since the run began")
    return found and f"{found}; restore it, or choose another run.name (`slipstream up --fresh` begins this one anew)"


def settings_difference(hello: ServerHello | LearnerHello, config: RunConfig) -> str | None:
    """The first setting in which a process differs from the buffer's `config`, and what to do; None if there is none.

    Either of the two may have been started anew with another configuration.
    """
    own = agreement.server_settings(config) if isinstance(hello, ServerHello) else agreement.learner_settings(config)
    found = find_difference(hello.settings, own, "with the buffer")
    return found and f"{found}; give both the same configuration and start again whichever had the wrong one"


def require_same_identity(config: RunConfig, fixed: Mapping[str, str]) -> None:
    """Raises: ConfigError when the run was begun with other settings than these.

    Of the env only the name is compared: what its options come to, servers say.
    """
    found = identity_change({**config_identity(config), "env": config.env.name}, fixed)
    if found:
        raise ConfigError(f"run {config.run.name!r}: {found}")


def require_unknown_incarnation(incarnation: str, known: str, disagreement: str) -> None:
    """Whoever differs and was not there before is refused.

    Raises: ConfigError when it was: this service, which has not met it, was started with other settings since, and
    the run must not end for that.
    """
    if incarnation == known:
        raise ConfigError(f"this buffer was started beside a run that is going on: there, {disagreement}")
