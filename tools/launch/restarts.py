"""Decisions whether, and when, a process that failed is started again. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

FIRST_DELAY_S = 1.0
MOST_DELAY_S = 60.0
MOST_ALIKE = 5
"""Failures of the same kind in a row after which a process stays down."""


@dataclass(frozen=True)
class Failure:
    """The unexpected end of a process."""

    error: str
    """Its kind: the ending, and what the process logged last as an error."""
    lived_s: float
    """Time since its start."""
    step: int = 0
    """Steps done by then."""
    checkpoint: int = 0
    """Step of the latest checkpoint then."""


def restart_delay_s(failures: Sequence[Failure], *, sound_s: float) -> float | None:
    """Time until a process is started again, 1, 2, 4 … 60 s; None: it stays down.

    Args:
        failures: all so far, the last one just now.
        sound_s: a process that lived longer worked: its failure is the first of a new row.
    """
    sound = [index for index, failure in enumerate(failures) if failure.lived_s > sound_s]
    row = failures[sound[-1] if sound else 0 :]
    alike = sum(1 for _ in takewhile(lambda failure: failure.error == row[-1].error, reversed(row)))
    if alike >= MOST_ALIKE:
        return None
    return float(min(MOST_DELAY_S, FIRST_DELAY_S * 2 ** (len(row) - 1)))


def learner_may_restart(failures: Sequence[Failure]) -> bool:
    """True if a learner, which continues from its latest checkpoint, may get further than before.

    It is started again once for each checkpoint, and never twice for the same error at the same step.
    """
    *earlier, last = failures
    return all(
        failure.checkpoint < last.checkpoint and (failure.error, failure.step) != (last.error, last.step)
        for failure in earlier
    )
