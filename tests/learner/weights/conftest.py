"""A publisher over real transports, and members that join it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.transports import build_transports
from tests.conftest import free_port
from tests.learner.weights.learner import Join, Learner
from tests.learner.weights.member import Member

DEADLINE_S = 30.0
"""Of the weight channel: longer than anything that a sound member does takes."""


@pytest.fixture
def deadline_s() -> float:
    return DEADLINE_S


@pytest.fixture
def transport() -> str:
    return "gloo"


@pytest.fixture
def rolling() -> bool:
    return False


@pytest.fixture
def config(tmp_path: Path, deadline_s: float, transport: str, rolling: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": f"published-{tmp_path.name}", "dir": str(tmp_path)}, "model": {"build": "digits"},
            "weights": {
                "transport": transport, "control_port": free_port(), "store_port": free_port(),
                "stream_port": free_port(), "deadline_s": deadline_s, "bucket_bytes": 1 << 16, "rolling": rolling,
            },
        }
    )  # fmt: skip


@pytest.fixture
def learner(config: RunConfig) -> Iterator[Learner]:
    learner = Learner(
        config, WeightPublisher(config.weights, config.security, build_transports(config), run=config.run.name)
    )
    yield learner
    learner.close()


@pytest.fixture
def join(config: RunConfig) -> Iterator[Join]:
    """Makes members, in threads."""
    with ExitStack() as stack:

        def make(name: str, *, transports: tuple[str, ...] | None = None, **hooks: Any) -> Member:
            spoken = transports or tuple(dict.fromkeys((config.weights.transport, "stream")))
            member = Member(config, name, transports=spoken)
            for hook, function in hooks.items():
                setattr(member, hook, function)
            stack.callback(member.close)
            return member.start()

        yield make


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """Threads for what goes on in other processes otherwise."""
    with ThreadPoolExecutor() as beside:
        yield beside
