"""Chat messages in the middle of an episode, by the chat templates of real models."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.buffer.wire import codec
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.rollout import EpisodeConfig
from slipstream.env.base import Message, Observation, Turn
from slipstream.learner.data.packing import TokenSequence, pack
from slipstream.learner.models.scoring import score_actions
from slipstream.rewards.base import Episode
from slipstream.rollout_servers.engines.base import Completion, Engine, Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.rollouts.conversation import CUT_MARK, ChatFormat, shorten
from slipstream.rollout_servers.tokenizer import PromptError, Tokenizer
from tests.rollout_servers.rollouts.chat import CHATML, build_chat_model
from tests.rollout_servers.rollouts.dialogue import HANG, Dialogue
from tests.rollout_servers.scripted import ScriptedEngine, build_player, completion

USER: Message = {"role": "user", "content": "And now?"}
RESULT: Message = {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "42"}
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
SEEN: list[Episode] = []


def watch(episode: Episode) -> float:
    """A reward that keeps the episodes."""
    SEEN.append(episode)
    return 1.0


def chat(*turns: Any, prompt: Any = None) -> Dialogue:
    """An env whose sessions return these turns in order, and end after the last."""
    opening = [{"role": "user", "content": "What is 40 and 2?"}] if prompt is None else prompt
    return Dialogue([*turns, Turn(reward=1.0, done=True)], opening, reference="42")


@dataclass
class Recorder:
    """An engine whose requests are recorded with their answers."""

    engine: Engine
    calls: list[tuple[list[int], Completion]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: Request) -> list[Completion]:
        answers = await self.engine.generate(request)
        self.calls.append((list(request.prompt_ids), answers[0]))
        return answers


def run_config(model: Path, **rollout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": model, "dtype": "float32"},
            "rewards": [{"name": f"{__name__}:watch"}],
            "scoring": {"workers": 0},
            "rollout": {"engine": {"name": "hf", "max_model_len": 2048}, "sampling": {"max_tokens": 24}} | rollout,
        }
    )


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("chatml"), "chatml")


def learner_logprobs(model: Path, trajectory: m.Trajectory) -> np.ndarray[Any, Any]:
    """log-probs of a trajectory's actions by the learner."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sequence = TokenSequence(
        codec.token_ids(trajectory), codec.action_mask(trajectory).astype(bool), kept=codec.kept_tokens(trajectory)
    )
    (batch,) = pack([sequence], token_budget=1)
    with torch.no_grad():
        return score_actions(policy, batch, temperature=1.0).logprobs_A.numpy()


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        ("chatml", False), ("qwen2_5", True), ("qwen3", True), ("qwen3_instruct_2507", True), ("qwen3_6", True),
        ("llama3", False), ("llama3_1", True), ("llama3_2", True), ("gemma", False), ("gemma3", False),
        ("lossy", False),
    ],
)  # fmt: skip
async def test_trajectories_have_the_tokens_of_the_engine(tmp_path: Path, template: str, tools: bool) -> None:
    lossy = template == "lossy"
    model = build_chat_model(tmp_path, "chatml" if lossy else template, lossy=lossy)
    results = [Turn([RESULT, RESULT] if "qwen" in template else [RESULT])] if tools else []
    env = chat(Turn([USER], 0.5), *results, Turn([USER]))
    if tools:
        env.prompt = Observation(env.prompt, [SCHEMA])
    tokenizer, reasons = Tokenizer(model), set[str]()
    sampling = {"max_tokens": 24, "top_k": 16 if template == "chatml" else None}
    engine = await start_engine(run_config(model, sampling=sampling), model, eos_token_ids=tokenizer.eos_token_ids)
    try:
        for history in ("sampled", "template"):
            config = run_config(model, episode={"history": history, "tokens": 800}, group_size=4, sampling=sampling)
            ChatFormat.of(tokenizer, config.rollout.episode).check(tools=tools)
            recorder = Recorder(engine)
            trajectories = await build_player(config, model, recorder, env=env).play("train", 0, samples=4)
            assert len(recorder.calls) == 4 * (4 if tools else 3)
            assert len(trajectories) == 4 or history == "template"
            reasons |= {answer.finish_reason for _, answer in recorder.calls}
            require_same_tokens(model, trajectories, recorder.calls)
    finally:
        await engine.close()
    assert reasons == {"stop", "length"}


