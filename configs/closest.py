"""What a user may have meant by a word that is not known."""

import difflib
from collections.abc import Sequence


def closest(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)`, or an empty text when nothing is close."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
