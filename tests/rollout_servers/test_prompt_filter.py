"""Tasks whose prompts are too long for the engine."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.rollout import EpisodeConfig, RolloutConfig
from slipstream.configs.schema.run import EnvConfig, ToolConfig
from slipstream.env.base import Env, Split, Task, has_sessions
from slipstream.env.builtin.mix import Mix, Part
from slipstream.env.registry import add_tools
from slipstream.env.tools.session import ToolEnv
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers import prompt_filter
from slipstream.rollout_servers.prompt_filter import without_long_prompts
from slipstream.rollout_servers.rollouts.conversation import ChatFormat
from tests.rollout_servers.rollouts.chat import build_chat_model

LIMIT = 60
CONFIG = RolloutConfig.model_validate({"engine": {"max_model_len": LIMIT + 4}, "sampling": {"max_tokens": 4}})


@dataclass(frozen=True)
class Prompts:
    """Tasks of these prompts; an exception is raised. Held-out tasks are the same."""

    prompts: tuple[Any, ...]

    def size(self, split: Split) -> int:
        return len(self.prompts)

    def task(self, split: Split, index: int) -> Task:
        if isinstance(self.prompts[index], Exception):
            raise self.prompts[index]
        return Task(prompt=self.prompts[index], reference="")

    def fingerprint(self) -> str:
        return str(len(self.prompts))


class PromptsWithSessions(Prompts):
    def session(self, task: Task) -> Any:
        return task


class CountingTokenizer(Tokenizer):
    """Counts the prompts that it encodes."""

    calls = 0

    def encode(self, prompt: Any, **more: Any) -> list[int]:
        self.calls += 1
        return super().encode(prompt, **more)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> CountingTokenizer:
    made = CountingTokenizer(model)
    made._tokenizer.chat_template = "{% for each in messages %}+{{ each.content }}{% endfor %}="
    return made


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def train_prompts(env: Env) -> list[Any]:
    return [env.task("train", index).prompt for index in range(env.size("train"))]


def test_prompts_that_are_too_long_are_left_out(tokenizer: CountingTokenizer) -> None:
    length = LIMIT - len(tokenizer.encode(chat("")))  # of a chat that just fits
    named = {"role": "user", "content": "1", "name": "x"}
    fitting = ["1" * LIMIT, "1", chat("1" * length), [named], "\ud800"]
    long = [
        "1" * (LIMIT + 1),
        chat("1" * (length + 1)),
        chat("1" * LIMIT, "1"),
        [{**named, "content": "1" * 99}],
        "1" * 99,
    ]
    env = Prompts(tuple(prompt for pair in zip(fitting, long, strict=True) for prompt in pair))
    with capture_logs() as logs:
        kept = without_long_prompts(env, tokenizer, CONFIG)
    assert train_prompts(kept) == fitting
    assert kept.size("eval") == 5
    assert [(log["train"], log["eval"]) for log in logs if "limit" in log] == [(5, 5)]
    assert kept.fingerprint() != env.fingerprint()
    same = without_long_prompts(env, tokenizer, CONFIG)
    assert same.fingerprint() == kept.fingerprint()
    other = without_long_prompts(Prompts((*env.prompts[::-1],)), tokenizer, CONFIG)
    assert other.fingerprint() != kept.fingerprint()


def test_schemas_of_tools_count(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build_chat_model(tmp_path, "chatml"))
    env = add_tools(Prompts(("1", "1" * 50)), EnvConfig(tools=(ToolConfig(name="calculator"),)))
    assert isinstance(env, ToolEnv)
    episode = EpisodeConfig(tool_prompt="system")
    format = ChatFormat.of(tokenizer, episode)
    shown = format.for_template(env.opening(env.task("train", 0)))
    limit = len(tokenizer.encode(shown.messages)) + 20
    sections = {"engine": {"max_model_len": limit + 4}, "sampling": {"max_tokens": 4}, "episode": episode}
    kept = without_long_prompts(env, tokenizer, RolloutConfig.model_validate(sections))
    assert train_prompts(kept) == ["1"]


def test_short_prompts_are_not_tokenized(tokenizer: CountingTokenizer) -> None:
    env = Prompts(("1", "22", chat("1"), chat("2"), chat("3", "4")))
    before = tokenizer.calls
    assert without_long_prompts(env, tokenizer, CONFIG) is env
    assert tokenizer.calls - before == 2  # the template alone, for each sequence of roles


def test_tasks_that_fail_are_kept(tokenizer: CountingTokenizer) -> None:
    kept = without_long_prompts(Prompts((KeyError("x"), [{"role": 3}], "1" * 99)), tokenizer, CONFIG)
    assert kept.size("train") == 2
    with pytest.raises(KeyError):
        kept.task("train", 0)


def test_sessions_and_labels_are_kept(tokenizer: CountingTokenizer) -> None:
    long = "1" * 99
    with_sessions = without_long_prompts(PromptsWithSessions(("1", long)), tokenizer, CONFIG)
    assert has_sessions(with_sessions)
    session: Any = with_sessions.session(with_sessions.task("train", 0))
    assert session == Task(prompt="1", reference="")
    mixed = without_long_prompts(Mix([Part("one", Prompts(("1", long)), 1.0)]), tokenizer, CONFIG)
    assert not has_sessions(mixed)
    assert getattr(mixed, "labels", ()) == ("one",)


def test_env_without_fitting_tasks_is_refused(tokenizer: CountingTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=re.escape("rollout.engine.max_model_len")):
        without_long_prompts(Prompts(("1" * 99,)), tokenizer, CONFIG)
    monkeypatch.setattr(prompt_filter, "_MOST_TASKS", 3)
    with pytest.raises(ConfigError, match=re.escape("rollout.skip_long_prompts")):
        without_long_prompts(Prompts(("1", "2")), tokenizer, CONFIG)