def require_same_tokens(
    model: Path, trajectories: Sequence[m.Trajectory], calls: Sequence[tuple[list[int], Completion]]
) -> None:
    """Checks tokens, masks and log-probs of trajectories against the calls of the engine, and their rewards."""
    answered = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for trajectory in trajectories:
        ids, mask = codec.token_ids(trajectory).tolist(), codec.action_mask(trajectory)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            answered[tuple(ids[:start]), tuple(ids[start:end])] += 1
        logprobs = learner_logprobs(model, trajectory)
        np.testing.assert_allclose(codec.behaviour_logprobs(trajectory)[mask == 1], logprobs, atol=1e-4)
    assert answered == Counter((tuple(context), tuple(answer.token_ids)) for context, answer in calls)
    assert {each.episode for each in trajectories} == {0, 1, 2, 3}
    for number in range(4):
        spans = [span.value for each in trajectories if each.episode == number for span in each.rewards]
        assert sum(spans) == 2.5
    assert {each.reward for each in trajectories} == {2.5}
    assert {each.finish_reason for each in trajectories} <= {"done", "length"}


def chat_answer(tokenizer: Tokenizer, text: str, **changes: Any) -> Completion:
    """An answer of a scripted engine."""
    return completion(tokenizer.encode_observation(text), **changes)


@dataclass
class Scripted(ScriptedEngine):
    """Gives its answers one after the other."""

    contexts: list[list[int]] = field(default_factory=list)

    async def generate(self, request: Request) -> list[Completion]:
        self.contexts.append(list(request.prompt_ids))
        return [self.answers[len(self.contexts) - 1]]


async def play(
    model: Path, env: Dialogue, answers: Sequence[Completion], **rollout: Any
) -> tuple[list[m.Trajectory], Episode, Scripted]:
    """One episode with scripted answers: its trajectories, what the reward got, and the engine."""
    engine = Scripted(list(answers))
    SEEN.clear()
    trajectories = await build_player(run_config(model, **rollout), model, engine, env=env).play("train", 0, samples=1)
    return trajectories, SEEN[0], engine


async def test_tool_calls_and_results_are_messages(tmp_path: Path) -> None:
    model = build_chat_model(tmp_path, "qwen2_5")
    tokenizer = Tokenizer(model)
    call = 'Adding.<tool_call>\n{"name":  "add", "arguments": {"b": 2, "a": 1}}\n</tool_call><|im_end|>'
    env = chat(Turn([RESULT]), prompt=Observation([USER], [SCHEMA]))
    answers = [chat_answer(tokenizer, call), chat_answer(tokenizer, "It is 42.<|im_end|>")]
    (trajectory,), episode, engine = await play(model, env, answers, sampling={"max_tokens": 200})

    assert [(each.name, each.arguments, each.error) for each in env.actions[0].tool_calls] == [
        ("add", {"b": 2, "a": 1}, "")
    ]
    assert env.actions[1].tool_calls == []
    added = engine.contexts[1][len(engine.contexts[0]) + len(answers[0].token_ids) :]
    assert tokenizer.decode_whole(added) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert trajectory.finish_reason == episode.ended == "done"
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[1]["content"] == "Adding."
    assert episode.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"b": 2, "a": 1}}
    assert (episode.messages[2], episode.answer) == (RESULT, "It is 42.")


@pytest.mark.parametrize(
    ("tool_format", "tools", "calls"), [("auto", False, 0), ("auto", True, 1), ("none", True, 0), ("hermes", False, 1)]
)
async def test_answers_are_parsed_where_tools_are_offered(
    tmp_path: Path, tool_format: str, tools: bool, calls: int
) -> None:
    model = build_chat_model(tmp_path, "qwen3")
    answer = chat_answer(Tokenizer(model), '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>')
    env = chat(prompt=Observation([USER], [SCHEMA] if tools else []))
    await play(model, env, [answer], episode={"tool_format": tool_format}, sampling={"max_tokens": 100})
    assert len(env.actions[0].tool_calls) == calls


async def test_cut_answer_gets_its_stop_token_without_training_on_it(chatml: Path) -> None:
    tokenizer = Tokenizer(chatml)
    cut = chat_answer(tokenizer, "one two", finish_reason="length")
    last = chat_answer(tokenizer, "three<|im_end|>")
    (trajectory,), episode, engine = await play(chatml, chat(Turn([USER])), [cut, last], episode={"tokens": 300})
    added = engine.contexts[1][len(engine.contexts[0]) + len(cut.token_ids) :]
    assert tokenizer.decode_whole(added).startswith("<|im_end|>\n<|im_start|>user")
    assert sum(trajectory.action_mask) == len(cut.token_ids) + len(last.token_ids)
    assert (episode.ended, episode.finish_reason) == ("done", "stop")


