"""The Hugging Face folders that engine and learner load: the initial model, the reference, the critic's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig


def model_problems(config: RunConfig) -> list[str]:
    """Why models are not to be had that the learner needs: the initial one, the reference, the critic's."""
    learner = config.learner
    return [
        *_model_problems("model.path", config.model.path),
        *_model_problems("learner.kl.reference", None if learner.kl is None else learner.kl.reference),
        *_model_problems("learner.critic.path", None if learner.critic is None else learner.critic.path),
    ]


def _model_problems(key: str, path: Path | None) -> list[str]:
    try:
        if path is None or (path / "config.json").is_file():
            return []
    except OSError as error:  # a folder of another user's
        return [f"{key}={path} can't be read: {error.strerror}"]
    problem = f"{key}={path} holds no config.json: name a Hugging Face model folder"
    if not path.exists() and len(path.parts) == 2 and not path.is_absolute():
        problem += f"; names on the hub are not resolved: `hf download {path} --local-dir FOLDER`, then {key}=FOLDER"
    return [problem]


def initial_model(config: RunConfig) -> Path:
    """The folder that engine and learner load the initial weights and the tokenizer from.

    A model that is to be built is built here, unless it is there: each process of a run asks, on whatever host, and all
    of them build the same bytes from the run's seed.

    Raises: ConfigError when there is no model in `model.path`.
    """
    problems = _model_problems("model.path", config.model.path)
    if problems:
        raise ConfigError(problems)
    if config.model.path is not None:
        return config.model.path
    # Imported here: a process that needs no model need not load the tokenizer's library.
    from slipstream.configs.digits_model import build_digits_model

    folder = config.paths.initial_model
    build_digits_model(folder, seed=config.run.seed)
    return folder


@contextmanager
def without_remote_code(model: Path) -> Iterator[None]:
    """Around what transformers loads from `model` with `trust_remote_code=False`; left out, it would ask the terminal.

    Raises: ConfigError when it can't be loaded without that code.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"the model in {model} needs code from its folder, which slipstream does not run: the processes would have "
            "to run the same; choose a model that transformers has a class for"
        ) from None
