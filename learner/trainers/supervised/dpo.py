"""Training of a policy on preferences: DPO, IPO, SimPO and KTO, see `algorithms.preferences`.

The reference is the policy before its first step (with LoRA its base). It scores all answers that will be trained on
at the start, so there is never a second model.

# A actions, R answers, P pairs
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from slipstream.configs import RunConfig
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.trainers import DataConfig, DpoConfig, KtoLoss, PreferenceLoss
from slipstream.learner.algorithms.preferences import Answers, PreferenceTerms, dpo, ipo, kto, kto_baseline, simpo
from slipstream.learner.data.examples import Example, Packed, UnusableRow
from slipstream.learner.data.packing import MicroBatch, TokenSequence, aligned, pack
from slipstream.learner.data.preferences import PolicyEncoder, VerdictExample, mismatched, read_pair, read_verdicts
from slipstream.learner.data.row_order import RowRef
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.fsdp import reshard
from slipstream.learner.trainers.setup import RankSetup
from slipstream.learner.trainers.supervised.base import TRIED_ROWS, LossSums, RowBatch, SupervisedTrainer, try_row
from slipstream.learner.trainers.supervised.scalar import pair_metrics
from slipstream.models.row_sources import Row
from slipstream.models.tokenizer import Tokenizer

log = get_log("learner.preferences")

PAIR_LOSSES: Mapping[str, Callable[..., PreferenceTerms]] = {"dpo": dpo, "ipo": ipo, "simpo": simpo}


@dataclass(kw_only=True)
class DpoTrainer(SupervisedTrainer[Example]):
    """One rank of a training on preferences; the loss is a mean over pairs or, of KTO, over answers."""

    references: dict[str, float] = field(default_factory=dict, init=False)
    """log π_ref of answers by `_key`, on all ranks."""
    baseline: Tensor = field(default_factory=lambda: torch.zeros(()), init=False)
    """KTO's, of the rows that were prepared last, under the policy of that moment."""

    @classmethod
    def from_setup(cls, setup: RankSetup) -> Self:
        """As of the base; the reference has scored the answers. A collective."""
        trainer = super().from_setup(setup)
        if trainer.loss_config.name != "simpo":
            trainer.score_references()
        return trainer

    @classmethod
    def encoder(cls, config: RunConfig, model: Path) -> Callable[[Row, DataConfig], Sequence[Example]]:
        """Makes the two answers of a pair or, of KTO, each answer alone."""
        options, encode = config.learner.trainer, PolicyEncoder(Tokenizer(model))
        assert isinstance(options, DpoConfig), "the section of this trainer"
        if isinstance(options.loss, KtoLoss):
            return lambda row, source: read_verdicts(row, source, encode)
        return lambda row, source: [read_pair(row, source, encode)]

    @property
    def loss_config(self) -> PreferenceLoss:
        """The section of the loss."""
        assert isinstance(self.options, DpoConfig), "the section of this trainer"
        return self.options.loss

    def terms(self, packed: Packed[Example]) -> float:
        """Number of the pairs or, of KTO, of the answers."""
        return len(packed.examples)

    def prepare(self, refs: Sequence[RowRef]) -> RowBatch[Example]:
        """As of the base; of KTO also the baseline of these rows."""
        if isinstance(self.loss_config, KtoLoss):
            own = list(refs)[self.world.data_rank :: self.world.data_size]
            self.baseline = self._baseline([sequence for ref in own for sequence in self._mismatched(ref)])
        return super().prepare(refs)

    def loss(self, packed: Packed[Example]) -> LossSums:
        """The configured loss, summed over the pairs or answers."""
        answers, config = self._answers(packed), self.loss_config
        if isinstance(config, KtoLoss):
            return self._kto(answers, packed, config)
        chosen, rejected = answers.pairs()
        terms = PAIR_LOSSES[config.name](chosen, rejected, **config.arguments)
        metrics = {**pair_metrics(terms), "chosen_logprob": chosen.logprobs_R.detach().sum()}
        return LossSums(terms.loss_P.sum(), metrics)

    @torch.no_grad()
    def score_references(self) -> None:
        """Scores all answers of the run under the initial policy; a collective."""
        refs, chunk = list(self._refs()), self.options.rows_per_step
        if self.world.is_root:
            log.info("the initial policy scores the answers, as the reference", rows=len(refs))
        for first in range(0, len(refs), chunk):
            own = refs[first : first + chunk][self.world.data_rank :: self.world.data_size]
            sequences = [sequence for ref in own for sequence in self._sequences(ref)]
            scored = self._score(sequences).tolist()
            for of_rank in self.world.gather(dict(zip(map(_key, sequences), scored, strict=True))):
                self.references.update(of_rank)

    def _refs(self) -> Iterator[RowRef]:
        """All rows of the run, each once: those of the steps, and the validation rows."""
        seen = set[tuple[int, int]]()
        for step in range(self.config.learner.steps):
            if len(seen) == self.order.rows:
                break
            for ref in self.order.step(step, rows=self.options.rows_per_step):
                place = (id(ref.source), ref.index)
                if place not in seen:
                    seen.add(place)
                    yield ref
        yield from self.held_out

    def _sequences(self, ref: RowRef) -> list[TokenSequence]:
        """All sequences of a row that the reference scores; none of one that can't be used."""
        examples = self._usable(ref)
        own = [sequence for example in examples for sequence in example.sequences]
        return own + (self._mismatched(ref) if isinstance(self.loss_config, KtoLoss) else [])

    def _mismatched(self, ref: RowRef) -> list[TokenSequence]:
        """The prompt of a row with the answer of another one, far away in its source: neighbours may share prompts."""
        examples, rows = self._usable(ref), len(ref.source)
        if not examples:
            return []
        for offset in range(TRIED_ROWS):
            if others := self._usable(RowRef(ref.source, (ref.index + max(1, rows // 2) + offset) % rows)):
                prompt, answer = examples[0].sequences[0], others[0].sequences[0]
                return [mismatched(prompt, answer, most_tokens=self.config.learner.token_budget)]
        return []

    def _usable(self, ref: RowRef) -> Sequence[Example]:
        found = try_row(ref, self.encode, self.config.learner)
        return () if isinstance(found, UnusableRow) else found

    @torch.no_grad()
    def _baseline(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """KTO's baseline of this rank's mismatched answers and those of the others; a collective."""
        logprobs_R = self._score(sequences)
        reference_R = self._reference(sequences, logprobs_R)
        sums = self.world.sum(torch.stack([(logprobs_R - reference_R).sum(), logprobs_R.new_tensor(len(sequences))]))
        return kto_baseline(*sums)

    def _kto(self, answers: Answers, packed: Packed[Example], config: KtoLoss) -> LossSums:
        verdicts = [isinstance(example, VerdictExample) and example.desirable for example in packed.examples]
        desirable_R = torch.tensor(verdicts, dtype=torch.bool, device=answers.logprobs_R.device)
        terms = kto(answers, desirable_R, self.baseline, **config.arguments)
        is_right_R = (answers.log_ratios_R.detach() > self.baseline) == desirable_R
        metrics = {"accuracy": is_right_R.float().sum(), "kl": self.baseline * len(verdicts)}
        return LossSums(terms.loss_P.sum(), metrics)

    def _answers(self, packed: Packed[Example]) -> Answers:
        """The answers of a micro-batch in the order of the examples' sequences."""
        sequences = [sequence for example in packed.examples for sequence in example.sequences]
        logprobs_R = self._logprobs(packed.batch)
        tokens_R = torch.tensor([int(sequence.action_mask[1:].sum()) for sequence in sequences]).to(logprobs_R)
        return Answers(logprobs_R, self._reference(sequences, logprobs_R), tokens_R)

    def _reference(self, sequences: Sequence[TokenSequence], like_R: Tensor) -> Tensor:
        if self.loss_config.name == "simpo":
            return torch.zeros_like(like_R)
        return like_R.new_tensor([self.references[_key(sequence)] for sequence in sequences])

    def _score(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """Log-probs of this rank's answers; a collective, to be called without gradients."""
        batches = pack(sequences, token_budget=self.config.learner.token_budget) if sequences else []
        logprobs_R = torch.zeros(len(sequences), device=self.world.device)
        for batch in aligned(batches, self.world):
            logprobs_R[batch.rows_B] = self._sums(batch)
        reshard(self.policy.model)
        return logprobs_R

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs of a micro-batch's answers by their rows, shape [R], with gradient."""
        sums_B = self._sums(batch)
        return torch.zeros_like(sums_B).index_copy(0, batch.rows_B, sums_B)

    def _sums(self, batch: MicroBatch) -> Tensor:
        """Log-probs of a micro-batch's answers as they are packed, shape [R], with gradient."""
        scores = score_actions(
            self.policy.model,
            batch,
            temperature=1.0,
            whole_vocabulary=True,
            kept_bytes=self.config.learner.logits_bytes,
        )
        return batch.padded(scores.logprobs_A).sum(1)


def _key(sequence: TokenSequence) -> str:
    """Hash of an answer and its prompt."""
    ids, mask = np.asarray(sequence.token_ids, dtype=np.int64), np.asarray(sequence.action_mask, dtype=bool)
    return blake2b(ids.tobytes() + mask.tobytes(), digest_size=16).hexdigest()
