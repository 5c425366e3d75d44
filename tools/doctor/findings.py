"""A finding of `slipstream doctor`."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        verdict: `error` if a run can't start, or can't last; `warning` if it may be slow, or lose what it need not.
        remedy: how to correct it; empty if it is right.
    """

    check: str
    value: str
    verdict: Verdict = "ok"
    remedy: str = ""

    @property
    def text(self) -> str:
        """One or two lines."""
        line = f"{self.verdict:<9}{self.check:<22}{self.value}"
        return f"{line}\n{'':<31}-> {self.remedy}" if self.remedy else line


def warning(check: str, value: str, remedy: str) -> Finding:
    """A finding that a run can do with."""
    return Finding(check, value, "warning", remedy)


def error(check: str, value: str, remedy: str) -> Finding:
    """A finding that a run can't do with."""
    return Finding(check, value, "error", remedy)
