"""Lengths, micro-batches and figures of the learner's bench."""

import pytest

from benchmarks.figures import Figure
from benchmarks.learner import LEAN, OURS, PLAIN, TRL, answer_lengths, figures_of
from benchmarks.learner_loops import packed, padded


@pytest.mark.parametrize(("answers", "tokens"), [(64, 16_414), (16, 3000), (3, 3)])
def test_answers_are_ragged_and_have_the_sum(answers: int, tokens: int) -> None:
    lengths = answer_lengths(answers, tokens)
    assert len(lengths) == answers
    assert sum(length - 1 for length in lengths) == tokens
    assert min(lengths) >= 2
    assert tokens == answers or max(lengths) > 2 * tokens / answers


def test_each_loop_trains_on_all_tokens_within_the_budget() -> None:
    lengths = answer_lengths(64, 16_414)
    sequences = [[number] * length for number, length in enumerate(lengths, start=1)]
    bins = packed(sequences, 4096)
    assert sorted(row for rows in bins for row in rows) == list(range(64))
    assert all(sum(lengths[row] - 1 for row in rows) <= 4096 for rows in bins)
    case = {"sequences": sequences, "advantages": [1.0] * 64, "token_budget": 4096}
    batches = padded(case)
    assert sum(int(batch["completion_mask"].sum()) for batch in batches) == 16_414
    assert {len(batch["prompt_ids"]) for batch in batches[:-1]} == {15}


def test_speeds_are_compared_with_the_plain_loop() -> None:
    durations = {OURS: 1.0, LEAN: 2.0, PLAIN: 1.8, TRL: 9.0}
    results = {loop: [{"step_s": step_s, "process_bytes": 2e9}] * 2 for loop, step_s in durations.items()}
    figures: dict[str, list[Figure]] = {}
    loop = ""
    for figure in figures_of(results, 900):
        loop = loop if figure.name.startswith(" ") else figure.name
        figures.setdefault(loop, []).append(figure)
    assert [figure.value for figure in figures[OURS]] == pytest.approx([900, 1.8, 2.0])
    assert [figure.met for figure in figures[OURS]] == [None, True, True]
    assert [figure.met for figure in figures[LEAN]] == [None, False, False]
    assert [figure.value for figure in figures[PLAIN]] == pytest.approx([500, 2.0])
    assert [figure.met for figure in figures[TRL]] == [None, None, None]
