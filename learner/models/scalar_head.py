"""Models with a scalar head: values of the states before actions, and rewards of whole answers.

In files they are classifiers of transformers with one label, `score`: of tokens (a critic) or of sequences (a reward
model).

# N packed input tokens, A actions, D hidden size
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.models.layers import backbone_of, decoder_of
from slipstream.learner.models.load import ModelOptions, build_model, load_and_check
from slipstream.learner.models.lora import add_adapters
from slipstream.learner.models.weight_files import WeightLoader
from slipstream.learner.parallel.context import context_of
from slipstream.learner.parallel.mesh import World

WEIGHT, BIAS = "score.weight", "score.bias"
"""Names of the head's tensors in files, and in the model."""
CLASSIFIERS: Mapping[str, Any] = {
    "sequences": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "tokens": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}


class ScalarModel(nn.Module):
    """The backbone of a language model with a head of one output; parameters have the names of a classifier's."""

    def __init__(self, whole: Any, *, bias: bool) -> None:
        """Args: whole: the language model, of transformers."""
        super().__init__()
        self._backbone: str = whole.base_model_prefix
        self.add_module(self._backbone, backbone_of(whole))
        self.score = nn.Linear(whole.config.get_text_config(decoder=True).hidden_size, 1, bias=bias)
        # The first values are 0: those of a random head would only add noise to the first advantages.
        for parameter in self.score.parameters():
            nn.init.zeros_(parameter)
        self.config = whole.config
        self._weight_conversions = whole._weight_conversions

    @property
    def base_model(self) -> Any:
        """The model without its head."""
        return self.get_submodule(self._backbone)

    def get_output_embeddings(self) -> nn.Linear:
        """The head, by transformers' name for it."""
        return self.score

    def forward(self, batch: MicroBatch) -> Tensor:
        """The head's output before each action, shape [A, 1]."""
        states_1ND = self.base_model(**batch.model_inputs()).last_hidden_state
        values_A1: Tensor = self.score(states_1ND[0].index_select(0, batch.action_positions_S))
        return values_A1


def load_scalar_model(path: Path, options: ModelOptions, world: World, *, bias: bool) -> ScalarModel:
    """The model of `path`, sharded over all ranks; its head is that of the files, or else gives 0. A collective.

    Raises: ConfigError, on all ranks, when the learner can't train it.
    """
    loader = build_model(path, options, world)
    if options.lora is not None:
        add_adapters(loader.model, decoder_of(loader.model), options.lora, dtype=options.dtype)
    model = ScalarModel(loader.model, bias=bias)
    _fill_head(model, loader)
    load_and_check(loader, model, model, options, world)
    return model


@torch.no_grad()
def _fill_head(model: ScalarModel, loader: WeightLoader) -> None:
    """Copies the head of the files, if these have one. Raises: ConfigError for several labels."""
    names = loader.files.names()
    if WEIGHT not in names:
        return
    weight = loader.files.read(WEIGHT)
    if weight.shape != model.score.weight.shape:
        raise ConfigError(f"{loader.path}: its head has {len(weight)} labels; choose a model with one")
    model.score.weight.copy_(weight)
    if BIAS in names and model.score.bias is not None:
        model.score.bias.copy_(loader.files.read(BIAS))


def scalar_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The head's output before each action, fp32, shape [A]; a collective where tokens are split over ranks."""
    share = batch.split(context_of(model))
    values_A1: Tensor = model(share)
    return share.of_whole(values_A1.float().squeeze(-1))


def save_as_classifier(model: ScalarModel, of: Literal["sequences", "tokens"]) -> None:
    """Gives a model the configuration with which transformers and vLLM load its files as a classifier.

    Raises: ConfigError when transformers has none of its architecture.
    """
    known = type(model.config)
    if known not in CLASSIFIERS[of]:
        raise ConfigError(f"transformers has no classifier of {of} for {model.config.model_type}; choose another model")
    config = copy.deepcopy(model.config)
    config.architectures = [CLASSIFIERS[of][known].__name__]
    config.num_labels = 1
    config.classifier_dropout = 0.0
    model.config = config
