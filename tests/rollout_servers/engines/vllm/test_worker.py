"""What a vLLM worker does beside loading weights."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

# vLLM and what it imports warn of their own futures.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize(("has_head", "has_embedding"), [(False, True), (True, False), (False, False)])
def test_a_pipeline_rank_that_lacks_the_head_or_the_embedding_has_nothing_to_tie(
    has_head: bool, has_embedding: bool
) -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    from slipstream.rollout_servers.engines.vllm.worker import tie_head

    head = nn.Linear(2, 2) if has_head else PPMissingLayer()
    embedding = nn.Embedding(2, 2) if has_embedding else PPMissingLayer()
    rank: Any = SimpleNamespace(lm_head=head, model=SimpleNamespace(embed_tokens=embedding))
    tie_head(rank)
    assert (rank.lm_head, rank.model.embed_tokens) == (head, embedding)
