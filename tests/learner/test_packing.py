"""Packing loses nothing, invents nothing and keeps to its budget."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.wire import messages as m
from slipstream.learner.data.packing import MicroBatch, empty_micro_batch, pack
from slipstream.learner.data.rows import build_rows

BUDGET = 16


@st.composite
def trajectories(draw: st.DrawFn) -> m.Trajectory:
    """Any mask, also of several turns; spans cover its actions; log-probs tell the tokens apart."""
    tokens = draw(st.integers(2, 24))
    mask = np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), dtype=m.MASK_DTYPE)
    mask[0] = 0  # the first token is always given
    actions = np.flatnonzero(mask).tolist()
    versions = draw(st.lists(st.integers(0, 9), min_size=len(actions), max_size=len(actions)))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens))
    return m.Trajectory(
        token_ids=np.array(ids, dtype=m.TOKEN_DTYPE).tobytes(),
        action_mask=mask.tobytes(),
        behaviour_logprobs=(-np.arange(1, tokens + 1) * mask).astype(m.LOGPROB_DTYPE).tobytes(),
        spans=[
            m.VersionSpan(version=version, start=start, end=start + 1)
            for start, version in zip(actions, versions, strict=True)
        ],
        reward=draw(st.floats(-1, 1, width=32)),
        scores={},
        finish_reason="stop",
    )


def many() -> st.SearchStrategy[list[m.Trajectory]]:
    return st.lists(trajectories(), min_size=1, max_size=12)


def group_of(of: list[m.Trajectory]) -> m.Group:
    return m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=of)


def ids(trajectory: m.Trajectory) -> list[int]:
    found: list[int] = np.frombuffer(trajectory.token_ids, m.TOKEN_DTYPE).tolist()
    return found


def unpacked(batch: MicroBatch) -> list[tuple[int, list[int], list[tuple[int, int]]]]:
    """Of each sequence its row and inputs, and of each action its place and token."""
    sequences, start = [], 0
    actions = list(zip(*(each.tolist() for each in (batch.action_positions_A, batch.actions_A)), strict=True))
    for number, length in enumerate(batch.segment_lengths if batch.rows_B.numel() else ()):
        own = [(at - start + 1, token) for at, token in actions if start <= at < start + length]
        assert batch.position_ids_1N[0, start : start + length].tolist() == list(range(length))
        assert batch.turn_A[batch.sequence_A == number].tolist() == list(range(len(own)))
        sequences.append((int(batch.rows_B[number]), batch.input_ids_1N[0, start : start + length].tolist(), own))
        start += length
    assert sum(batch.segment_lengths) == batch.input_ids_1N.shape[1] == batch.position_ids_1N.shape[1]
    assert sum(len(own) for *_, own in sequences) == batch.actions == len(actions)
    return sequences


def expected(row: int, trajectory: m.Trajectory) -> tuple[int, list[int], list[tuple[int, int]]]:
    tokens = ids(trajectory)
    return row, tokens[:-1], [(span.start, tokens[span.start]) for span in trajectory.spans]


@given(many())
def test_packed_micro_batches_hold_every_trajectory_exactly_once(given_trajectories: list[m.Trajectory]) -> None:
    batches = pack(given_trajectories, token_budget=BUDGET, first_row=5)
    packed = [sequence for batch in batches for sequence in unpacked(batch)]
    assert sorted(packed) == [expected(5 + number, each) for number, each in enumerate(given_trajectories)]


@given(many())
def test_what_is_known_of_each_action_finds_its_row_and_comes_back(given_trajectories: list[m.Trajectory]) -> None:
    rows = build_rows([(group_of(given_trajectories), 1.0)], terms=())
    batches = pack(given_trajectories, token_budget=BUDGET)
    numbers_BT = torch.zeros_like(rows.mask_BT)
    for batch in batches:
        batch.put(numbers_BT, 1.0 + torch.arange(batch.actions) + 100 * batch.rows_B[batch.sequence_A])
    assert torch.equal(numbers_BT > 0, rows.mask_BT > 0)
    for batch in batches:
        values_A = 1.0 + torch.arange(batch.actions) + 100 * batch.rows_B[batch.sequence_A]
        assert torch.equal(batch.padded(values_A), batch.of_step(numbers_BT))


@given(many())
def test_no_micro_batch_exceeds_the_budget_unless_it_is_one_long_trajectory(
    given_trajectories: list[m.Trajectory],
) -> None:
    for batch in pack(given_trajectories, token_budget=BUDGET):
        assert sum(batch.segment_lengths) <= BUDGET or len(batch.segment_lengths) == 1


def plain(tokens: int) -> m.Trajectory:
    mask = np.ones(tokens, dtype=m.MASK_DTYPE)
    mask[0] = 0
    return m.Trajectory(
        token_ids=np.arange(tokens, dtype=m.TOKEN_DTYPE).tobytes(),
        action_mask=mask.tobytes(),
        behaviour_logprobs=np.zeros(tokens, dtype=m.LOGPROB_DTYPE).tobytes(),
        spans=[m.VersionSpan(version=0, start=1, end=tokens)],
        reward=0.0,
        scores={},
        finish_reason="stop",
    )


def test_the_last_token_is_never_an_input_and_is_predicted_from_the_one_before() -> None:
    (batch,) = pack([plain(4)], token_budget=BUDGET)
    assert batch.input_ids_1N.tolist() == [[0, 1, 2]]
    assert batch.action_positions_A.tolist() == [0, 1, 2]
    assert batch.actions_A.tolist() == [1, 2, 3]


def test_a_trajectory_longer_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    batches = pack([plain(5), plain(40), plain(5)], token_budget=BUDGET)
    assert [batch.segment_lengths for batch in batches] == [(39,), (4, 4)]


def test_trajectories_that_fit_into_one_micro_batch_share_it() -> None:
    (batch,) = pack([plain(3), plain(9), plain(7)], token_budget=BUDGET)
    assert batch.segment_lengths == (8, 6, 2)


def test_an_action_that_no_span_covers_has_version_minus_one() -> None:
    torn = m.Trajectory(
        **{name: getattr(plain(5), name) for name in ("token_ids", "action_mask", "behaviour_logprobs")},
        spans=[m.VersionSpan(version=7, start=1, end=3)],
        reward=0.0,
        scores={},
        finish_reason="stop",
    )
    rows = build_rows([(group_of([torn]), 1.0)], terms=())
    assert rows.versions_BT.tolist() == [[7, 7, -1, -1]]


def test_boundaries_are_cumulative_lengths_as_flash_attention_wants_them() -> None:
    (batch,) = pack([plain(3), plain(9)], token_budget=BUDGET)
    boundaries = batch.boundaries()
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert boundaries[name].tolist() == [0, 8, 10]
        assert boundaries[name].dtype == torch.int32
    assert boundaries["max_length_q"] == boundaries["max_length_k"] == 8


def test_an_empty_micro_batch_has_one_token_and_nothing_to_learn() -> None:
    batch = empty_micro_batch().to(torch.device("cpu"))
    assert unpacked(batch) == []
    assert batch.actions == 0
    assert batch.input_ids_1N.shape == (1, 1)
    assert batch.of_step(torch.ones(3, 4)).numel() == 0
