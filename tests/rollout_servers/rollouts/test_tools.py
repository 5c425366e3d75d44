"""Episodes with `env.tools`, from the configuration to the trajectory, with a scripted engine."""

from pathlib import Path

import pytest

from slipstream.buffer.wire import codec
from slipstream.configs.schema.run import EnvConfig, ToolConfig
from slipstream.env.registry import build_env
from slipstream.env.tools.schema import ToolUnavailable
from slipstream.rollout_servers.rollouts.base import EpisodeFailed
from slipstream.rollout_servers.tokenizer import Tokenizer
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.test_conversation import Scripted, chat_answer, run_config
from tests.rollout_servers.scripted import build_player

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def closed_shop(goods: str) -> str:
    raise ToolUnavailable("the shop is closed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_chat_model(tmp_path_factory.mktemp("tools"), "chatml")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


async def test_calls_run_and_their_results_are_observed(model: Path) -> None:
    env = build_env(EnvConfig(options={"operation": "add"}, tools=(ToolConfig(name="calculator"),)))
    texts = [
        'Two.<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
        '<tool_call>{"name": "calculator", "arguments": {</tool_call><|im_end|>',
        f"{env.task('train', 0).reference}<|im_end|>",
    ]
    tokenizer = Tokenizer(model)
    answers = [chat_answer(tokenizer, text) for text in texts]
    engine = Scripted(answers)
    player = build_player(run_config(model, sampling={"max_tokens": 1000}), model, engine, env=env)
    (trajectory,) = await player.play("train", 0, samples=1)

    assert '"name": "calculator"' in tokenizer.decode_whole(engine.contexts[0])
    added = tokenizer.decode_whole(engine.contexts[1][len(engine.contexts[0]) + len(answers[0].token_ids) :])
    assert "<|im_start|>tool\n42<|im_end|>" in added
    assert "error: not valid JSON" in added
    counts = {name: trajectory.scores[f"env/{name}"] for name in ("tool_calls", "tool_errors", "tool_calls/calculator")}
    assert counts == {"tool_calls": 2, "tool_errors": 1, "tool_calls/calculator": 1}
    assert codec.action_mask(trajectory).sum() == sum(len(answer.token_ids) for answer in answers)


async def test_unavailable_tool_fails_the_group_with_its_reason(model: Path) -> None:
    env = build_env(
        EnvConfig(options={"operation": "add"}, tools=(ToolConfig(name=f"{__name__}:closed_shop"),)),
    )
    call = '<tool_call>{"name": "closed_shop", "arguments": {"goods": "eggs"}}</tool_call><|im_end|>'
    engine = Scripted([chat_answer(Tokenizer(model), call)])
    player = build_player(run_config(model, sampling={"max_tokens": 1000}), model, engine, env=env)
    with pytest.raises(EpisodeFailed, match="the shop is closed") as caught:
        await player.play("train", 0, samples=1)
    assert caught.value.reason == "env_error"
