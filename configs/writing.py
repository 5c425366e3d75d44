"""Files that are there whole or not at all, that others may read, and that a power loss leaves as they are."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Writes a file that is there whole or not at all, whoever reads or dies; returns its size. Raises: OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return size


def let_read(path: Path) -> None:
    """Lets those use a file who may use any other that this process writes; safetensors makes it the user's alone.

    Raises: OSError.
    """
    # A new file has the mode that is wanted: os.umask() tells its value only by changing it, for other threads too.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.touch()
    try:
        path.chmod(stat.S_IMODE(new.stat().st_mode))
    finally:
        new.unlink()


def sync(path: Path) -> None:
    """Returns once a power loss leaves a file's content, or a folder's names, as they are. Raises: OSError."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
