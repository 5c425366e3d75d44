"""The tiny model of the env `digits`: one token per character of its tasks."""

from pathlib import Path

from slipstream.models.tiny import PAD, TinyModel, build_model

EOS = "<eos>"
# Ids are indices. The capitals fill the vocabulary up to 32: a sampled id without a text would vanish from the answer
# and shift the digits behind it.
TOKENS = (PAD, EOS, *"0123456789", *"crs+=", *"ABCDEFGHIJKLMNO")
CONTEXT = 256  # tokens

DIGITS = TinyModel(name="digits", tokens=TOKENS, special=(PAD, EOS), context=CONTEXT, rope_theta=100.0, tied=False)


def build_digits_model(folder: Path, *, seed: int) -> None:
    """Writes the model. Raises: as `build_model` does."""
    build_model(folder, DIGITS, seed=seed)
