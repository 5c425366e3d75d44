"""Sequences as trees of shared prefixes: every token once, the same for the same sequences, and only where it saves."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.data.balance import SequenceCost, Work, balance_groups
from slipstream.learner.data.packing import MicroBatch, TokenSequence, all_actions, pack, share_prefixes
from slipstream.learner.data.prefix_tree import LEAST_SAVING, ROOT, PrefixSharing, build_tree, shared_items

TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=9)
"""Of three kinds: so prefixes are common."""


@given(st.lists(TOKENS, min_size=1, max_size=12), st.integers(1, 6))
def test_every_token_is_on_the_path_of_its_sequence(rows: list[list[int]], least: int) -> None:
    inputs = [np.array(row) for row in rows]
    tree, positions = build_tree(inputs, least_tokens=least)
    packed: dict[int, int] = {}
    for tokens, places in zip(rows, positions, strict=True):
        node = next(n for n, start in enumerate(tree.starts) if start <= places[-1] < start + tree.lengths[n])
        path = tree.path(node)
        at = [token for each in path for token in range(tree.starts[each], tree.starts[each] + tree.lengths[each])]
        assert places.tolist() == at[: len(tokens)]
        assert all(
            packed.setdefault(place, token) == token for place, token in zip(places.tolist(), tokens, strict=True)
        )
    assert sorted(packed) == list(range(sum(tree.lengths)))
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert [tree.ends[p] >= tree.ends[n] for n, p in enumerate(tree.parents) if p != ROOT] == [True] * (
        len(tree.parents) - tree.parents.count(ROOT)
    )
    again = build_tree(inputs, least_tokens=least)
    assert again.tree == tree
    if least == 1:  # then it is the trie: as many tokens as distinct prefixes
        assert sum(tree.lengths) == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    assert sum(tree.lengths) <= sum(map(len, rows))


@given(st.lists(TOKENS, min_size=1, max_size=12), st.integers(1, 4), st.integers(4, 30))
def test_items_hold_every_sequence_within_the_budget(rows: list[list[int]], least: int, budget: int) -> None:
    inputs = [np.array(row) for row in rows]
    items = shared_items(inputs, PrefixSharing(least), budget=budget)
    assert sorted(index for item in items for index in item.indices) == list(range(len(rows)))
    assert all(first.indices[0] < second.indices[0] for first, second in pairwise(items))
    for tokens, work in ((sum(len(rows[index]) for index in item.indices), item.work) for item in items):
        assert work.tokens <= tokens
    for item in items:
        if len(item.indices) > 1:
            assert item.work.tokens <= budget
            assert item.work.tokens <= (1 - LEAST_SAVING) * sum(len(rows[index]) for index in item.indices)
    alone = shared_items(inputs, None, budget=budget)
    assert [(item.indices, item.work) for item in alone] == [
        ([index], Work.of_length(len(row))) for index, row in enumerate(rows)
    ]


def group(prompt: int, *answers: int, seed: int = 0) -> list[TokenSequence]:
    """Answers to a prompt of tokens 0, 1, 2, …; each begins with another token."""
    rng = np.random.default_rng(seed)
    heads = np.arange(prompt) + 1000 * seed
    return [
        all_actions(np.concatenate([heads, [5000 + number], rng.integers(100, size=answer)]))
        for number, answer in enumerate(answers)
    ]


def unpacked(batch: MicroBatch, row: int) -> tuple[list[int], list[int]]:
    """Positions from which a row's actions are predicted, in its sequence, and their tokens."""
    number = batch.rows_B.tolist().index(row)
    score_A = np.arange(batch.actions) if batch.score_A is None else batch.score_A.numpy()
    own = score_A[batch.sequence_A.numpy() == number]
    at = batch.action_positions_S.numpy()[own]
    return batch.position_ids_1N[0].numpy()[at].tolist(), batch.actions_S.numpy()[own].tolist()


@pytest.mark.parametrize("budget", [1000, 40, 24])
def test_group_shares_its_prompt_in_each_micro_batch(budget: int) -> None:
    sequences = group(20, 5, 9, 3, 3)
    batches = pack(sequences, token_budget=budget, sharing=PrefixSharing(4))
    assert sum(batch.sequence_tokens for batch in batches) == sum(len(each.token_ids) - 1 for each in sequences)
    assert sum(batch.input_ids_1N.shape[1] for batch in batches) == sum(
        len(each.token_ids) - 1 for each in sequences
    ) - sum(20 * (batch.rows_B.numel() - 1) for batch in batches)
    for batch in batches:
        assert batch.input_ids_1N.shape[1] <= max(budget, 29)
        assert batch.action_positions_S.tolist() == sorted(batch.action_positions_S.tolist())
        for row in batch.rows_B.tolist():
            tokens = sequences[row].token_ids
            assert unpacked(batch, row) == (list(range(len(tokens) - 1)), tokens[1:].tolist())
    if budget == 1000:
        (batch,) = batches
        # The prompt's own actions are scored once, the first token of each answer from the prompt's last.
        assert batch.actions_S.numel() == 19 + sum((6, 10, 4, 4))
        assert batch.action_positions_S.tolist().count(19) == 4
        assert batch.segment_depths == (0, 20, 20, 20, 20)


