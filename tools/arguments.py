"""Kinds of arguments that several commands take."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not less."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """A finite number of more than 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0, and finite")
    return float(text)


def new_file(text: str) -> Path:
    """The path of a file in a folder that is there, so that what takes hours to find has a place."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it, or name a file elsewhere")
    return path
