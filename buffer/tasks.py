"""The order of tasks: a seeded permutation for each epoch, computed where it is needed and stored nowhere."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=4)
def task_order(tasks: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The task indices in the order in which the epoch issues them, shape [tasks], read-only."""
    order = np.random.default_rng([seed, epoch]).permutation(tasks)
    order.setflags(write=False)  # callers share it through the cache
    return order
