"""Packing keeps every token and stays within its budget."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.wire import messages as m
from slipstream.learner.data.packing import MicroBatch, TokenSequence, all_actions, empty_micro_batch, pack
from slipstream.learner.data.rows import build_rows
from slipstream.learner.parallel.context import ContextParallel

BUDGET = 16
GROUP: Any = object()
"""No collective is called."""


@st.composite
def sequence(draw: st.DrawFn) -> TokenSequence:
    """Any mask, also of several turns; that of the first token is ignored."""
    tokens = draw(st.integers(2, 24))
    mask = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens))
    return TokenSequence(np.array(ids, dtype=m.TOKEN_DTYPE), np.array(mask, dtype=m.MASK_DTYPE))


SEQUENCES = st.lists(sequence(), min_size=1, max_size=12)


def numbered(*lengths: int) -> list[TokenSequence]:
    return [all_actions(np.arange(length)) for length in lengths]


def group_of(sequences: list[TokenSequence], *spans: m.VersionSpan) -> m.Group:
    trajectories = [
        m.Trajectory(
            token_ids=each.token_ids.astype(m.TOKEN_DTYPE).tobytes(),
            action_mask=each.action_mask.astype(m.MASK_DTYPE).tobytes(),
            behaviour_logprobs=np.zeros(len(each.token_ids), dtype=m.LOGPROB_DTYPE).tobytes(), spans=list(spans),
            reward=0.0, scores={}, finish_reason="stop",
        )
        for each in sequences
    ]  # fmt: skip
    return m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=trajectories)


def unpacked(batch: MicroBatch) -> list[tuple[int, list[int], list[tuple[int, int]]]]:
    """Row and inputs of each sequence, and position and token of each of its actions."""
    found, start = [], 0
    actions = list(zip(batch.action_positions_S.tolist(), batch.actions_S.tolist(), strict=True))
    for number, length in enumerate(batch.segment_lengths if batch.rows_B.numel() else ()):
        own = [(at - start + 1, token) for at, token in actions if start <= at < start + length]
        assert batch.position_ids_1N[0, start : start + length].tolist() == list(range(length))
        assert batch.action_index_A[batch.sequence_A == number].tolist() == list(range(len(own)))
        found.append((int(batch.rows_B[number]), batch.input_ids_1N[0, start : start + length].tolist(), own))
        start += length
    assert sum(batch.segment_lengths) == batch.input_ids_1N.shape[1] == batch.position_ids_1N.shape[1]
    assert sum(len(own) for *_, own in found) == batch.actions == len(actions)
    return found


def expected(row: int, sequence: TokenSequence) -> tuple[int, list[int], list[tuple[int, int]]]:
    tokens = sequence.token_ids.tolist()
    return row, tokens[:-1], [(at, tokens[at]) for at in range(1, len(tokens)) if sequence.action_mask[at]]


@given(SEQUENCES)
def test_every_sequence_is_packed_exactly_once(sequences: list[TokenSequence]) -> None:
    batches = pack(sequences, token_budget=BUDGET, first_row=5)
    packed = [each for batch in batches for each in unpacked(batch)]
    assert sorted(packed) == [expected(5 + number, each) for number, each in enumerate(sequences)]
    for batch in batches:
        assert sum(batch.segment_lengths) <= BUDGET or len(batch.segment_lengths) == 1


@given(SEQUENCES)
def test_action_values_round_trip_through_rows(sequences: list[TokenSequence]) -> None:
    rows = build_rows([(group_of(sequences), 1.0)], terms=())
    batches = pack(sequences, token_budget=BUDGET)
    numbers_BT = torch.zeros_like(rows.mask_BT)
    for batch in batches:
        batch.put(numbers_BT, 1.0 + torch.arange(batch.actions) + 100 * batch.rows_B[batch.sequence_A])
    assert torch.equal(numbers_BT > 0, rows.mask_BT > 0)
    for batch in batches:
        values_A = 1.0 + torch.arange(batch.actions) + 100 * batch.rows_B[batch.sequence_A]
        assert torch.equal(batch.padded(values_A), batch.of_step(numbers_BT))


def test_sequences_share_micro_batch_where_they_fit() -> None:
    batches = pack(numbered(5, 40, 5), token_budget=BUDGET)
    assert [batch.segment_lengths for batch in batches] == [(39,), (4, 4)]
    (batch,) = pack(numbered(3, 9, 7), token_budget=BUDGET)
    assert batch.segment_lengths == (8, 6, 2)


def test_action_without_span_has_version_minus_one() -> None:
    group = group_of(numbered(5), m.VersionSpan(version=7, start=1, end=3))
    assert build_rows([(group, 1.0)], terms=()).versions_BT.tolist() == [[7, 7, -1, -1]]


def test_boundaries_are_cumulative_lengths() -> None:
    (batch,) = pack(numbered(3, 9), token_budget=BUDGET)
    boundaries = batch.boundaries()
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert boundaries[name].tolist() == [0, 8, 10]
        assert boundaries[name].dtype == torch.int32
    assert boundaries["max_length_q"] == boundaries["max_length_k"] == 8


def test_empty_micro_batch_has_one_token_and_no_action() -> None:
    batch = empty_micro_batch().to(torch.device("cpu"))
    assert unpacked(batch) == []
    assert batch.actions == 0
    assert batch.input_ids_1N.shape == (1, 1)
    assert batch.of_step(torch.ones(3, 4)).numel() == 0


@given(SEQUENCES, st.integers(2, 5))
def test_shares_hold_every_token_and_action_once(sequences: list[TokenSequence], ranks: int) -> None:
    (batch,) = pack(sequences, token_budget=sum(len(each.token_ids) for each in sequences))
    contexts = [ContextParallel(rank, ranks, GROUP) for rank in range(ranks)]
    shares = [batch.split(context) for context in contexts]
    length, padding = shares[0].input_ids_1N.shape[1], -batch.input_ids_1N.shape[1] % ranks
    inputs = torch.cat([share.input_ids_1N for share in shares], dim=1)
    assert torch.equal(inputs, F.pad(batch.input_ids_1N, (0, padding)))
    positions = torch.cat([share.position_ids_1N for share in shares], dim=1)[0].tolist()
    assert positions == [*batch.position_ids_1N[0].tolist(), *range(padding)]
    assert torch.equal(torch.cat([share.actions_S for share in shares]), batch.actions_S)
    at = torch.cat([share.action_positions_S + rank * length for rank, share in enumerate(shares)])
    assert torch.equal(at, batch.action_positions_S)
    segments = (*batch.segment_lengths, padding) if padding else batch.segment_lengths
    assert {share.segment_lengths for share in shares} == {segments}
    assert [share.boundaries()["context"] for share in shares] == contexts


@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_stay_with_their_tokens(ranks: int) -> None:
    short, long = numbered(3, 9)
    experts = np.arange(8, dtype=np.int16)[:, None, None]
    (batch,) = pack([short, replace(long, routed_experts=experts)], token_budget=BUDGET)
    contexts = [ContextParallel(rank, ranks, GROUP) for rank in range(ranks)]
    shares = [batch] if ranks == 1 else [batch.split(context) for context in contexts]
    given = [share.model_inputs()["routed_experts"].flatten().tolist() for share in shares]
    assert given == ([[*range(8), -1, -1]] if ranks == 1 else [[0, 1, 2, 3], [4, 5, 6, 7], [-1] * 4])
    assert "routed_experts" not in pack([short, long], token_budget=BUDGET)[0].model_inputs()