def test_trees_of_different_groups_share_a_system_prompt() -> None:
    first, second = group(30, 8, 8), group(30, 6, 6)
    for sequence in second:
        sequence.token_ids[25:30] = 77
    (batch,) = pack([*first, *second], token_budget=200, sharing=PrefixSharing(3), groups=[2, 2])
    assert batch.input_ids_1N.shape[1] == 25 + 5 + 8 + 8 + 5 + 6 + 6
    assert {row: unpacked(batch, row)[1] for row in range(4)} == {
        row: each.token_ids[1:].tolist() for row, each in enumerate([*first, *second])
    }


def test_short_groups_share_their_own_prompts() -> None:
    rule = PrefixSharing(100, least_of_short=16)
    first, second = group(4, 2, 2, 2, 2, 2, 2), group(4, 2, 2, 2, 2, 2, 2)
    (batch,) = pack([*first, *second], token_budget=400, sharing=rule, groups=[6, 6])
    assert batch.tree is not None
    assert [tree.lengths for tree in batch.tree.trees] == 2 * [(4, 2, 2, 2, 2, 2, 2)]
    assert {row: unpacked(batch, row)[1] for row in range(12)} == {
        row: each.token_ids[1:].tolist() for row, each in enumerate([*first, *second])
    }
    (long,) = pack([*first, *group(4, 2, 130)], token_budget=400, sharing=rule, groups=[6, 2])
    assert long.tree is None
    assert pack([*first, *second], token_budget=400, sharing=PrefixSharing(100), groups=[6, 6])[0].tree is None


def test_short_groups_share_a_system_prompt_without_a_rule_of_their_own() -> None:
    sequences = group(12, 2, 2, 2, 2)
    for each in sequences[2:]:
        each.token_ids[8:12] = 77
    (batch,) = pack(sequences, token_budget=400, sharing=PrefixSharing(20), groups=[2, 2])
    assert batch.tree is not None
    assert batch.tree.lengths[0] == 8


def test_prefixes_that_save_too_little_are_not_shared() -> None:
    sequences = group(6, 60, 50)
    assert pack(sequences, token_budget=200, sharing=PrefixSharing(7))[0].tree is None
    assert pack(sequences, token_budget=200, sharing=PrefixSharing(1))[0].tree is None, "6 of 118 tokens"
    assert len(shared_items([np.arange(5)] * 40, PrefixSharing(100), budget=200)) == 40, "not worth comparing"
    plain, shared = (pack(group(4, 5, 9, 3), token_budget=20, sharing=each) for each in (None, PrefixSharing(50)))
    assert [batch.segment_lengths for batch in shared] == [batch.segment_lengths for batch in plain]


def test_sequences_with_given_experts_share_nothing() -> None:
    sequences = group(20, 5, 9)
    experts = np.zeros((25, 1, 1), dtype=np.int16)
    sequences[0] = TokenSequence(sequences[0].token_ids, sequences[0].action_mask, routed_experts=experts)
    (batch,) = pack(sequences, token_budget=200, sharing=PrefixSharing(1))
    assert batch.tree is None
    assert batch.input_ids_1N.shape[1] == batch.sequence_tokens


def test_ranks_are_balanced_by_the_work_of_trees() -> None:
    """One group with long prompts costs as much as another one with long answers, though its tokens are many more."""
    sharing, budget, cost = PrefixSharing(8), 10_000, SequenceCost(even_at=1e9)
    groups = [
        group(900, *[20] * 8),
        group(60, *[120] * 8, seed=1),
        group(900, *[20] * 8, seed=2),
        group(60, *[120] * 8),
    ]
    works = [[item.work for item in share_prefixes(each, sharing, token_budget=budget)] for each in groups]
    assert [len(of_group) for of_group in works] == [1, 1, 1, 1]
    assert [of_group[0].tokens for of_group in works] == [1060, 1020, 1060, 1020]
    shares, _ = balance_groups(works, 2, budget=budget, cost=cost)
    assert sorted(sum(works[index][0].tokens for index in share) for share in shares) == [2080, 2080]
