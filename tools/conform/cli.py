"""The command: a line for each vector, and an exit code."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slipstream.tools.conform.golden import read_golden
from slipstream.tools.conform.vectors import Comparison, compare

TOLERANCE = 1e-5


def command(argv: Sequence[str]) -> int:
    """Prints how far ours are from the file's figures; returns 1 if one is further than 1e-5.

    Raises: ConfigError when the file can't be read.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream conform", description="Hold the algorithms against another implementation's figures."
    )
    parser.add_argument("file", type=Path, help="golden file, such as tests/golden/algorithms.json")
    comparisons = list(compare(read_golden(parser.parse_args(argv).file)))
    width = max(len(each.name) for each in comparisons)
    for each in comparisons:
        print(f"{each.name:<{width}}  {_words(each)}")
    outside = [each for each in comparisons if not each.within(TOLERANCE)]
    verdict = f"{len(outside)} of {len(comparisons)} differ" if outside else f"all {len(comparisons)} agree"
    print(f"{verdict} (within {TOLERANCE:.0e})")
    return 1 if outside else 0


def _words(found: Comparison) -> str:
    if found.unknown is not None:
        return f"NOT RUN: {found.unknown}"
    gradients = "" if found.gradients is None else f"  gradients {found.gradients:.1e}"
    return f"values {found.values:.1e}{gradients}" + ("" if found.within(TOLERANCE) else "  DIFFERS")
