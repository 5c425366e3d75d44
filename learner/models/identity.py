"""By what a model is known again when a run goes on."""

import hashlib
from pathlib import Path

from tokenizers import Tokenizer

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.models.packing_check import said_of
from slipstream.learner.parallel.mesh import World

PIECES = 16
"""Of each file of weights, evenly spread."""
PIECE_BYTES = 1 << 16


def model_fingerprint(folder: Path) -> str:
    """Differs when config.json or the weights differ, wherever the folder lies.

    Of large files only samples are read: two trainings of one model hardly share a piece of a file.
    """
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(PIECES):
                file.seek(size * number // PIECES)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:16]


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
