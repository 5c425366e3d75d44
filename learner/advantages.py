"""How much better than expected each answer was."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6


def grpo(rewards: Sequence[float]) -> NDArray[np.float32]:
    """Group-relative advantages (r - mean) / (std + 1e-6) of one group's answers, shape [answers].

    The standard deviation is the sample's (n - 1). Answers that all got the same reward have advantage 0.
    Source: Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300, section 4.1.2.
    """
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    advantages: NDArray[np.float32] = (centred / (values.std(ddof=1) + EPSILON)).astype(np.float32)
    return advantages
