"""Two ranks with half of the groups each have the advantages that one has with all of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from torch import Tensor

from slipstream.learner.algorithms.advantages.base import AdvantageInputs
from slipstream.learner.algorithms.registry import ADVANTAGES
from tests.learner.advantages.batches import SETTINGS, golden_batch, rows

OF_ALL_RANKS = ["gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "gae"]
DEADLINE_S = 20.0


class TwoRanks:
    """Sums tensors of two threads, as a collective would."""

    def __init__(self) -> None:
        self._mine: list[Tensor] = [torch.empty(0), torch.empty(0)]
        self._barrier = Barrier(2, timeout=DEADLINE_S)

    def total(self, rank: int) -> Callable[[Tensor], Tensor]:
        """The rank's side of the sum."""

        def summed(values: Tensor) -> Tensor:
            self._mine[rank] = values
            self._barrier.wait()
            both = self._mine[0] + self._mine[1]
            self._barrier.wait()
            return both

        return summed


def part(inputs: AdvantageInputs, groups: list[int], total: Callable[[Tensor], Tensor]) -> AdvantageInputs:
    """Some groups, numbered from 0."""
    of_the_rank_B = torch.isin(inputs.group_B, torch.tensor(groups)).nonzero()[:, 0]
    chosen = rows(inputs, of_the_rank_B)
    numbers_B = torch.bucketize(chosen.group_B, torch.tensor(groups))
    return replace(chosen, group_B=numbers_B, groups=len(groups), total=total)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_two_ranks_have_the_advantages_of_one(name: str) -> None:
    inputs = golden_batch()
    ranks = TwoRanks()
    # The group without spread is on one rank, with all that GPG makes up for.
    parts = [part(inputs, [0], ranks.total(0)), part(inputs, [1, 2, 3], ranks.total(1))]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda chosen: ADVANTAGES[name](chosen, **SETTINGS[name]), parts))
    torch.testing.assert_close(torch.cat(both), ADVANTAGES[name](inputs, **SETTINGS[name]))


@pytest.mark.parametrize("name", OF_ALL_RANKS)
def test_a_rank_on_its_own_would_have_others(name: str) -> None:
    inputs = golden_batch()
    here = part(inputs, [1, 2, 3], inputs.total)
    ours_BT = ADVANTAGES[name](here, **SETTINGS[name])
    assert (ours_BT - ADVANTAGES[name](inputs, **SETTINGS[name])[6:]).abs().max() > 1e-3