async def test_rewritten_history_continues_in_another_trajectory(tmp_path: Path) -> None:
    model = build_chat_model(tmp_path, "qwen3")
    tokenizer = Tokenizer(model)
    texts = ["<think>\nhm\n</think>\n\none<|im_end|>", "<think>\nhm\n</think>\n\ntwo<|im_end|>"]
    answers = [chat_answer(tokenizer, text, version=version) for version, text in enumerate(texts)]
    limits: dict[str, Any] = {"sampling": {"max_tokens": 200}}
    env = chat(Turn([USER], 0.5))
    first, second = (await play(model, env, answers, episode={"history": "template"}, **limits))[0]
    assert (first.episode, second.episode) == (0, 0)
    assert (first.reward, first.scores) == (second.reward, second.scores)
    assert [sum(each.action_mask) for each in (first, second)] == [len(answer.token_ids) for answer in answers]
    assert [span.version for each in (first, second) for span in each.spans] == [0, 1]
    assert [span.value for span in first.rewards] == [0.5]
    assert [span.value for span in second.rewards] == [2.0]
    kept = tokenizer.decode_whole(codec.token_ids(second).tolist())
    assert kept.count("hm") == 1
    assert kept.endswith("<|im_start|>assistant\n" + texts[1])
    (whole,) = (await play(model, chat(Turn([USER])), answers, **limits))[0]
    assert tokenizer.decode_whole(codec.token_ids(whole).tolist()).count("hm") == 2


async def test_unchanged_history_stays_in_one_trajectory(chatml: Path) -> None:
    answers = [chat_answer(Tokenizer(chatml), text) for text in ("one<|im_end|>", "two<|im_end|>")]
    streams = [
        (await play(chatml, chat(Turn([USER])), answers, episode={"history": history, "tokens": 300}))[0]
        for history in ("sampled", "template")
    ]
    assert streams[0] == streams[1]


@pytest.mark.parametrize(
    ("episode", "ended"),
    [({"turns": 2, "tokens": 500}, "turns"), ({"tokens": 40}, "tokens"), ({"tokens": 500}, "done")],
)
async def test_budget_ends_an_episode(chatml: Path, episode: dict[str, Any], ended: str) -> None:
    answers = [chat_answer(Tokenizer(chatml), "one<|im_end|>")] * 4
    (trajectory,), seen, engine = await play(chatml, chat(*[Turn([USER], 0.25)] * 3), answers, episode=episode)
    assert (trajectory.finish_reason, seen.ended) == (ended, ended)
    assert len(seen.turns) == len(engine.contexts) == {"turns": 2, "tokens": 2, "done": 4}[ended]
    assert trajectory.action_mask[-1] == 1
    assert (trajectory.finish_reason in m.CUT_OFF) == (ended == "tokens")


@pytest.mark.parametrize("observation", ["look " * 50, [{**USER, "content": "look " * 50}]], ids=["text", "messages"])
async def test_long_observation_is_cut_and_counted(chatml: Path, observation: Any) -> None:
    answers = [chat_answer(Tokenizer(chatml), "one<|im_end|>")] * 3
    limits = {"observation_tokens": 20, "tokens": 500}
    env = chat(Turn(observation), Turn([USER]))
    (trajectory,), seen, _ = await play(chatml, env, answers, episode=limits)
    assert trajectory.scores["env/observations_cut"] == 1
    shown = seen.turns[0].observation
    text = shown if isinstance(shown, str) else shown[0]["content"]
    assert text.endswith(CUT_MARK)
    assert len(Tokenizer(chatml).encode_observation(text)) <= 21
    assert seen.turns[1].observation == [USER]


def test_short_messages_leave_their_share_to_longer_ones(chatml: Path) -> None:
    tokenizer = Tokenizer(chatml)
    texts = ["a", "look " * 60, {"parts": []}]
    messages = [{"role": "tool", "content": text} for text in texts]
    shortened, is_cut = shorten(messages, tokenizer, 41)
    contents = [message["content"] for message in shortened if not isinstance(message, str)]
    assert (is_cut, contents[0], contents[2]) == (True, "a", {"parts": []})
    assert 30 < len(tokenizer.encode_observation(contents[1])) <= 41


