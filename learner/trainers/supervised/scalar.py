"""Models with a scalar head, trained on rows: reward models on preferences, value models on returns.

# A actions, R sequences, P pairs
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.trainers import DataConfig, RewardModelConfig
from slipstream.learner.algorithms.preferences import PreferenceTerms, bradley_terry
from slipstream.learner.data.examples import Packed
from slipstream.learner.data.preferences import (
    PairExample,
    PolicyEncoder,
    RatedExample,
    RewardEncoder,
    read_pair,
    read_rated,
)
from slipstream.learner.models.load import ModelOptions
from slipstream.learner.models.scalar_head import load_scalar_model, save_as_classifier, scalar_values
from slipstream.learner.trainers.setup import RankSetup, SingleModel
from slipstream.learner.trainers.supervised.base import LossSums, RowBatch, SupervisedTrainer
from slipstream.models.row_sources import Row
from slipstream.models.tokenizer import Tokenizer


def _load(setup: RankSetup, *, bias: bool, save_as: Literal["sequences", "tokens"]) -> SingleModel:
    """The initial model with a scalar head, and its optimizer; a collective.

    Raises: ConfigError, on all ranks, when it can't be trained, or saved as a classifier.
    """
    torch.manual_seed(setup.config.run.seed)
    options = ModelOptions.of(setup.config.model, setup.config.learner)
    model = load_scalar_model(setup.initial_model, options, setup.world, bias=bias)
    save_as_classifier(model, save_as)
    return SingleModel.of(setup.config, model)


def _tokenizer(config: RunConfig, model: Path) -> Tokenizer:
    """The tokenizer of a model that can be saved. Raises: ConfigError."""
    lora = config.model.lora
    if lora is not None and lora.export == "adapter":
        raise ConfigError("model.lora.export: adapter would leave the head out; take merged")
    return Tokenizer(model)


@dataclass(kw_only=True)
class RewardModelTrainer(SupervisedTrainer[PairExample]):
    """One rank of the training of a reward model; the loss is a mean over pairs."""

    @classmethod
    def load_model(cls, setup: RankSetup) -> SingleModel:
        """A classifier of sequences without bias, which no difference of rewards would determine."""
        return _load(setup, bias=False, save_as="sequences")

    @classmethod
    def encoder(cls, config: RunConfig, model: Path) -> Callable[[Row, DataConfig], Sequence[PairExample]]:
        """Makes the two sequences of a pair, as the reward `reward_model` makes them of an episode."""
        encode = RewardEncoder(_tokenizer(config, model))
        return lambda row, source: [read_pair(row, source, encode)]

    def terms(self, packed: Packed[PairExample]) -> float:
        """Number of the pairs."""
        return len(packed.examples)

    def loss(self, packed: Packed[PairExample]) -> LossSums:
        """Negative log-likelihood of the preferences under the rewards."""
        assert isinstance(self.options, RewardModelConfig), "the section of this trainer"
        batch = packed.batch
        values_A = scalar_values(self.policy.model, batch)
        rewards_R = torch.zeros_like(values_A).index_copy(0, batch.rows_B[batch.sequence_A], values_A)
        chosen_P, rejected_P = rewards_R[0::2], rewards_R[1::2]
        margin_P = rewards_R.new_tensor([example.margin for example in packed.examples]) * self.options.margin
        terms = bradley_terry(chosen_P, rejected_P, margin_P)
        return LossSums(terms.loss_P.sum(), pair_metrics(terms))


@dataclass(kw_only=True)
class ValueModelTrainer(SupervisedTrainer[RatedExample]):
    """One rank of the training of a value model; the loss is a mean over actions."""

    @classmethod
    def load_model(cls, setup: RankSetup) -> SingleModel:
        """A classifier of tokens."""
        return _load(setup, bias=True, save_as="tokens")

    @classmethod
    def encoder(cls, config: RunConfig, model: Path) -> Callable[[Row, DataConfig], Sequence[RatedExample]]:
        """Makes the sequence of an answer, and the returns of its tokens."""
        encode = PolicyEncoder(_tokenizer(config, model))
        return lambda row, source: read_rated(row, source, encode)

    def loss(self, packed: Packed[RatedExample]) -> LossSums:
        """Half the squared distance of the values to the returns, as the critic's loss in RL without clipping."""
        values_A = scalar_values(self.policy.model, packed.batch)
        returns = [packed.examples[row].returns_A for row in packed.batch.rows_B.tolist()]
        returns_A = torch.from_numpy(np.concatenate([*returns, np.zeros(0, np.float32)])).to(values_A)
        metrics = {"return_mean": returns_A.sum(), "return_square": returns_A.square().sum()}
        return LossSums(0.5 * (values_A - returns_A).square().sum(), metrics)

    def update(self, batch: RowBatch[RatedExample]) -> dict[str, float]:
        """As of the base; of the returns' variance also the share that the values explain."""
        return _explained(super().update(batch))


def _explained(metrics: Mapping[str, float]) -> dict[str, float]:
    explained = dict(metrics)
    square = explained.pop("return_square", None)
    if square is not None:
        variance = square - explained["return_mean"] ** 2
        explained["value_explained"] = 1 - 2 * explained["loss"] / variance if variance > 0 else 0.0
    return explained


def pair_metrics(terms: PreferenceTerms) -> Mapping[str, Tensor]:
    """Sums over pairs of the rewards, and of how often the chosen answer's is higher."""
    chosen_P, rejected_P = terms.chosen_reward_P, terms.rejected_reward_P
    return {
        "accuracy": (chosen_P > rejected_P).float().sum(),
        "chosen_reward": chosen_P.sum(),
        "rejected_reward": rejected_P.sum(),
    }
