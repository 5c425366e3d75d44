"""Whether another model means the same by token ids as the policy, whose answers it is to judge."""

from pathlib import Path

from tokenizers import Tokenizer

from slipstream.configs.errors import ConfigError
from slipstream.learner.distributed import World
from slipstream.learner.isolation import said_of


def require_same_tokens(key: str, path: Path, policy: Path, *, vocabulary: int, world: World) -> None:
    """Vocabularies may be padded to different sizes; a model that came without a tokenizer is taken at its word.

    Args:
        key: where the configuration names the other model.
        vocabulary: how many token ids it knows.

    Raises: ConfigError, on all ranks, when it has not all of the policy's tokens, or has one by another id.
    """
    problem = world.from_root(_problem(path, policy, vocabulary) if world.is_root else None)
    if problem is not None:
        raise ConfigError(f"{key}={path}: {problem}; choose a model with the policy's tokenizer")


def _problem(path: Path, policy: Path, vocabulary: int) -> str | None:
    try:
        tokens, own = _tokens(policy), _tokens(path)
    except ConfigError as error:
        return str(error)
    last = max(tokens.values(), default=0)
    if last >= vocabulary:
        return f"it knows {vocabulary} tokens, the policy's tokenizer has {last + 1}"
    for token, number in tokens.items():
        if own.get(token, number) != number:
            return f"the token {token!r} is its number {own[token]}, and the policy's number {number}"
    return None


def _tokens(model: Path) -> dict[str, int]:
    """Nothing where there is no tokenizer.json. Raises: ConfigError when it can't be read."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return {}
    with said_of(str(file)):
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