@pytest.mark.parametrize("place", ["answer", "step"])
async def test_wall_clock_ends_an_episode_and_keeps_it(chatml: Path, place: str) -> None:
    tokenizer = Tokenizer(chatml)
    answers = [chat_answer(tokenizer, "one<|im_end|>"), chat_answer(tokenizer, "tw", finish_reason="abort")]
    hanging = chat(Turn([USER], 0.5) if place == "answer" else HANG)
    (trajectory,), seen, _ = await play(chatml, hanging, answers, episode={"wall_s": 0.2, "tokens": 300})
    assert trajectory.finish_reason == seen.ended == "wall"
    assert seen.finish_reason == "length"
    assert len(seen.turns) == (2 if place == "answer" else 1)
    assert trajectory.scores["env"] == (0.5 if place == "answer" else 0.0)


@pytest.mark.parametrize(("template", "history"), [("qwen3", "template"), ("qwen3", "sampled"), ("chatml", "template")])
async def test_cut_before_first_token_keeps_earlier_answers(tmp_path: Path, template: str, history: str) -> None:
    """In the first case, the context of the answer that is cut off is a new token sequence."""
    model = build_chat_model(tmp_path, template)
    first = chat_answer(Tokenizer(model), "<think>\nhm\n</think>\n\none<|im_end|>")
    limits: dict[str, Any] = {"episode": {"history": history, "wall_s": 60, "tokens": 300}}
    env = chat(Turn([USER], 0.5))
    trajectories, seen, engine = await play(model, env, [first, completion([], finish_reason="abort")], **limits)
    (trajectory,) = trajectories
    assert codec.token_ids(trajectory).tolist() == [*engine.contexts[0], *first.token_ids]
    assert sum(trajectory.action_mask) == len(first.token_ids)
    assert (trajectory.finish_reason, len(seen.turns)) == ("wall", 1)
    assert (trajectory.reward, [span.value for span in trajectory.rewards]) == (1.5, [1.5])


@pytest.mark.parametrize("finish_reason", ["abort", "stop"])
async def test_episode_without_a_token_is_lost_alone(chatml: Path, finish_reason: str) -> None:
    one = chat_answer(Tokenizer(chatml), "one<|im_end|>")
    empty = completion([], finish_reason=finish_reason)
    engine = Scripted([empty, one, one, empty])
    config = run_config(chatml, episode={"wall_s": 60}, group_size=3, min_episodes=2)
    player = build_player(config, chatml, engine, env=chat())
    trajectories = await player.play("train", 0, samples=3)
    assert [sum(each.action_mask) for each in trajectories] == [len(one.token_ids)] * 2
    with pytest.raises(EpisodeFailed) as failed:
        await player.play("train", 0, samples=1)
    assert failed.value.reason == "generation_timeout"


def broken(folder: Path, template: str) -> ChatFormat:
    """The format of a chat model with another template."""
    build_chat_model(folder, "chatml")
    (folder / "chat_template.jinja").write_text(template)
    return ChatFormat.of(Tokenizer(folder), EpisodeConfig())


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for m in messages %}{{ m.content }}{{ loop.index }}{% endfor %}<|im_end|>", "im_end"),
        ("{% for m in messages %}{{ loop.length }}{{ m.content }}<|im_end|>{% endfor %}", "5"),
        ("{{ raise_exception('only one turn') if messages | length > 1 }}", "only one turn"),
    ],
    ids=["no-stop-token", "numbered", "raises"],
)
def test_template_without_deltas_is_refused(tmp_path: Path, template: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        broken(tmp_path, template).check(tools=False)
    assert str(tmp_path) in str(error.value)


def test_tools_need_a_known_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tool_format"):
        broken(tmp_path, "{{ tools }}" + CHATML).check(tools=True)


@pytest.mark.parametrize("tool_format", ["auto", "hermes"])
def test_template_that_ignores_tools_is_refused(chatml: Path, tool_format: Any) -> None:
    with pytest.raises(ConfigError, match="tool_prompt=system") as error:
        ChatFormat.of(Tokenizer(chatml), EpisodeConfig(tool_format=tool_format)).check(tools=True)
    assert str(chatml) in str(error.value)


def test_messages_that_a_template_refuses_raise(tmp_path: Path) -> None:
    format = ChatFormat.of(Tokenizer(build_chat_model(tmp_path, "gemma")), EpisodeConfig())
    with pytest.raises(PromptError):
        format.delta([RESULT])
    with pytest.raises(PromptError):
        format.encoded("no stop token")
