"""Is a model in a padded batch with a cache what it is alone and without one? Some look at their padding."""

import torch

from slipstream.configs.errors import ConfigError
from slipstream.rollout_servers.engines.hf.batch import Batch
from slipstream.rollout_servers.engines.hf.policy import Policy

TOLERANCE = {"float32": 1e-2, "bfloat16": 0.1}
"""Mean |Δ| of log-probs: above what rounding does, and below what a model does that looks at its padding."""

_LONG, _SHORT = 12, 5  # tokens


def check_padding(policy: Policy, *, dtype: str) -> None:
    """Generates a token for two sequences of different lengths.

    Raises: ConfigError if the model finds the next ones likelier, or less likely, than without padding and cache.
    """
    sequences = [[place % policy.vocabulary for place in range(3, 3 + length)] for length in (_LONG, _SHORT)]
    batch, first_BV = Batch.of(policy, sequences)
    next_tokens = first_BV.argmax(-1).tolist()
    found_B2V = torch.stack([first_BV, batch.advance(next_tokens)], dim=1).log_softmax(-1)
    expected_B2V = torch.stack(
        [policy.distributions([*each, token])[-2:] for each, token in zip(sequences, next_tokens, strict=True)]
    )
    off = (found_B2V - expected_B2V).abs().mean().item()
    if not off <= TOLERANCE[dtype]:  # NaN neither
        raise ConfigError(
            f"the model's log-probs are off by {off:.2g} when it runs in a padded batch, so "
            "rollout.engine.name=hf can't serve it; choose another engine"
        )
