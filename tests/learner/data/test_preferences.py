"""Rows of preferences in TRL's and verl's forms, and the sequences that policies and reward models get of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.configs.schema.trainers import DataConfig
from slipstream.learner.data.chat import Completion
from slipstream.learner.data.examples import UnusableRow
from slipstream.learner.data.packing import TokenSequence
from slipstream.learner.data.preferences import (
    PolicyEncoder,
    RewardEncoder,
    mismatched,
    read_pair,
    read_rated,
    read_verdicts,
)
from slipstream.models.tiny import TEXT, build_model
from slipstream.models.tokenizer import Tokenizer

SOURCE = DataConfig(path="rows.jsonl")
USER = {"role": "user", "content": "2+2?"}
YES, NO = ({"role": "assistant", "content": answer} for answer in "45")
ASKED = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("models") / "text"
    build_model(folder, TEXT, seed=0)
    return Tokenizer(folder)


def shown(tokenizer: Tokenizer, sequence: TokenSequence) -> tuple[str, str]:
    """The text before the first action, and from there on."""
    start = int(np.argmax(sequence.action_mask))
    ids = sequence.token_ids.tolist()
    return tokenizer.decode_whole(ids[:start]), tokenizer.decode_whole(ids[start:])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": [USER], "chosen": "4", "rejected": "5"},
        {"prompt": "2+2?", "chosen": [YES], "rejected": [NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "2+2?", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"question": [USER], "chosen": [YES], "rejected": [NO], "margin": 1.5},
    ],
    ids=["trl", "answers", "verl", "implicit", "repeated", "margin"],
)
def test_pairs_of_chats(row: dict[str, Any], tokenizer: Tokenizer) -> None:
    pair = read_pair(row, SOURCE, PolicyEncoder(tokenizer))
    assert [shown(tokenizer, each) for each in pair.sequences] == [(ASKED, "4<|im_end|>\n"), (ASKED, "5<|im_end|>\n")]
    assert [int(each.action_mask.sum()) for each in pair.sequences] == [2, 2], "the answer and its stop token"
    assert pair.margin == row.get("margin", 0.0)
    scored = read_pair(row, SOURCE, RewardEncoder(tokenizer)).sequences
    assert shown(tokenizer, scored[0])[0] == f"{ASKED}4<|im_end|>\n"


def test_pairs_of_texts(tokenizer: Tokenizer) -> None:
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    pair = read_pair(row, SOURCE, PolicyEncoder(tokenizer))
    assert shown(tokenizer, pair.sequences[0]) == ("2+2=", "4<|im_end|>")
    assert shown(tokenizer, read_pair(row, SOURCE, RewardEncoder(tokenizer)).sequences[1])[0] == "2+2=5"
    named = DataConfig(path="rows.jsonl", columns={"prompt": "q", "chosen": "a.good", "rejected": "a.bad"})
    again = read_pair({"q": "2+2=", "a": {"good": "4", "bad": "5"}}, named, PolicyEncoder(tokenizer))
    assert again.sequences[1].token_ids.tolist() == pair.sequences[1].token_ids.tolist()
    whole = {"chosen": "2+2=4", "rejected": "2+2=5"}
    assert shown(tokenizer, read_pair(whole, SOURCE, RewardEncoder(tokenizer)).sequences[0])[0] == "2+2=4"


def test_verdicts(tokenizer: Tokenizer) -> None:
    encode = PolicyEncoder(tokenizer)
    (good,) = read_verdicts({"prompt": "2+2=", "completion": "4", "label": True}, SOURCE, encode)
    assert good.desirable and shown(tokenizer, good.sequences[0]) == ("2+2=", "4<|im_end|>")
    (bad,) = read_verdicts({"prompt": [USER], "completion": [NO], "label": 0}, SOURCE, encode)
    assert not bad.desirable and shown(tokenizer, bad.sequences[0]) == (ASKED, "5<|im_end|>\n")
    pair = read_verdicts({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, SOURCE, encode)
    assert [each.desirable for each in pair] == [True, False]


def test_reward_of_a_row_is_the_return_of_all_actions(tokenizer: Tokenizer) -> None:
    (rated,) = read_rated({"prompt": "2+2=", "completion": "4", "reward": 0.5}, SOURCE, PolicyEncoder(tokenizer))
    assert rated.returns_A.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("row", [{"prompt": [USER], "completion": [YES]}, {"completion": [USER, YES]}])
def test_tools_are_in_the_context_of_single_answers(row: dict[str, Any], tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    (rated,) = read_rated({**row, "tools": [tool], "reward": 1}, SOURCE, PolicyEncoder(tokenizer))
    assert '"add"' in shown(tokenizer, rated.sequences[0])[0]


def test_mismatched_has_the_prompt_of_one_and_the_answer_of_another(tokenizer: Tokenizer) -> None:
    one, other = map(PolicyEncoder(tokenizer), (Completion("2+2=", "4"), Completion("a", "bc")))
    assert shown(tokenizer, mismatched(one, other, most_tokens=99)) == ("2+2=", "bc<|im_end|>")
    assert shown(tokenizer, mismatched(one, other, most_tokens=5)) == ("2+2=", "b")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "malformed"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "no_preference"),
        ({"chosen": "ab", "rejected": "ac"}, "malformed"),
        ({"chosen": [USER, YES], "rejected": [YES, USER]}, "malformed"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "malformed"),
        ({"prompt": "é", "chosen": "b", "rejected": "c"}, "template"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "malformed"),
        ({"prompt": "a", "label": True}, "malformed"),
        ({"group": 1}, "malformed"),
    ],
)
def test_unusable_rows(row: dict[str, Any], reason: str, tokenizer: Tokenizer) -> None:
    read: Callable[..., object] = read_verdicts if "label" in row else read_pair
    with pytest.raises(UnusableRow) as refused:
        read(row, SOURCE, PolicyEncoder(tokenizer))
    assert refused.value.reason == reason
    with pytest.raises(UnusableRow):
        read_rated({"prompt": "a", "completion": "b", "reward": True}, SOURCE, PolicyEncoder(tokenizer))
