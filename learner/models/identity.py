"""Comparison of the tokenizers of models."""

from pathlib import Path

from tokenizers import Tokenizer

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.models.packing_check import as_config_error
from slipstream.learner.parallel.mesh import World


def require_same_tokens(key: str, path: Path, policy: Path, *, vocabulary: int, world: World) -> None:
    """Requires that a model has all tokens of the policy's tokenizer by the same ids; a collective.

    Vocabularies may be padded to different sizes; a model without a tokenizer passes.

    Args:
        key: the configuration's key of the model.
        vocabulary: its number of token ids.

    Raises: ConfigError, on all ranks, when a token is missing or has another id.
    """
    problem = world.from_root(_problem(path, policy, vocabulary) if world.is_root else None)
    if problem is not None:
        raise ConfigError(f"{key}={path}: {problem}; choose a model with the policy's tokenizer")


def _problem(path: Path, policy: Path, vocabulary: int) -> str | None:
    try:
        last = max(_tokens(policy).values(), default=0)
        if last >= vocabulary:
            return f"it has {vocabulary} tokens, the policy's tokenizer has {last + 1}"
        return token_difference(path, policy)
    except ConfigError as error:
        return str(error)


def token_difference(path: Path, policy: Path) -> str | None:
    """A token that a model's tokenizer has under another id than the policy's; None if there is none, or no tokenizer.

    Raises: ConfigError when a tokenizer can't be read.
    """
    model_tokens = _tokens(path)
    for token, number in _tokens(policy).items():
        if model_tokens.get(token, number) != number:
            return f"the token {token!r} has id {model_tokens[token]}, and {number} in the policy's tokenizer"
    return None


def _tokens(model: Path) -> dict[str, int]:
    """Token ids by token; empty without a tokenizer.json. Raises: ConfigError when it can't be read."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return {}
    with as_config_error(str(file)):
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
