"""What the learner thinks of a few tokens: an engine that holds the same weights thinks the same."""

import numpy as np
import torch
from torch import nn

from slipstream.buffer.wire.weights.protocol import Probe
from slipstream.learner.algorithms.scoring import score_actions
from slipstream.learner.data.packing import all_actions, pack


class Prober:
    """Scores the same tokens under whatever weights the model has."""

    def __init__(self, model: nn.Module, *, tokens: int, vocabulary: int, device: torch.device) -> None:
        """Draws `tokens` token ids at random, the same on every rank: all of the vocabulary is as likely."""
        self._model = model
        self._device = device
        self._token_ids = np.random.default_rng(0).integers(vocabulary, size=tokens)
        (self._batch,) = pack([all_actions(self._token_ids)], token_budget=tokens)

    @torch.no_grad()
    def score(self) -> Probe:
        """The tokens and their log-probs at temperature 1; a collective."""
        scores = score_actions(self._model, self._batch.to(self._device), temperature=1.0)
        return Probe(token_ids=self._token_ids.tolist(), logprobs=scores.logprobs_A.tolist())
