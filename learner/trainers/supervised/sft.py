"""Supervised fine-tuning: cross-entropy of the assistant's tokens, a mean over those of all rows of a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from slipstream.configs import RunConfig
from slipstream.configs.runtime.tracing import span
from slipstream.configs.schema.trainers import DataConfig, SftConfig
from slipstream.learner.data.chat import DemonstrationEncoder, read_demonstration
from slipstream.learner.data.examples import Example, Packed, UnusableRow
from slipstream.learner.metrics.samples import SampleStore
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.trainers.setup import RankSetup, SingleModel
from slipstream.learner.trainers.supervised.base import LossSums, SupervisedTrainer, try_row
from slipstream.learner.trainers.supervised.completions import Prompt, complete, keep_completions
from slipstream.models.row_sources import Row
from slipstream.models.tokenizer import Tokenizer


@dataclass(kw_only=True)
class SftTrainer(SupervisedTrainer[Example]):
    """One rank of a supervised fine-tuning."""

    samples: SampleStore | None
    """Rank 0's; None on other ranks."""
    stops: tuple[int, ...]
    """Tokens that end an answer."""
    _prompts: list[Prompt] | None = field(default=None, init=False)
    """Of the completions; None before the first measurement."""

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

    @classmethod
    def parts(cls, setup: RankSetup, policy: SingleModel) -> dict[str, Any]:
        """The store of the completions, and the model's stop tokens."""
        samples = SampleStore(setup.config.paths.samples, model=setup.initial_model) if setup.world.is_root else None
        return {"samples": samples, "stops": Tokenizer(setup.initial_model).eos_token_ids}

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Answers some of the validation prompts; the answers are kept as samples."""
        options = self.config.learner.trainer
        assert isinstance(options, SftConfig), "the section of this trainer"
        if not options.completions or self.world.sizes.cp > 1:  # a sequence's last token is on another rank then
            return
        if self._prompts is None:
            self._prompts = list(islice(self._find_prompts(), options.completions))
        with span("complete"):
            answers = complete(
                self.policy.model,
                self._prompts,
                tokens=options.completion_tokens,
                stops=self.stops,
                world=self.world,
            )
        if self.samples is not None:
            keep_completions(self.samples, self._prompts, answers, step=self.state.step)

    def _find_prompts(self) -> Iterator[Prompt]:
        """Prompts of the validation rows that can be used and have one."""
        for task, ref in enumerate(self.held_out):
            found = try_row(ref, self.encode, self.config.learner)
            prompt = None if isinstance(found, UnusableRow) else Prompt.of(task, found[-1])
            if prompt is not None:
                yield prompt
