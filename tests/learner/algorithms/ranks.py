"""Two ranks as threads of the test."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
DEADLINE_S = 20.0


def on_two_ranks(work: Callable[[int, Callable[[Tensor], Tensor]], T]) -> list[T]:
    """Results of `work(rank, total)` on two ranks, where `total` sums a tensor over both, as a collective does."""
    own: list[Tensor] = [torch.empty(0), torch.empty(0)]
    barrier = Barrier(2, timeout=DEADLINE_S)

    def run(rank: int) -> T:
        def total(values: Tensor) -> Tensor:
            own[rank] = values
            barrier.wait()
            both = own[0] + own[1]
            barrier.wait()
            return both

        return work(rank, total)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))
