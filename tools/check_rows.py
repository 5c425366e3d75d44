"""Check of a training on rows of files: its model, and some rows of each source as the token sequences they become."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.trainers import DataConfig, FileTrainer

if TYPE_CHECKING:
    from slipstream.learner.data.examples import Example
    from slipstream.learner.data.row_order import Source
    from slipstream.models.row_sources import Row
    from slipstream.models.tokenizer import Tokenizer

TRIED_ROWS: Final = 256
"""Rows of each source, spread over it."""
OPEN, CLOSE = "⟦", "⟧"
"""Marks around the tokens in the loss."""
SHOWN_CHARACTERS: Final = 2000


@dataclass
class RowsReport:
    """Findings about rows."""

    counts: dict[str, int] = field(default_factory=dict)
    """Training rows and validation rows."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Of each source: rows, how many were tried, how many of these are left out by reason, and one that is not."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The findings for a terminal, without problems and warnings."""
        lines = [f"rows: {self.counts['train']:,} to train on, {self.counts['validation']:,} of validation"]
        for source in self.sources:
            left_out = ", ".join(f"{rows} {reason}" for reason, rows in source["left_out"].items()) or "none"
            lines.append(
                f"\n{source['path']}: {source['rows']:,} rows; of {source['tried']} tried, left out: {left_out}"
            )
            if (example := source["example"]) is not None:
                lines.append(
                    f"{example['row']}: {example['tokens']:,} tokens, {example['in_loss']:,} of them in the loss"
                    f" ({OPEN}…{CLOSE})"
                )
                lines += [f"  | {line}" for line in example["text"][:SHOWN_CHARACTERS].splitlines()]
        return lines


def check_rows(config: RunConfig, model: Path) -> RowsReport:
    """Tries rows of all sources. Raises: ConfigError when files can't be read, or the model has no tokenizer."""
    # Imported here: transformers and torch take seconds.
    from slipstream.learner.trainers.assemble import find_trainer
    from slipstream.learner.trainers.supervised.base import SupervisedTrainer, open_trainer_rows
    from slipstream.models.tokenizer import Tokenizer

    kind, options = find_trainer(config.learner.trainer), config.learner.trainer
    report = RowsReport()
    if not (issubclass(kind, SupervisedTrainer) and isinstance(options, FileTrainer)):
        report.warnings.append(f"learner.trainer={options.name} reads rows of its own, which are not checked")
        report.counts = {"train": 0, "validation": 0}
        return report
    order, held_out = open_trainer_rows(options, model, config.run.seed)
    report.counts = {"train": order.rows, "validation": len(held_out)}
    encode, tokenizer = kind.encoder(config, model), Tokenizer(model)
    sources = {f"learner.trainer.data.{number}": source for number, source in enumerate(order.sources)}
    held = dict.fromkeys(ref.source for ref in held_out if ref.source not in order.sources)
    sources |= {f"learner.trainer.validation.data.{number}": source for number, source in enumerate(held)}
    for key, source in sources.items():
        found = _try_source(source, encode, config, tokenizer)
        report.sources.append(found)
        left_out = sum(found["left_out"].values())
        if left_out == found["tried"]:
            report.problems.append(f"{key}: none of {left_out} rows can be used: {found['reason']}")
        elif left_out:
            report.warnings.append(
                f"{key}: {left_out} of {found['tried']} rows that were tried are left out, such as {found['reason']}"
            )
    return report


def _try_source(
    source: "Source",
    encode: "Callable[[Row, DataConfig], Sequence[Example]]",
    config: RunConfig,
    tokenizer: "Tokenizer",
) -> dict[str, Any]:
    """Rows of a source, spread over it: what is left out, and the first that is not."""
    from slipstream.learner.data.examples import UnusableRow
    from slipstream.learner.data.row_order import RowRef
    from slipstream.learner.trainers.supervised.base import try_row

    step = max(1, len(source) // TRIED_ROWS)
    refs = [RowRef(source, index) for index in range(0, len(source), step)][:TRIED_ROWS]
    left_out, reason, example = Counter[str](), "", None
    for ref in refs:
        found = try_row(ref, encode, config.learner)
        if isinstance(found, UnusableRow):
            left_out[found.reason] += 1
            reason = reason or f"{ref.place} ({found.reason}): {found}"
        elif example is None:
            sequences = found[0].sequences
            example = {
                "row": ref.place,
                "tokens": sum(len(each.token_ids) for each in sequences),
                "in_loss": sum(int(each.action_mask[1:].sum()) for each in sequences),
                "text": "\n".join(
                    _marked(tokenizer, each.token_ids.tolist(), each.action_mask.tolist()) for each in sequences
                ),
            }
    return {
        "path": source.config.name,
        "rows": len(source),
        "tried": len(refs),
        "left_out": dict(left_out),
        "reason": reason,
        "example": example,
    }


def _marked(tokenizer: "Tokenizer", token_ids: Sequence[int], mask: Sequence[bool]) -> str:
    """The text of a sequence with marks around the tokens in the loss."""
    text, start = "", 0
    for end in range(1, len(token_ids) + 1):
        if end == len(token_ids) or mask[end] != mask[start]:
            part = tokenizer.decode_whole(token_ids[start:end])
            text += f"{OPEN}{part}{CLOSE}" if mask[start] else part
            start = end
    return text
