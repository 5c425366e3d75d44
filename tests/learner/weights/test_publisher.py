"""Publications reach real members through real gloo, and no member can make them hang."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
import zmq
from torch import Tensor, nn

from slipstream.configs import RunConfig
from slipstream.configs.errors import ConfigError
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from slipstream.learner.weights.transport import GlooTransport
from tests.conftest import free_port
from tests.learner.weights.member import Member

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
"""Within which everything happens, however busy the machine is."""
DEADLINE_S = 30.0
"""Of the weight channel: longer than anything that a sound member does takes."""
SHORT_S = 2.0
"""The deadline where it is to pass; a sound member that misses it too comes back."""

short_deadline = pytest.mark.parametrize("deadline_s", [SHORT_S])

Join = Callable[..., Member]


class Learner:
    """A model whose weights are other ones in every version, and the publisher."""

    def __init__(self, config: RunConfig, publisher: WeightPublisher) -> None:
        self.publisher = publisher
        self.sent: dict[int, Tensor] = {}
        torch.manual_seed(0)
        self._model = nn.Linear(300, 70)
        self._snapshots = SnapshotTaker(
            self._model, dtype=torch.float32, bucket_bytes=config.weights.bucket_bytes, device=torch.device("cpu")
        )

    def publish(self, version: int) -> None:
        """Trains a little, takes a snapshot and hands it over."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter))
        snapshot = self._snapshots.take(version, evaluate=False, keep=True)
        assert snapshot is not None
        self.sent[version] = snapshot.data.clone()
        self.publisher.publish(snapshot)

    def wait(self) -> float:
        """Waits for the publication under way, but not for ever; how long it took in seconds."""
        waiting = threading.Thread(target=self.publisher.wait, daemon=True)
        started = time.monotonic()
        waiting.start()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive(), f"the publication hangs for {PATIENCE_S} s"
        return time.monotonic() - started


@pytest.fixture
def deadline_s() -> float:
    return DEADLINE_S


@pytest.fixture
def config(tmp_path: Path, deadline_s: float) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "published", "dir": str(tmp_path)},
            "model": {"build": "digits"},
            "weights": {
                "control_port": free_port(), "store_port": free_port(), "deadline_s": deadline_s,
                "bucket_bytes": 1 << 16,
            },
        }
    )  # fmt: skip


@pytest.fixture
def learner(config: RunConfig) -> Iterator[Learner]:
    publisher = WeightPublisher(config, GlooTransport(config.weights))
    yield Learner(config, publisher)
    publisher.close()


@pytest.fixture
def join(config: RunConfig) -> Iterator[Join]:
    """Makes members, in threads."""
    with ExitStack() as stack:

        def make(
            name: str, *, answers_announce: bool = True, before_entering: Callable[[], None] | None = None
        ) -> Member:
            member = Member(config, name, answers_announce=answers_announce)
            if before_entering is not None:
                member.before_entering = before_entering
            stack.callback(member.close)
            return member.start()

        yield make


def test_every_version_reaches_every_member_bit_for_bit(learner: Learner, join: Join) -> None:
    members = [join("one"), join("two")]
    for version in (1, 2, 3):
        learner.publish(version)
        for member in members:
            assert torch.equal(member.wait_for(version), learner.sent[version])
    learner.wait()
    figures = learner.publisher.figures
    assert len(figures.published_s) == 3
    assert figures.stalls_s[-2:] == [0.125, 0.125]
    assert figures.evictions == 0


def test_without_members_a_publication_is_done_at_once(learner: Learner) -> None:
    for version in (1, 2):
        learner.publish(version)
        assert learner.wait() < DEADLINE_S


def test_a_late_joiner_gets_the_latest_version_without_a_new_publication(learner: Learner, join: Join) -> None:
    early = join("early")
    for version in (1, 2):
        learner.publish(version)
    early.wait_for(2)
    late = join("late")
    assert torch.equal(late.wait_for(2), learner.sent[2])
    assert late.announced == [2]
    learner.publish(3)
    for member in (early, late):
        assert torch.equal(member.wait_for(3), learner.sent[3])


def test_a_late_joiner_never_gets_weights_of_two_versions(learner: Learner, join: Join) -> None:
    """Its transfer may still be under way when the learner has published and trained on."""
    learner.publish(1)
    learner.wait()
    entering, go_on = threading.Event(), threading.Event()

    def hesitate() -> None:
        entering.set()
        assert go_on.wait(PATIENCE_S)

    late = join("late", before_entering=hesitate)
    assert entering.wait(PATIENCE_S)

    def publish_two() -> None:
        for version in (2, 3):
            learner.publish(version)

    training = threading.Thread(target=publish_two)
    training.start()
    training.join(0.5)  # either it has overwritten version 1 by then, or it waits for the late joiner
    go_on.set()
    late.wait_for(3)
    training.join(PATIENCE_S)
    for version, data in late.received.items():
        assert torch.equal(data, learner.sent[version]), f"what came as version {version} is something else"


