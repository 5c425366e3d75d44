"""Episodes of agents, from OpenAI's client to the trajectories."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anthropic import AsyncAnthropic

from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.env.base import AgentEndpoint, Task
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.registry import start_engine
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.gateway.harness import AgentTask, Recorder, client, run_config, served
from tests.rollout_servers.rollouts.test_conversation import chat_answer, learner_logprobs

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("gateway") / "model", "qwen2_5")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


async def three_turns(task: Task, endpoint: AgentEndpoint) -> float:
    """Alternates plain and streamed calls."""
    assert not isinstance(task.prompt, str)
    messages: list[Any] = [*task.prompt]
    async with client(endpoint) as model:
        for turn in range(3):
            if turn == 1:
                stream = await model.chat.completions.create(model=endpoint.model, messages=messages, stream=True)
                texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
                messages.append({"role": "assistant", "content": "".join(texts)})
            else:
                whole = await model.chat.completions.create(model=endpoint.model, messages=messages)
                messages.append(whole.choices[0].message.model_dump())
            messages.append({"role": "user", "content": "And now?"})
    return 0.5


def answered(trajectories: Sequence[m.Trajectory]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each stretch of actions, with the tokens before it."""
    found = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for trajectory in trajectories:
        ids, mask = codec.token_ids(trajectory).tolist(), codec.action_mask(trajectory)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found[tuple(ids[:start]), tuple(ids[start:end])] += 1
    return found


def sampled(recorder: Recorder) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each answer of the engine, with its context."""
    return Counter((tuple(context), tuple(answer.token_ids)) for context, answer in recorder.calls)


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_1"])
async def test_trajectories_have_the_tokens_of_the_engine(tmp_path: Path, template: str) -> None:
    model = build_chat_model(tmp_path / "model", template)
    engine = await start_engine(run_config(model), model, eos_token_ids=Tokenizer(model).eos_token_ids)
    recorder = Recorder(engine)
    try:
        async with served(model, recorder, AgentTask(three_turns)) as player:
            trajectories = await player.play("train", 0, samples=4)
    finally:
        await engine.close()
    assert len(recorder.calls) == 12
    assert answered(trajectories) == sampled(recorder)
    assert sorted(trajectory.episode for trajectory in trajectories) == [0, 1, 2, 3]
    for trajectory in trajectories:
        assert (trajectory.reward, trajectory.scores["env/roots"], trajectory.scores["env/calls"]) == (0.5, 1, 3)
        logprobs = codec.behaviour_logprobs(trajectory)[codec.action_mask(trajectory) == 1]
        np.testing.assert_allclose(logprobs, learner_logprobs(model, trajectory), atol=1e-4)


# --- dialects ---------------------------------------------------------------------------------------------------------

CALLS = 'Two. <tool_call>\n{"name": "add", "arguments": {"a": 40}}\n</tool_call><|im_end|>'
WORDS = "It is 42.<|im_end|>"
THINKS = "<think>\nHm.\n</think>\n\nIt is 42.<|im_end|>"


async def by_chat(task: Task, endpoint: AgentEndpoint, *, stream: bool) -> float:
    messages: list[Any] = [*task.prompt]
    async with client(endpoint) as model:
        for _ in range(3):
            options: dict[str, Any] = {"model": endpoint.model, "messages": messages, "tools": [SCHEMA]}
            if stream:
                async with model.chat.completions.stream(**options) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (await model.chat.completions.create(**options)).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 40})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
            if not message.tool_calls:
                messages.append({"role": "user", "content": "Sure?"})
    return float(message.content == "It is 42." and message.reasoning_content == "Hm.")


async def by_responses(task: Task, endpoint: AgentEndpoint, *, stream: bool) -> float:
    items: list[Any] = [*task.prompt]
    tools: list[Any] = [{"type": "function", **SCHEMA["function"]}]
    async with client(endpoint) as model:
        for _ in range(3):
            options: dict[str, Any] = {"model": endpoint.model, "input": items, "tools": tools}
            if stream:
                async with model.responses.stream(**options) as events:
                    response = await events.get_final_response()
            else:
                response = await model.responses.create(**options)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                assert (call.name, json.loads(call.arguments)) == ("add", {"a": 40})
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
            if not calls:
                items.append({"role": "user", "content": "Sure?"})
    return float(response.output_text == "It is 42." and response.output[0].type == "reasoning")


async def by_previous_response(task: Task, endpoint: AgentEndpoint, *, stream: bool) -> float:
    tools: list[Any] = [{"type": "function", **SCHEMA["function"]}]
    new: Any = task.prompt
    previous = None
    async with client(endpoint) as model:
        for _ in range(3):
            response: Any = await model.responses.create(
                model=endpoint.model, input=new, tools=tools, previous_response_id=previous
            )
            previous = response.id
            calls = [item for item in response.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
            new = new or "Sure?"
    return float(response.output_text == "It is 42.")


async def by_messages(task: Task, endpoint: AgentEndpoint, *, stream: bool) -> float:
    messages: list[Any] = [*task.prompt]
    tools: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA["function"]["parameters"]}]
    async with AsyncAnthropic(base_url=endpoint.session_url, api_key=endpoint.api_key) as model:
        for _ in range(3):
            options: dict[str, Any] = {"model": endpoint.model, "messages": messages, "tools": tools, "max_tokens": 99}
            if stream:
                async with model.messages.stream(**options) as events:
                    message = await events.get_final_message()
            else:
                message = await model.messages.create(**options)
            messages.append({"role": "assistant", "content": [each.model_dump() for each in message.content]})
            calls = [each for each in message.content if each.type == "tool_use"]
            assert message.stop_reason == ("tool_use" if calls else "end_turn")
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
            assert all((call.name, call.input) == ("add", {"a": 40}) for call in calls)
            messages.append({"role": "user", "content": results or "Sure?"})
    return float([each.type for each in message.content] == ["thinking", "text"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", [by_chat, by_responses, by_previous_response, by_messages])
async def test_dialects_continue_by_delta(model: Path, tokenizer: Tokenizer, agent: Any, stream: bool) -> None:
    """A call of a tool, its result, an answer, and one more with reasoning: one sequence, as the engine saw it."""
    texts = [CALLS, WORDS, THINKS]
    recorder = Recorder(None, [chat_answer(tokenizer, text) for text in texts])
    async with served(model, recorder, AgentTask(partial(agent, stream=stream))) as player:
        (trajectory,) = await player.play("train", 0, samples=1)
    assert trajectory.reward == 1.0
    assert answered([trajectory]) == sampled(recorder)
    text = tokenizer.decode_whole(codec.token_ids(trajectory).tolist())
    assert '"name": "add"' in text.partition(CALLS)[0]
    assert text.count("42") == 3  # the result and two answers
    assert text.endswith(f"Sure?<|im_end|>\n<|im_start|>assistant\n{THINKS}")
