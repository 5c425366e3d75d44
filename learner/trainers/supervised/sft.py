"""Supervised fine-tuning: cross-entropy of the assistant's tokens, a mean over those of all rows of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.configs import RunConfig
from slipstream.configs.schema.trainers import DataConfig, SftConfig
from slipstream.learner.data.chat import DemonstrationEncoder, read_demonstration
from slipstream.learner.data.examples import Example, Packed
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.trainers.supervised.base import LossSums, SupervisedTrainer
from slipstream.models.row_sources import Row
from slipstream.models.tokenizer import Tokenizer


@dataclass(kw_only=True)
class SftTrainer(SupervisedTrainer[Example]):
    """One rank of a supervised fine-tuning."""

    @classmethod
    def encoder(cls, config: RunConfig, model: Path) -> Callable[[Row, DataConfig], Sequence[Example]]:
        """Makes the token sequences of demonstrations."""
        options = config.learner.trainer
        assert isinstance(options, SftConfig), "the section of this trainer"
        encoder = DemonstrationEncoder(Tokenizer(model), options.assistant_only_loss)

        def encode(row: Row, source: DataConfig) -> Sequence[Example]:
            return [Example([sequence]) for sequence in encoder.encode(read_demonstration(row, source))]

        return encode

    def loss(self, packed: Packed[Example]) -> LossSums:
        """Cross-entropy, summed over the targets."""
        scores = score_actions(
            self.policy.model,
            packed.batch,
            temperature=1.0,
            whole_vocabulary=True,
            kept_bytes=self.config.learner.logits_bytes,
        )
        return LossSums(-scores.logprobs_A.sum())
