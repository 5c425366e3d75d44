"""The model folders that engine and learner load: initial policy, reference, critic."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.run import ModelConfig


def model_problems(model: ModelConfig, learner: LearnerConfig) -> list[str]:
    """Reasons why models that the learner needs can't be loaded: initial policy, reference, critic."""
    return [
        *_model_problems("model.path", model.path),
        *_model_problems("learner.kl.reference", None if learner.kl is None else learner.kl.reference),
        *_model_problems("learner.critic.path", None if learner.critic is None else learner.critic.path),
    ]


def _model_problems(key: str, path: Path | None) -> list[str]:
    try:
        if path is None or (path / "config.json").is_file():
            return []
    except OSError as error:  # another user's folder
        return [f"{key}={path} can't be read: {error.strerror}"]
    problem = f"{key}={path} holds no config.json: name a Hugging Face model folder"
    if not path.exists() and len(path.parts) == 2 and not path.is_absolute():
        problem += f"; names on the hub are not resolved: `hf download {path} --local-dir FOLDER`, then {key}=FOLDER"
    return [problem]


def initial_model(config: RunConfig) -> Path:
    """The folder with the initial weights and the tokenizer; a `model.build` is built there first, unless it exists.

    Each process of a run calls this, on any host: the run's seed determines the bytes of a built model.

    Raises: ConfigError when there is no model in `model.path`.
    """
    problems = _model_problems("model.path", config.model.path)
    if problems:
        raise ConfigError(problems)
    if config.model.path is not None:
        return config.model.path
    # Imported here: it loads the library `tokenizers`, which most processes do not need.
    from slipstream.configs.digits_model import build_digits_model

    folder = config.paths.initial_model
    build_digits_model(folder, seed=config.run.seed)
    return folder


def vocabulary_size(model: Path) -> int:
    """Number of token ids that the model in a folder accepts, which may be more than its tokenizer has.

    Raises: ConfigError when its config.json does not give it.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for section in (config, config.get("text_config", {})):  # the latter in models of several modalities
        if isinstance(section.get("vocab_size"), int):
            return int(section["vocab_size"])
    raise ConfigError(f"{model / 'config.json'} has no vocab_size; choose a causal language model")


@contextmanager
def without_remote_code(model: Path) -> Iterator[None]:
    """Context for loading `model` with transformers and `trust_remote_code=False`; unset, it prompts on the terminal.

    Raises: ConfigError when the model needs code from its folder.
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


def without_copies(torch: Any) -> Any:
    """Context in which `Tensor.contiguous` returns its tensor, so that parts of a weight stay views of it.

    transformers copies the parts into which it cuts a weight. `torch` is the module, which this package never imports.
    """

    def call(mode: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))

    return type("WithoutCopies", (torch.overrides.TorchFunctionMode,), {"__torch_function__": call})()
