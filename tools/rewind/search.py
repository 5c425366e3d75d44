"""The smallest set of parts whose removal restores something: by halving, with few tests. Pure."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

Part = TypeVar("Part")
Restores = Callable[[frozenset[Part]], bool]
"""True if the removal of these parts restores it."""
QUARTERS = 4


def most_tests(parts: int) -> int:
    """Tests that `smallest` needs at most where one part alone is the cause, or nothing is."""
    return 2 * math.ceil(math.log2(max(parts, 2))) + QUARTERS


def smallest(parts: Sequence[Part], restores: Restores[Part], *, most: int) -> frozenset[Part] | None:
    """A set of at most `most` parts whose removal restores it, and of which none may stay; None if none was found.

    Never all parts are removed at once. If one part is the cause, its half is found at each level. If several are,
    first three quarters are removed; then Junker's QuickXplain finds them, each among the others' removal.

    Args:
        parts: neighbours are removed together.

    Source: Junker 2004, "QuickXplain: preferred explanations and relaxations for over-constrained problems".
    """
    found = _halved(parts, restores)
    if len(found) == len(parts) and len(parts) > 1:
        found = _without_a_quarter(parts, restores)
    if not found:
        return None
    if len(found) > 1:
        found = _explained(frozenset(), False, found, restores, most)
    elif len(parts) == 1 and not restores(frozenset(parts)):
        return None
    return frozenset(found) if 0 < len(found) <= most else None


def _halved(parts: Sequence[Part], restores: Restores[Part]) -> Sequence[Part]:
    """The smallest half of a half … whose removal restores it."""
    while len(parts) > 1:
        left, right = _halves(parts)
        restoring = next((half for half in (left, right) if restores(frozenset(half))), None)
        if restoring is None:
            break
        parts = restoring
    return parts


def _without_a_quarter(parts: Sequence[Part], restores: Restores[Part]) -> Sequence[Part]:
    """Three quarters whose removal restores it; none if there are none."""
    quarters = [quarter for half in _halves(parts) for quarter in _halves(half)]
    for kept in quarters:
        removed = [part for quarter in quarters if quarter is not kept for part in quarter]
        if removed and len(removed) < len(parts) and restores(frozenset(removed)):
            return removed
    return []


def _explained(
    removed: frozenset[Part], grown: bool, parts: Sequence[Part], restores: Restores[Part], most: int
) -> Sequence[Part]:
    """The needed ones of `parts`, where `removed` and `parts` together restore it.

    Stops at more than `most`: then more are returned, not all of which may be needed.
    """
    if grown and restores(removed):
        return []
    if len(parts) <= 1:
        return parts
    left, right = _halves(parts)
    of_right = _explained(removed | frozenset(left), True, right, restores, most)
    if len(of_right) > most:
        return of_right
    of_left = _explained(removed | frozenset(of_right), bool(of_right), left, restores, most - len(of_right))
    return [*of_left, *of_right]


def _halves(parts: Sequence[Part]) -> tuple[Sequence[Part], Sequence[Part]]:
    middle = len(parts) // 2
    return parts[:middle], parts[middle:]
