"""What the ranks tell each other of the last evaluation."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from slipstream.learner import distributed
from slipstream.learner.distributed import World
from slipstream.learner.evaluation import share_ids

DEADLINE_S = 30.0


@pytest.fixture
def ranks(world: World, monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """Two that share a store, and ask it often."""
    monkeypatch.setattr(distributed, "HEAR_S", 0.05)
    store = dist.HashStore()
    return [replace(world, rank=rank, size=2, store=store) for rank in (0, 1)]


def test_a_rank_hears_of_rank_0s_ids_however_late_they_come(
    ranks: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, other = ranks
    hear = World.hear
    unheard: list[str] = []

    def hear_late(self: World, key: str) -> str | None:
        if len(unheard) == 2:
            share_ids(root, ["7", "8"], deadline_s=DEADLINE_S)
        said = hear(self, key)
        if said is None:
            unheard.append(key)
        return said

    monkeypatch.setattr(World, "hear", hear_late)
    assert share_ids(other, None, deadline_s=DEADLINE_S) == ["7", "8"]
    assert len(unheard) == 2


def test_a_rank_that_hears_nothing_before_the_deadline_goes_on_without_ids(ranks: list[World]) -> None:
    assert share_ids(ranks[1], None, deadline_s=0.01) == []
