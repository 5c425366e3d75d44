"""What the learner thinks of a few tokens: an engine that holds the same weights thinks the same."""

import numpy as np
import torch
from torch import nn

from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.weights import Probe
from slipstream.learner.packing import pack
from slipstream.learner.scoring import score_actions


class Prober:
    """Scores the same tokens under whatever weights the model has."""

    def __init__(self, model: nn.Module, *, tokens: int, vocabulary: int, device: torch.device) -> None:
        """Draws `tokens` token ids at random, the same on every rank: all of the vocabulary is as likely."""
        self._model = model
        self._device = device
        self._token_ids = np.random.default_rng(0).integers(vocabulary, size=tokens)
        mask = np.ones(tokens, dtype=m.MASK_DTYPE)
        mask[0] = 0
        trajectory = m.Trajectory(
            token_ids=self._token_ids.astype(m.TOKEN_DTYPE).tobytes(),
            action_mask=mask.tobytes(),
            behaviour_logprobs=np.zeros(tokens, dtype=m.LOGPROB_DTYPE).tobytes(),
            spans=[],
            reward=0.0,
            scores={},
            finish_reason="length",
        )
        (self._batch,) = pack([trajectory], token_budget=tokens)

    @torch.no_grad()
    def score(self) -> Probe:
        """The tokens and their log-probs at temperature 1; a collective."""
        scores = score_actions(self._model, self._batch.to(self._device), temperature=1.0)
        return Probe(token_ids=self._token_ids.tolist(), logprobs=scores.logprobs_A.tolist())
