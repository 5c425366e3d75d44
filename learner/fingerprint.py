"""By what a model is known again when a run goes on."""

import hashlib
from pathlib import Path

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
