"""Checks that servers and learners belong to the run and share its settings.

The identity of a run (seed, tasks, rewards, tokenizer, model) is fixed in Redis by the first process that reports it;
later processes must match. Other shared settings are compared with the buffer's present configuration; those that
depend on a host, and which the buffer therefore lacks, with the processes that are there.
"""

from collections.abc import Iterable, Mapping

from slipstream.buffer.wire.messages import LearnerHello, ServerHello
from slipstream.configs import RunConfig, agreement
from slipstream.configs.agreement import PRECISION
from slipstream.configs.runtime.errors import ConfigError

_TASKS = "env.options and the files that the env reads"
SERVER_IDENTITY_KEYS = {
    "env": "env.name",
    "env_fingerprint": f"the hash of the env's tasks (env_fingerprint: {_TASKS})",
    "train_tasks": f"the number of tasks to train on (train_tasks: {_TASKS})",
    "eval_tasks": f"the number of held-out tasks (eval_tasks: {_TASKS})",
    "tokenizer_fingerprint": "the hash of the tokenizer (tokenizer_fingerprint: model.path, model.build)",
    "vocab_size": "the model's number of token ids (vocab_size: model.path, model.build)",
    "model_fingerprint": "the hash of the model's config.json and weights (model_fingerprint: model.path, "
    "model.revision, model.build)",
}
"""Fields of the identity that a server reports: name in Redis, and its description with the keys that set it."""

_HOST_REMEDIES = {
    PRECISION: f"set {PRECISION} in the configuration of all processes instead of auto, or restart the other one with "
    "this one's"
}
_SAME_CODE = "give all servers the same files, and restart those that have others"


def config_identity(config: RunConfig) -> dict[str, str]:
    """Fields that the configuration fixes: the order of the tasks, and the content of each group.

    Only the names of the rewards with a weight: the weights may change.
    """
    trained = sorted(reward.name for reward in config.rewards if reward.weight)
    return {
        "run.seed": str(config.run.seed),
        "a greedy baseline in each group (learner.advantage: remax)": str(config.greedy_baseline),
        "the list of rewards with a weight": ", ".join(trained),
    }


def server_identity(hello: ServerHello) -> dict[str, str]:
    """Fields that a server fixes, as far as they are reported: the tasks, the tokenizer and the initial model."""
    fields = {name: str(getattr(hello, name)) for name in SERVER_IDENTITY_KEYS}
    return {name: value for name, value in fields.items() if value}


def learner_identity(hello: LearnerHello) -> dict[str, str]:
    """Fields that a learner fixes, as far as they are reported: the initial model and its number of token ids."""
    fields = {"model_fingerprint": hello.model_fingerprint, "vocab_size": str(hello.vocab_size or "")}
    return {name: value for name, value in fields.items() if value}


def wrong_run_error(own: str, role: str, run: str) -> str:
    """The reason to refuse a process of another run than the buffer's `own`."""
    return f"this buffer serves run {own!r}, not the {role}'s {run!r}; correct run.name or buffer.endpoint"


def identity_change(mine: Mapping[str, str], fixed: Mapping[str, str]) -> str | None:
    """The first difference from the run's fixed identity, with a remedy; None if there is none."""
    difference = agreement.find_difference(mine, fixed, "since the run began", SERVER_IDENTITY_KEYS)
    remedy = "restore it, or choose another run.name (`slipstream up --fresh` starts this one over)"
    return difference and f"{difference}; {remedy}"


def host_difference(
    theirs: Mapping[str, str], own: Mapping[str, str], others: Iterable[tuple[str, Mapping[str, str]]]
) -> str | None:
    """The first setting that the buffer lacks and in which a process differs from another one, with a remedy, or None.

    Args:
        own: the buffer's settings, of which it has no value that depends on the host.
        others: name and settings of the run's other processes, which agree with each other.
    """
    pending = {name: value for name, value in theirs.items() if name not in own}
    for where, settings in others:
        for name in pending.keys() & settings.keys():
            if settings[name] != pending.pop(name):
                return (
                    f"{name} is {theirs[name]!r}, but {settings[name]!r} with {where}, which joined before; "
                    f"{_HOST_REMEDIES.get(name, _SAME_CODE)}"
                )
        if not pending:
            break
    return None


def settings_difference(theirs: Mapping[str, str], own: Mapping[str, str]) -> str | None:
    """The first setting in which a process differs from the buffer's own, with a remedy; None if there is none.

    Either of the two may have been restarted with another configuration.
    """
    difference = agreement.find_difference(theirs, own, "with the buffer", SERVER_IDENTITY_KEYS)
    return difference and f"{difference}; give both the same configuration and restart the one that had the wrong one"


def require_same_identity(config: RunConfig, fixed: Mapping[str, str]) -> None:
    """Checks a configuration against the run's fixed identity. Raises: ConfigError when they differ.

    Of the env only the name is compared: servers report the hash of its tasks.
    """
    change = identity_change({**config_identity(config), "env": config.env.name}, fixed)
    if change:
        raise ConfigError(f"run {config.run.name!r}: {change}")


def require_unknown_incarnation(incarnation: str, known: str, difference: str) -> None:
    """Checks that a peer with other settings is not already part of the run, so that it can be refused.

    Raises: ConfigError when it is: then this service was restarted with other settings, and must stop instead of
    refusing the peers of a running run.
    """
    if incarnation == known:
        raise ConfigError(f"this buffer was started with other settings than the running run: there, {difference}")
