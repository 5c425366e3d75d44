"""Episodes of agents, from OpenAI's client to the trajectories."""

import base64
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
from slipstream.env.builtin.colours import Colours
from slipstream.learner.data.rows import build_rows
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.rollouts.base import image_id
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.gateway.harness import AgentTask, Http, Recorder, client, run_config, served
from tests.rollout_servers.rollouts.test_conversation import chat_answer, learner_logprobs
from tests.vision import IMAGE_TOKEN, write_vision_model

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
    message: Any = None
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
            prompt: dict[str, Any] = {"model": endpoint.model, "messages": messages, "tools": tools}
            counted, options = await model.messages.count_tokens(**prompt), {**prompt, "max_tokens": 99}
            if stream:
                async with model.messages.stream(**options) as events:
                    message = await events.get_final_message()
            else:
                message = await model.messages.create(**options)
            assert message.usage.input_tokens == counted.input_tokens
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


# --- branches and images ----------------------------------------------------------------------------------------------


async def test_branches_of_an_episode_have_one_weight(model: Path, tokenizer: Tokenizer) -> None:
    """Of two episodes one has a trunk with three branches and a sub-agent of its own context, the other one call."""
    numbers = iter(range(2))

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        assert not isinstance(task.prompt, str)
        number, messages = next(numbers), [*task.prompt]
        async with client(endpoint) as openai:

            async def ask(messages: list[Any]) -> list[Any]:
                answer = await openai.chat.completions.create(model="any", messages=messages)
                return [*messages, answer.choices[0].message.model_dump()]

            trunk = await ask(messages)
            if number:
                for question in ("One?", "Two?", "Three?"):
                    await ask([*trunk, {"role": "user", "content": question}])
                await ask([{"role": "user", "content": "A part of it"}])
        return float(number)

    recorder = Recorder(None, [chat_answer(tokenizer, WORDS) for _ in range(6)])
    async with served(model, recorder, AgentTask(agent)) as player:
        trajectories = await player.play("train", 0, samples=2)
    assert answered(trajectories) == sampled(recorder)
    assert sorted(Counter(each.episode for each in trajectories).values()) == [1, 4]
    branched = next(each for each in trajectories if each.reward)
    assert [branched.scores[f"env/{name}"] for name in ("roots", "calls", "branches")] == [2, 5, 4]
    group = m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=trajectories)
    rows = build_rows([(group, 1.0)], terms=("none",))
    assert rows.episodes == 2
    assert sorted(rows.by_episode(rows.rewards_BT).sum(dim=1).tolist()) == [0, 1]
    assert int(rows.mask_BT.sum()) == sum(len(answer.token_ids) for _, answer in recorder.calls)


async def test_sub_agent_and_compaction_train_each_token_once(model: Path, tokenizer: Tokenizer) -> None:
    """A main agent asks another one, sums its dialogue up, and goes on from the summary alone."""

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        async with client(endpoint) as openai:

            async def ask(label: str, *messages: Any) -> list[Any]:
                answer = await openai.chat.completions.create(
                    model="any", messages=messages, extra_headers={"x-slipstream-agent": label}
                )
                return [*messages, answer.choices[0].message.model_dump()]

            def user(text: str) -> dict[str, str]:
                return {"role": "user", "content": text}

            trunk = await ask("main", user("A"))
            found = (await ask("search", user("B")))[-1]["content"]
            posted = await Http.of(endpoint).ask("/reward", {"reward": 0.5, "agent": "search"})
            assert posted.status_code == 200
            trunk = await ask("main", *trunk, user(found))
            summary = (await ask("main", *trunk, user("Sum up.")))[-1]["content"]
            await ask("main", user(summary))
        return 1.0

    texts = ["Plan.", "Found.", "Long.", "Short.", "Done."]
    recorder = Recorder(None, [chat_answer(tokenizer, f"{text}<|im_end|>") for text in texts])
    async with served(model, recorder, AgentTask(agent)) as player:
        trajectories = await player.play("train", 0, samples=1)
    assert answered(trajectories) == sampled(recorder)
    plan, search, long, short, done = ([*answer.token_ids] for _, answer in recorder.calls)
    contexts = [len(context) for context, _ in recorder.calls]

    def masked(*lengths: int) -> list[int]:
        """Of stretches of context and actions in turn."""
        return [place % 2 for place, length in enumerate(lengths) for _ in range(length)]

    between = [contexts[2] - contexts[0] - len(plan), contexts[3] - contexts[2] - len(long)]
    assert [codec.action_mask(each).tolist() for each in trajectories] == [
        masked(contexts[1], len(search)),
        masked(contexts[0], len(plan), between[0], len(long), between[1], len(short)),
        masked(contexts[4], len(done)),
    ]
    ends = [contexts[0] + len(plan), contexts[2] + len(long), contexts[3] + len(short)]
    assert [each.agents for each in trajectories] == [
        [m.AgentSpan(end=contexts[1] + len(search), agent="search", reward=0.5)],
        [m.AgentSpan(end=end, agent="main") for end in ends],
        [m.AgentSpan(end=contexts[4] + len(done), agent="main")],
    ]
    assert {each.reward for each in trajectories} == {1.5}
    group = m.Group(id="1", kind=m.TRAIN, epoch=0, indices=[0], trajectories=trajectories)
    rows = build_rows([(group, 1.0)], terms=("none",), agents=True)
    assert rows.own_rewards_BT is not None
    assert rows.own_rewards_BT.sum() == rows.own_rewards_BT[0, len(search) - 1] == 0.5


async def test_images_come_with_the_call(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model")
    (encoded,) = Colours(images=1).task("train", 0).images
    url = f"data:image/png;base64,{base64.b64encode(encoded).decode()}"
    images: list[Any] = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": url}}]

    async def agent(task: Task, endpoint: AgentEndpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": images}]
        async with client(endpoint) as openai:
            for _ in range(2):
                answer = await openai.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        return 1.0

    tokenizer = Tokenizer(model)
    recorder = Recorder(None, [chat_answer(tokenizer, "red<|im_end|>") for _ in range(2)])
    async with served(model, recorder, AgentTask(agent)) as player:
        (trajectory,) = await player.play("train", 0, samples=1)
    assert trajectory.images == [image_id(encoded)]
    assert answered([trajectory]) == sampled(recorder)
    assert recorder.calls[1][0].count(IMAGE_TOKEN) == recorder.calls[0][0].count(IMAGE_TOKEN) > 1
