"""The models that engine and learner load: their folders, from disk or from a hub, and their identity."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError, format_error
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.model import ModelConfig
from slipstream.models.architecture import read_config

WEIGHT_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Files of a hub's model that are downloaded; those in its folders are other forms of the same weights."""
MODELSCOPE: Final = "modelscope:"

SAMPLES = 16
"""Samples that a fingerprint takes of each file of weights, evenly spread."""
SAMPLE_BYTES = 1 << 16
Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


def model_problems(model: ModelConfig, learner: LearnerConfig | None = None) -> list[str]:
    """Reasons why models that the learner needs can't be loaded: the initial one and, in RL, the others.

    Models of a hub are downloaded, unless its library's cache has them.

    Args:
        learner: names reference, critic and process reward model; None: of a trainer that has none of them.
    """
    reference = None if learner is None or learner.kl is None else learner.kl.reference
    critic = None if learner is None or learner.critic is None else learner.critic.path
    process_reward = None if learner is None or learner.process_reward is None else learner.process_reward.path
    problems: list[str] = []
    for key, path, revision in (
        ("model.path", model.path, model.revision),
        ("learner.kl.reference", reference, None),
        ("learner.critic.path", critic, None),
        ("learner.process_reward.path", process_reward, None),
    ):
        try:
            if path is not None:
                model_folder(key, path, revision)
        except ConfigError as error:
            problems += error.problems
    return problems


def initial_model(config: RunConfig) -> Path:
    """The folder with the initial weights and the tokenizer; a `model.build` is built there first, unless it exists.

    Each process of a run calls this, on any host: the run's seed determines the bytes of a built model.

    Raises: ConfigError when there is no model in `model.path`.
    """
    if config.model.path is not None:
        return model_folder("model.path", config.model.path, config.model.revision)
    # Imported here: it loads the library `tokenizers`, which most processes do not need.
    from slipstream.models.digits import DIGITS
    from slipstream.models.tiny import TEXT, VISION, build_model

    folder = config.paths.initial_model
    kinds = {kind.name: kind for kind in (DIGITS, TEXT, VISION)}
    build_model(folder, kinds[config.model.build or DIGITS.name], seed=config.run.seed)
    return folder


def model_folder(key: str, path: Path, revision: str | None = None) -> Path:
    """The folder of a model: `path` itself, or the copy of a hub's model in the cache of the hub's library.

    Args:
        key: the configuration's key of the model.
        path: a folder, the name of a model on the Hugging Face hub (`Qwen/Qwen3-0.6B`), or `modelscope:` and a name.
        revision: branch, tag or commit of the hub's model; None: its main branch.

    Raises: ConfigError when there is no model, or it can't be downloaded.
    """
    name = str(path)
    try:
        if (path / "config.json").is_file():
            if revision is not None:
                raise ConfigError(f"model.revision={revision} is for a model of a hub, but {key}={path} is a folder")
            read_config(path)
            return path
        is_folder = path.exists() or path.is_absolute() or len(path.parts) != 2
    except OSError as error:  # another user's folder, or a name that is too long
        raise ConfigError(f"{key}={path} can't be read: {error.strerror}") from None
    if is_folder:
        raise ConfigError(
            f"{key}={path} holds no config.json: name the folder of a Hugging Face model, or a model of the hub "
            "(Qwen/Qwen3-0.6B)"
        )
    if name.startswith(MODELSCOPE):
        return _modelscope_folder(key, name.removeprefix(MODELSCOPE), revision)
    return _hub_folder(key, name, revision)


@cache
def _hub_folder(key: str, name: str, revision: str | None) -> Path:
    """Cached, so that one process does not see two states of a branch."""
    # Imported here: it takes 0.3 s, and most processes have a folder.
    from huggingface_hub import constants, snapshot_download

    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=WEIGHT_FILES, ignore_patterns="*/*")
    # Named and raised again: the library's errors, those of its HTTP client and of its storage have no common class.
    except Exception as error:
        raise ConfigError(
            f"{key}={name} is no folder, and the hub's model can't be had (revision {revision or 'main'}, cache "
            f"{constants.HF_HUB_CACHE}): {_one_line(error)}; without a network, fill the cache elsewhere with "
            f"`hf download {name}`, or name a folder"
        ) from error
    return _downloaded(key, name, folder)


@cache
def _modelscope_folder(key: str, name: str, revision: str | None) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise ConfigError(f"{key}={MODELSCOPE}{name} needs the package modelscope: pip install modelscope") from None
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=WEIGHT_FILES, ignore_patterns="*/*")
    except Exception as error:  # named and raised again: as of the other hub, the library's errors are of any class
        raise ConfigError(
            f"{key}={MODELSCOPE}{name} can't be had (revision {revision or 'master'}): {_one_line(error)}; without a "
            "network, name a folder"
        ) from error
    return _downloaded(key, f"{MODELSCOPE}{name}", folder)


def _one_line(error: Exception) -> str:
    return " ".join(format_error(error).split())


def _downloaded(key: str, name: str, folder: str) -> Path:
    path = Path(folder)
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ConfigError(f"{key}={name} holds no config.json or no *.safetensors: choose a model of transformers")
    return path


@cache
def text_decoder(model: Path) -> Decode:
    """Decodes with a model's tokenizer; the library transformers, which takes seconds to import, is not needed.

    Raises: SlipstreamError when the folder has none.
    """
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  (tokenizers raises nothing narrower)
        raise SlipstreamError(f"{file} can't be read, so there is no text to show: {error}") from None

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return decode


def model_fingerprint(folder: Path) -> str:
    """Hash of config.json and the weights, independent of the folder's path.

    Of large files only samples are read: fine-tuned versions of one model differ in almost every part of a file.
    """
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(size * number // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


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