def test_who_joins_while_a_group_is_formed_is_fed_after_it_and_nobody_is_evicted(learner: Learner, join: Join) -> None:
    entering, go_on = threading.Event(), threading.Event()

    def hesitate() -> None:
        entering.set()
        assert go_on.wait(PATIENCE_S)

    first = join("first", before_entering=hesitate)
    learner.publish(1)
    assert entering.wait(PATIENCE_S)
    second = join("second")
    wait_until(lambda: len(learner.publisher._members) == 2)
    go_on.set()
    for member in (first, second):
        assert torch.equal(member.wait_for(1), learner.sent[1])
    learner.wait()
    assert learner.publisher.figures.evictions == 0


@short_deadline
def test_a_member_that_never_answers_is_evicted_within_the_deadline_and_the_others_get_the_version(
    learner: Learner, join: Join
) -> None:
    good, mute = join("good"), join("mute", answers_announce=False)
    wait_until(lambda: len(learner.publisher._members) == 2)
    learner.publish(1)
    mute.wait_until_announced(1)
    assert torch.equal(good.wait_for(1), learner.sent[1])
    assert learner.publisher.figures.evictions >= 1
    mute.close()  # it would join again, and be evicted again
    learner.wait()
    assert mute.received == {}


@short_deadline
def test_a_member_that_never_enters_the_group_does_not_keep_the_others_from_the_version(
    learner: Learner, join: Join
) -> None:
    good = join("good")
    learner.publish(1)
    good.wait_for(1)
    stay_out = threading.Event()
    join("outside", before_entering=lambda: _raise_after(stay_out))
    wait_until(lambda: len(learner.publisher._members) == 2)
    learner.publish(2)
    learner.wait()
    learner.publish(3)
    stay_out.set()
    assert torch.equal(good.wait_for(3), learner.sent[3])


def _raise_after(event: threading.Event) -> None:
    event.wait(PATIENCE_S)
    raise RuntimeError("stays outside")


@pytest.mark.parametrize("deadline_s", [4 * SHORT_S])
@pytest.mark.parametrize("dies_at", ["rest", "ready"])
def test_a_member_that_is_killed_does_not_hang_the_publication(
    config: RunConfig, learner: Learner, join: Join, dies_at: str
) -> None:
    command = [sys.executable, "-m", "tests.learner.weights.member", config.model_dump_json(), "victim", dies_at]
    survivor = join("survivor")
    with subprocess.Popen(command, cwd=ROOT) as victim:
        try:
            learner.publish(1)
            wait_until(lambda: len(learner.publisher.figures.stalls_s) >= 2)  # the victim has applied version 1
            if dies_at == "rest":
                victim.kill()
            learner.publish(2)
            learner.wait()
            assert victim.wait(PATIENCE_S) < 0
        finally:
            victim.kill()
    assert torch.equal(survivor.wait_for(2), learner.sent[2])
    wait_until(lambda: learner.publisher.figures.evictions >= 1)


@pytest.mark.parametrize("deadline_s", [10 * PATIENCE_S])
def test_a_member_that_is_killed_while_it_applies_is_evicted_long_before_the_deadline(
    config: RunConfig, learner: Learner, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.weights.publisher.SILENT_AT_WORK_S", 3.0)
    command = [sys.executable, "-m", "tests.learner.weights.member", config.model_dump_json(), "victim", "sent"]
    survivor = join("survivor")
    with subprocess.Popen(command, cwd=ROOT) as victim:
        try:
            learner.publish(1)
            wait_until(lambda: len(learner.publisher.figures.stalls_s) >= 2)
            learner.publish(2)
            learner.wait()
            assert victim.wait(PATIENCE_S) < 0
        finally:
            victim.kill()
    assert torch.equal(survivor.wait_for(2), learner.sent[2])
    wait_until(lambda: learner.publisher.figures.evictions >= 1)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        pause.wait(0.02)


def test_garbage_and_servers_of_other_runs_are_ignored(config: RunConfig, learner: Learner, join: Join) -> None:
    elsewhere = config.model_copy(update={"run": config.run.model_copy(update={"name": "other"})})
    stranger = Member(elsewhere, "stranger").start()
    with closing(stranger), zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{config.weights.control_port}")
        for frame in (b"", b"\xff\x00garbage", b"\x80"):
            dealer.send(frame)
        member = join("member")
        learner.publish(1)
        assert torch.equal(member.wait_for(1), learner.sent[1])
    assert stranger.announced == []


def test_a_busy_control_port_is_named_with_its_key(config: RunConfig) -> None:
    with socket.create_server(("127.0.0.1", config.weights.control_port)):
        transport = GlooTransport(config.weights)
        with pytest.raises(ConfigError, match=rf"{config.weights.control_port}.*weights\.control_port"):
            WeightPublisher(config, transport)


def test_a_busy_store_port_is_named_with_its_key(config: RunConfig) -> None:
    with (
        socket.create_server(("127.0.0.1", config.weights.store_port)),
        pytest.raises(ConfigError, match=rf"{config.weights.store_port}.*weights\.store_port"),
    ):
        GlooTransport(config.weights)
