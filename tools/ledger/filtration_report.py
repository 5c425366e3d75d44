"""`slipstream ledger filtration-report`: PF-PPO strategies compared on answers with rewards and true scores."""

import argparse
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from slipstream.buffer.policies.filters import Strategy, rank_weights
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError

# N answers of a group, A answers of all groups, B groups of answers with similar rewards

STRATEGIES: tuple[tuple[Strategy | None, float], ...] = (
    (None, 1.0),
    ("best_of_n", 1.0),
    ("best_random", 1.0),
    ("best_worst", 1.0),
    ("pow", 1.0),
    ("pow", 2.0),
    ("pow", 3.0),
)
"""Strategies with the exponent of `pow`: the rows of the paper's table 3 that rank or weigh; None: no filter."""

Scores = tuple[list[float], list[float]]
"""A group's rewards and true scores, in the order of the file."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns in the file."""

    group: str
    reward: str
    true_score: str


@dataclass(frozen=True)
class Fit:
    """A row of the report."""

    strategy: str
    """The name in `buffer.filters`; `pow` with its exponent; `none`: no filter."""
    r_squared: float | None
    """None: not defined, see `strategy_fit`."""
    answers_used: int
    """Answers with a positive weight."""
    best: bool


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream ledger filtration-report`; returns 0.

    Raises: ConfigError if there is no such file or column, SlipstreamError if its content can't be read, or a number or
    a group's second answer is missing.
    """
    parser = argparse.ArgumentParser(
        prog="slipstream ledger filtration-report",
        description="Compare PF-PPO's strategies by how well the reward predicts the true score of the answers that "
        "they use (R², arXiv 2409.06957).",
    )
    parser.add_argument("groups", type=Path, metavar="GROUPS", help="parquet, csv or jsonl file; a row is an answer")
    parser.add_argument("--true-score", required=True, metavar="COLUMN", help="score that the reward should predict")
    parser.add_argument("--reward", default="reward", metavar="COLUMN", help="default: reward")
    parser.add_argument("--group", default="group_id", metavar="COLUMN", help="id of the group; default: group_id")
    parser.add_argument(
        "--bins", type=int, default=20, help="groups of similar reward that are averaged; 0: every answer is a point"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if arguments.bins < 0:
        parser.error(f"--bins {arguments.bins} must not be negative")
    columns = Columns(arguments.group, arguments.reward, arguments.true_score)
    groups = read_groups(arguments.groups, columns)
    found = fits(groups, bins=arguments.bins or None)
    answers = sum(len(rewards) for rewards, _ in groups)
    if arguments.json:
        facts = {"file": str(arguments.groups), "groups": len(groups), "answers": answers, "bins": arguments.bins}
        print(json.dumps({**facts, "strategies": [asdict(fit) for fit in found]}, indent=2))
        return 0
    console = Console()
    console.print(fit_table(found, title=f"{arguments.groups.name}: {len(groups):,} groups, {answers:,} answers"))
    if any(fit.r_squared is None for fit in found):
        console.print(
            "-  not defined: fewer than three points, or all with the same true score. "
            "Rewards of few values need --bins 0.",
            soft_wrap=True,
        )
    return 0


def fits(groups: Sequence[Scores], *, bins: int | None) -> list[Fit]:
    """All strategies, by falling R²; those without one come last."""
    rows = []
    for strategy, exponent in STRATEGIES:
        r_squared = strategy_fit(groups, strategy=strategy, exponent=exponent, bins=bins)
        used = sum(_answers_used(rewards, strategy, exponent) for rewards, _ in groups)
        name = f"pow {exponent:g}" if strategy == "pow" else strategy or "none"
        rows.append((name, None if math.isnan(r_squared) else r_squared, used))
    defined = [r_squared for _, r_squared, _ in rows if r_squared is not None]
    best = max(defined, default=math.nan)
    rows.sort(key=lambda row: -math.inf if row[1] is None else row[1], reverse=True)
    return [
        Fit(name, r_squared, used, best=r_squared is not None and _rounded(r_squared) == _rounded(best))
        for name, r_squared, used in rows
    ]


def _rounded(r_squared: float) -> str:
    return f"{r_squared:.3f}"


def _answers_used(rewards: Sequence[float], strategy: Strategy | None, exponent: float) -> int:
    if strategy is None:
        return len(rewards)
    return int((rank_weights(rewards, strategy=strategy, exponent=exponent) > 0).sum())


def fit_table(found: Sequence[Fit], *, title: str) -> Table:
    """The report as a table; the best rows are marked."""
    table = Table(title=title, title_style="bold", border_style="cyan")
    table.add_column("strategy", style="bold cyan", no_wrap=True)
    table.add_column("R²", justify="right")
    table.add_column("answers used", justify="right")
    table.add_column("")
    for fit in found:
        r_squared = "-" if fit.r_squared is None else _rounded(fit.r_squared)
        table.add_row(fit.strategy, r_squared, f"{fit.answers_used:,}", "best" if fit.best else "")
    return table


def read_groups(path: Path, columns: Columns) -> list[Scores]:
    """The rewards and true scores of each group, groups in the order of their first answer.

    Raises: ConfigError and SlipstreamError as `command` does, naming file, column and row (counted from 1, without a
    heading) of the mistake.
    """
    groups: dict[str, Scores] = {}
    first_rows: dict[str, int] = {}
    for row, record in enumerate(_records(path, columns), start=1):
        group = str(_value(record, columns.group, path, row))
        rewards, scores = groups.setdefault(group, ([], []))
        first_rows.setdefault(group, row)
        rewards.append(_number(record, columns.reward, path, row))
        scores.append(_number(record, columns.true_score, path, row))
    if not groups:
        raise SlipstreamError(f"{path} has no rows: it needs one for each answer")
    for group, (rewards, _) in groups.items():
        if len(rewards) == 1:
            raise SlipstreamError(
                f"{path}, row {first_rows[group]}: {columns.group}={group!r} has a single answer, which can't be "
                "ranked; leave it out, or name the column of the groups with --group"
            )
    return list(groups.values())


def _records(path: Path, columns: Columns) -> Iterator[Mapping[str, Any]]:
    readers = {".parquet": _parquet_records, ".csv": _csv_records, ".jsonl": _jsonl_records}
    if path.suffix not in readers:
        raise ConfigError(f"{path} is no {', '.join(readers)} file; rename or convert it")
    try:
        yield from readers[path.suffix](path, columns)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SlipstreamError(f"can't read {path}: {error}") from error


def _csv_records(path: Path, columns: Columns) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        _check_columns(reader.fieldnames or (), columns, path)
        try:
            yield from reader
        except csv.Error as error:
            raise SlipstreamError(f"{path}, line {reader.line_num}: {error}") from error


def _jsonl_records(path: Path, _columns: Columns) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for row, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise SlipstreamError(f"{path}, row {row}: {error}") from error
            if not isinstance(record, dict):
                raise SlipstreamError(f"{path}, row {row}: {line.strip()[:80]} is no JSON object")
            yield record


def _parquet_records(path: Path, columns: Columns) -> Iterator[Mapping[str, Any]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise SlipstreamError(
            f"{path}: parquet needs pyarrow; `pip install 'slipstream[export]'`, or give a csv or jsonl file"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except import_module("pyarrow").ArrowInvalid as error:
        raise SlipstreamError(f"can't read {path}: {error}") from error
    with file:
        _check_columns(file.schema_arrow.names, columns, path)
        needed = sorted({columns.group, columns.reward, columns.true_score})
        for batch in file.iter_batches(columns=needed):
            yield from batch.to_pylist()


def _check_columns(present: Sequence[str], columns: Columns, path: Path) -> None:
    for column in (columns.group, columns.reward, columns.true_score):
        if column not in present:
            raise ConfigError(f"{path} has no column {column!r}; it has {', '.join(present) or 'none'}")


def _value(record: Mapping[str, Any], column: str, path: Path, row: int) -> Any:
    value = record.get(column)
    if value is None or value == "":
        raise SlipstreamError(f"{path}, row {row}: column {column!r} is missing; the row has {', '.join(record)}")
    return value


def _number(record: Mapping[str, Any], column: str, path: Path, row: int) -> float:
    value = _value(record, column, path, row)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SlipstreamError(f"{path}, row {row}: {column}={value!r} is no finite number")
    return number


def r_squared(
    rewards_A: Sequence[float] | NDArray[np.float64],
    true_scores_A: Sequence[float] | NDArray[np.float64],
    *,
    weights_A: NDArray[np.float64] | None = None,
) -> float:
    """The share of the true scores' variance that a linear function of the reward explains, 0 to 1.

    1 - Σ w (s - ŝ)² / Σ w (s - s̄)² with ŝ the least-squares line through the rewards, weighted by `weights_A` (all 1
    if unset). 0 if only the rewards are all equal; NaN if the true scores are, since there is nothing to explain.

    Raises: ValueError if the lengths differ or are 0.
    Source: Draper & Smith 1998; arXiv 2409.06957, §4 (weight choice).
    """
    rewards, scores = np.asarray(rewards_A, dtype=np.float64), np.asarray(true_scores_A, dtype=np.float64)
    weights = np.ones(rewards.size) if weights_A is None else weights_A
    if rewards.size == 0 or not rewards.size == scores.size == weights.size:
        raise ValueError(
            f"{rewards.size} rewards, {scores.size} true scores and {weights.size} weights must be as many"
        )
    used = weights > 0
    rewards, scores, weights = rewards[used], scores[used], weights[used] / weights.sum()
    if _all_equal(scores):
        return math.nan
    if _all_equal(rewards):
        return 0.0
    # Neither unit nor origin matters, and squares of values between 0 and 1 don't overflow.
    rewards, scores = (rewards - rewards.min()) / np.ptp(rewards), (scores - scores.min()) / np.ptp(scores)
    rewards, scores = rewards - weights @ rewards, scores - weights @ scores
    explained = (weights @ (rewards * scores)) ** 2 / (weights @ rewards**2)  # of a least-squares line
    return float(np.clip(explained / (weights @ scores**2), 0, 1))


def _all_equal(values: NDArray[np.float64]) -> bool:
    # Not exactly: averages of equal values differ in their last digits, and those would be explained as well.
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def strategy_fit(
    groups: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    strategy: Strategy | None,
    exponent: float = 1.0,
    bins: int | None = 20,
) -> float:
    """R² between reward and true score on the answers that a strategy uses; the strategy with most is promising.

    Args:
        groups: Rewards [N] and true scores [N] of each prompt's answers.
        strategy: None: no filter, every answer counts alike.
        bins: Answers with similar rewards are averaged, and each such average is one point, as in the paper. It
            doesn't say how it groups them; here into so many groups of about equal probability, by the order of their
            rewards, equal rewards together. Groups of equal width would let the few answers that a strategy leaves
            in between count as much as all others. None: every answer is a point.

    The paper draws answers from the filtered policy; here each answer is weighted with its probability of being
    drawn. An average of drawn answers tends to the weighted average, so this is the same without the chance.

    NaN if the points have all the same true score, or are fewer than three: a line fits any two.

    Raises: ValueError if a group has no answers, another number of rewards than of true scores, or a reward that is
        not finite.
    Source: arXiv 2409.06957, §4 (weight choice, table 1) and §5.4 (table 3).
    """
    for rewards_N, scores_N in groups:
        if len(rewards_N) != len(scores_N):
            raise ValueError(f"a group has {len(rewards_N)} rewards but {len(scores_N)} true scores")
    if not groups:
        return math.nan
    weights = np.concatenate([_use(rewards_N, strategy, exponent) for rewards_N, _ in groups])
    rewards = np.concatenate([np.asarray(rewards_N, dtype=np.float64) for rewards_N, _ in groups])
    scores = np.concatenate([np.asarray(scores_N, dtype=np.float64) for _, scores_N in groups])
    if bins is None:
        return r_squared(rewards, scores, weights_A=weights) if np.count_nonzero(weights) > 2 else math.nan
    bin_of = _bins_of_equal_weight(rewards, weights, bins)
    weight_B = np.bincount(bin_of, weights, bins)
    filled = weight_B > 0
    if np.count_nonzero(filled) < 3:
        return math.nan
    reward_B = np.bincount(bin_of, weights * rewards, bins)[filled] / weight_B[filled]
    score_B = np.bincount(bin_of, weights * scores, bins)[filled] / weight_B[filled]
    return r_squared(reward_B, score_B)


def _bins_of_equal_weight(
    rewards_A: NDArray[np.float64], weights_A: NDArray[np.float64], bins: int
) -> NDArray[np.int64]:
    _, value_of = np.unique(rewards_A, return_inverse=True)
    weight_of_value = np.bincount(value_of, weights_A)
    middle = np.cumsum(weight_of_value) - weight_of_value / 2
    bin_of_value: NDArray[np.int64] = np.minimum(middle / weight_of_value.sum() * bins, bins - 1).astype(np.int64)
    bin_of: NDArray[np.int64] = bin_of_value[value_of]
    return bin_of


def _use(rewards_N: Sequence[float], strategy: Strategy | None, exponent: float) -> NDArray[np.float64]:
    if strategy is None:
        return np.full(len(rewards_N), 1 / len(rewards_N))
    return rank_weights(rewards_N, strategy=strategy, exponent=exponent)
