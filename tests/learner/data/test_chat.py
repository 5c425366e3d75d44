"""Demonstrations as token sequences: rows in the forms of TRL and verl, and which of their tokens are in the loss."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.configs.schema.trainers import DataConfig
from slipstream.learner.data.chat import Chat, Completion, DemonstrationEncoder, read_demonstration
from slipstream.learner.data.examples import UnusableRow
from slipstream.learner.data.packing import TokenSequence
from slipstream.models.tiny import CHATML_TOOLS, TEXT, build_model
from slipstream.models.tokenizer import Tokenizer

USER, SYSTEM = {"role": "user", "content": "One?"}, {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "First."}
TURNS: list[dict[str, Any]] = [
    SYSTEM,
    USER,
    ANSWER,
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]
CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WITH_CALL: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c0", "name": "add", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]
WITH_MARKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS_THOUGHTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OWN_OPENING = CHATML_TOOLS.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>' }}")
NO_STOP = WITH_MARKS.replace("<|im_end|>", "").replace("{% generation %}", "").replace("{% endgeneration %}", "")

MakeEncoder = Callable[..., DemonstrationEncoder]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "model"
    build_model(folder, TEXT, seed=0)
    return folder


@pytest.fixture
def make_encoder(model: Path, tmp_path: Path) -> MakeEncoder:
    def make(template: str = CHATML_TOOLS, *, assistant_only: bool = True) -> DemonstrationEncoder:
        folder = shutil.copytree(model, tmp_path / "model")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        (folder / "chat_template.jinja").write_text(template)
        return DemonstrationEncoder(Tokenizer(folder), assistant_only)

    return make


def targets(encoder: DemonstrationEncoder, sequences: list[TokenSequence]) -> list[str]:
    """The text in the loss of each sequence."""
    return [
        encoder.tokenizer.decode_whole(sequence.token_ids[sequence.action_mask.astype(bool)].tolist())
        for sequence in sequences
    ]


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"messages": TURNS}, {}, Chat(TURNS)),
        ({"prompt": [USER], "completion": [ANSWER]}, {}, Chat([USER, ANSWER], first=1)),
        ({"prompt": "1+1=", "completion": "2"}, {}, Completion("1+1=", "2")),
        ({"question": "One?", "answer": "First."}, {"chat": True}, Chat([USER, ANSWER], first=1)),
        ({"text": "Once."}, {}, Completion("", "Once.")),
        (
            {"prompt": [USER], "reward_model": {"ground_truth": "First."}},
            {"columns": {"completion": "reward_model.ground_truth"}},
            Chat([USER, ANSWER], first=1),
        ),
        (
            {"conversations": TURNS, "functions": json.dumps([TOOL])},
            {"columns": {"messages": "conversations", "tools": "functions"}},
            Chat(TURNS, [TOOL]),
        ),
        # As a parquet file has it: a column of structs with all keys, and arguments as text.
        (
            {
                "messages": [
                    {**USER, "tool_calls": None, "name": None},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "c0", "function": {"name": "add", "arguments": '{"a": 1}'}}],
                    },
                ]
            },
            {},
            Chat(WITH_CALL[:2]),
        ),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "One?"}]}]}, {}, Chat([USER])),
    ],
)
def test_rows_in_all_forms_are_read(row: dict[str, Any], options: dict[str, Any], expected: Chat | Completion) -> None:
    found = read_demonstration(row, DataConfig(path="rows.jsonl", **options))
    assert json.dumps(vars(found), sort_keys=True, default=list) == json.dumps(
        vars(expected), sort_keys=True, default=list
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"number": 1}, "malformed"),
        ({"messages": []}, "malformed"),
        ({"messages": "One?"}, "malformed"),
        ({"messages": [{"content": "One?"}]}, "malformed"),
        ({"messages": [{**USER, "content": 1}]}, "malformed"),
        ({"messages": TURNS, "tools": "[{"}, "malformed"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": {"name": "add", "arguments": "[]"}}]}]}, "malformed"),
        ({"messages": [{**ANSWER, "tool_calls": 1}]}, "malformed"),
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, "malformed"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, "images"),
        ({"messages": [USER]}, "no_target"),
        ({"messages": [{"role": "user", "content": "\u20ac"}, ANSWER]}, "template"),  # no token has the sign
    ],
)
def test_unusable_rows_have_a_reason(make_encoder: MakeEncoder, row: dict[str, Any], reason: str) -> None:
    encoder, config = make_encoder(), DataConfig(path="rows.jsonl")
    with pytest.raises(UnusableRow) as refused:
        encoder.encode(read_demonstration(row, config))
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        (Chat(TURNS), "First.<|im_end|>Second.<|im_end|>"),
        (Chat(TURNS, first=4), "Second.<|im_end|>"),
        (Chat([*TURNS, USER]), "First.<|im_end|>Second.<|im_end|>"),
        (
            Chat(WITH_CALL, [TOOL]),
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>It is 2.<|im_end|>',
        ),
    ],
)
def test_answers_with_their_stop_tokens_are_targets(make_encoder: MakeEncoder, chat: Chat, expected: str) -> None:
    encoder = make_encoder()
    sequences = encoder.encode(chat)
    assert targets(encoder, sequences) == [expected]
    assert encoder.tokenizer.decode_whole(sequences[0].token_ids.tolist()).endswith("<|im_end|>\n")


def test_targets_are_those_of_generation_marks(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(WITH_MARKS)
    (sequence,) = encoder.encode(Chat(TURNS))
    tokenizer: Any = AutoTokenizer.from_pretrained(encoder.tokenizer.model)
    rendered = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert sequence.token_ids.tolist() == rendered["input_ids"]
    assert sequence.action_mask.tolist() == [bool(mark) for mark in rendered["assistant_masks"]]


def test_template_that_rewrites_turns_gives_a_sequence_for_each(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(STRIPS_THOUGHTS)
    turns = [
        USER,
        {**ANSWER, "content": "<think>a</think>First."},
        USER,
        {**ANSWER, "content": "<think>b</think>Last."},
    ]
    sequences = encoder.encode(Chat(turns))
    assert targets(encoder, sequences) == ["<think>a</think>First.<|im_end|>", "<think>b</think>Last.<|im_end|>"]
    texts = [encoder.tokenizer.decode_whole(sequence.token_ids.tolist()) for sequence in sequences]
    assert ["<think>a" in text for text in texts] == [True, False]
    # Each is what an engine would see: the prompt of the messages before it, then what it generates.
    prompt = encoder.tokenizer.encode(turns[:3])
    assert sequences[1].token_ids.tolist()[: len(prompt)] == prompt
    assert not sequences[1].action_mask[: len(prompt)].any()


def test_answer_without_its_generation_prompt_is_refused(make_encoder: MakeEncoder) -> None:
    with pytest.raises(UnusableRow) as refused:
        make_encoder(OWN_OPENING).encode(Chat(TURNS))
    assert refused.value.reason == "template"
    assert "<think>" in str(refused.value)


def test_template_without_stop_token_trains_to_the_end(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(NO_STOP)
    assert targets(encoder, encoder.encode(Chat(TURNS[:3]))) == ["First.\n"]
    assert not encoder.unended.due()  # it was warned of


@pytest.mark.parametrize(
    ("text", "assistant_only", "expected"),
    [
        (Completion("1+1=", "2"), True, "2<|im_end|>"),
        (Completion("1+1=", "2"), False, "1+1=2<|im_end|>"),
        (Completion("", "Once."), True, "Once.<|im_end|>"),
    ],
)
def test_completions_end_with_the_stop_token(
    make_encoder: MakeEncoder, text: Completion, assistant_only: bool, expected: str
) -> None:
    encoder = make_encoder(assistant_only=assistant_only)
    sequences = encoder.encode(text)
    assert targets(encoder, sequences) == [expected]
    assert (
        encoder.tokenizer.decode_whole(sequences[0].token_ids.tolist()) == f"{text.prompt}{text.completion}<|im_end|>"
    )


def test_loss_on_all_tokens_of_a_chat(make_encoder: MakeEncoder) -> None:
    (sequence,) = make_encoder(assistant_only=False).encode(Chat(TURNS))
    assert sequence.action_mask.all()
