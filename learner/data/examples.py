"""Examples of rows: token sequences that are trained on together, on one rank and in one micro-batch.

# A actions (tokens in the loss), B sequences
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.learner.data.balance import MicroBatchPlan, Work
from slipstream.learner.data.packing import MicroBatch, TokenSequence, pack

Reason = Literal["malformed", "too_long", "no_target", "template", "images", "no_preference"]


class UnusableRow(SlipstreamError):
    """A row can't be trained on; it is left out.

    Attributes:
        reason: the reason under which it is counted.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Example:
    """The token sequences of a row, or of a part of one; subclasses add what their losses need."""

    sequences: Sequence[TokenSequence]

    @property
    def work(self) -> Work:
        """The work of its sequences."""
        works = [Work.of_length(len(sequence.token_ids) - 1) for sequence in self.sequences]
        return Work(sum(work.tokens for work in works), sum(work.squares for work in works))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sequence.token_ids) for sequence in self.sequences)


E = TypeVar("E", bound=Example)


@dataclass(frozen=True)
class Packed(Generic[E]):
    """Examples in one micro-batch."""

    batch: MicroBatch
    """Its `rows_B` are indices among the sequences of all examples, in their order."""
    examples: Sequence[E]
    """Empty on a rank that has run out of work."""


def pack_examples(examples: Sequence[E], *, token_budget: int, plan: MicroBatchPlan) -> list[Packed[E]]:
    """Packs examples into micro-batches of at most `token_budget` input tokens; a larger one gets one of its own."""
    packed = []
    for chosen in plan.fill([example.work for example in examples], budget=token_budget):
        inside = [examples[index] for index in chosen]
        sequences = [sequence for example in inside for sequence in example.sequences]
        (batch,) = pack(sequences, token_budget=sum(len(sequence.token_ids) for sequence in sequences))
        packed.append(Packed(batch, inside))
    return packed
