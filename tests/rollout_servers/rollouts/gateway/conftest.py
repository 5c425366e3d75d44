"""A chat model without tools, and engines whose answers are scripted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.models.tokenizer import Tokenizer
from tests.rollout_servers.rollouts.chat import build_chat_model
from tests.rollout_servers.rollouts.gateway.harness import Recorder
from tests.rollout_servers.rollouts.test_conversation import chat_answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chat_model(tmp_path_factory.mktemp("gateway") / "model", "chatml")


@pytest.fixture(scope="module")
def answers(model: Path) -> Callable[..., Recorder]:
    tokenizer = Tokenizer(model)

    def make(*texts: str, **options: Any) -> Recorder:
        return Recorder(None, [chat_answer(tokenizer, f"{text}<|im_end|>") for text in texts], **options)

    return make
