"""Publications reach real members through the real transports, and no member can make them hang."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from torch import Tensor, nn

from slipstream.buffer.wire import weights as w
from slipstream.configs import RunConfig
from slipstream.configs.errors import ConfigError
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker
from slipstream.learner.weights.transports.build import build_transports
from tests.conftest import free_port
from tests.learner.weights.member import Member
from tests.learner.weights.member import main as member_main

PATIENCE_S = 60.0
"""Within which everything happens, however busy the machine is."""
DEADLINE_S = 30.0
"""Of the weight channel: longer than anything that a sound member does takes."""
SHORT_S = 2.0
"""The deadline where it is to pass; a sound member that misses it too comes back."""

short_deadline = pytest.mark.parametrize("deadline_s", [SHORT_S])
every_transport = pytest.mark.parametrize("transport", ["gloo", "shm", "file", "stream"])

Join = Callable[..., Member]


class Learner:
    """A model whose weights are other ones in every version, and the publisher."""

    def __init__(self, config: RunConfig, publisher: WeightPublisher) -> None:
        self.publisher = publisher
        self.sent: dict[int, dict[str, Tensor]] = {}
        torch.manual_seed(0)
        self._model = nn.Linear(300, 70)
        self._snapshots = SnapshotTaker(
            self._model,
            dtype=torch.float32,
            bucket_bytes=config.weights.bucket_bytes,
            device=torch.device("cpu"),
            segments=config.run.name if config.weights.transport in {"auto", "shm"} else None,
        )

    def publish(self, version: int) -> None:
        """Trains a little, takes a snapshot and hands it over."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter))
        snapshot = self._snapshots.take(version, evaluate=False, keep=True)
        assert snapshot is not None
        self.sent[version] = {name: tensor.clone() for name, tensor in snapshot.named_tensors()}
        self.publisher.publish(snapshot)

    def wait(self) -> float:
        """Waits for the publication under way, but not for ever; how long it took in seconds."""
        waiting = threading.Thread(target=self.publisher.wait, daemon=True)
        started = time.monotonic()
        waiting.start()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive(), f"the publication hangs for {PATIENCE_S} s"
        return time.monotonic() - started

    def members(self) -> set[str]:
        """Who is fed at the moment."""
        return {member.name for member in self.publisher._roster}

    def close(self) -> None:
        """Ends everything."""
        self.publisher.close()
        self._snapshots.close()


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
            "run": {"name": f"published-{tmp_path.name}", "dir": str(tmp_path)},
            "model": {"build": "digits"},
            "weights": {
                "transport": transport, "control_port": free_port(), "store_port": free_port(),
                "stream_port": free_port(), "deadline_s": deadline_s, "bucket_bytes": 1 << 16, "rolling": rolling,
            },
        }
    )  # fmt: skip


@pytest.fixture
def learner(config: RunConfig) -> Iterator[Learner]:
    learner = Learner(config, WeightPublisher(config, build_transports(config)))
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


def same(received: dict[str, Tensor], sent: dict[str, Tensor]) -> bool:
    """Whether every tensor arrived bit for bit."""
    return received.keys() == sent.keys() and all(torch.equal(received[name], sent[name]) for name in sent)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        pause.wait(0.02)


def gathered(learner: Learner, *names: str) -> None:
    """Returns once exactly these are members."""
    wait_until(lambda: learner.members() == set(names))


@every_transport
def test_every_version_reaches_every_member_bit_for_bit(learner: Learner, join: Join, transport: str) -> None:
    members = [join("one"), join("two")]
    gathered(learner, "one", "two")
    for version in (1, 2, 3):
        learner.publish(version)
        for member in members:
            assert same(member.wait_for(version), learner.sent[version])
    learner.wait()
    figures = learner.publisher.figures
    assert len(figures.published_s) == 3
    assert figures.stalls_s[-2:] == [0.125, 0.125]
    assert figures.evictions == 0
    assert all(member.announced == [(version, transport) for version in (1, 2, 3)] for member in members)


def test_without_members_a_publication_is_done_at_once(learner: Learner) -> None:
    for version in (1, 2):
        learner.publish(version)
        assert learner.wait() < DEADLINE_S


@every_transport
def test_a_late_joiner_gets_the_latest_version_and_nobody_else_is_bothered(
    learner: Learner, join: Join, transport: str
) -> None:
    early = join("early")
    gathered(learner, "early")
    for version in (1, 2):
        learner.publish(version)
    early.wait_for(2)
    late = join("late")
    assert same(late.wait_for(2), learner.sent[2])
    assert late.announced == [(2, "stream" if transport == "gloo" else transport)]
    wait_until(lambda: all(member.version == 2 for member in learner.publisher._roster))
    learner.publish(3)
    for member in (early, late):
        assert same(member.wait_for(3), learner.sent[3])
        assert member.announced[-1] == (3, transport)
    assert early.announced == [(version, transport) for version in (1, 2, 3)]


@pytest.mark.parametrize("transport", ["shm", "stream"])
def test_a_late_joiner_never_gets_weights_of_two_versions(learner: Learner, join: Join) -> None:
    """Its transfer may still be under way when the learner has published and trained on."""
    learner.publish(1)
    learner.wait()
    loading, go_on = threading.Event(), threading.Event()

    def hesitate() -> None:
        loading.set()
        assert go_on.wait(PATIENCE_S)

    late = join("late", before_loading=hesitate)
    assert loading.wait(PATIENCE_S)

    def publish_three() -> None:
        for version in (2, 3, 4):
            learner.publish(version)

    training = threading.Thread(target=publish_three)
    training.start()
    training.join(0.5)  # either it has overwritten version 1 by then, or it waits for the late joiner
    go_on.set()
    late.wait_for(4)
    training.join(PATIENCE_S)
    for version, data in late.received.items():
        assert same(data, learner.sent[version]), f"what came as version {version} is something else"


def test_who_joins_while_a_group_is_formed_is_fed_beside_it_and_nobody_is_evicted(learner: Learner, join: Join) -> None:
    entering, go_on = threading.Event(), threading.Event()

    def hesitate() -> None:
        entering.set()
        assert go_on.wait(PATIENCE_S)

    first = join("first", before_entering=hesitate)
    gathered(learner, "first")
    learner.publish(1)
    assert entering.wait(PATIENCE_S)
    second = join("second")
    assert same(second.wait_for(1), learner.sent[1])
    go_on.set()
    assert same(first.wait_for(1), learner.sent[1])
    learner.wait()
    assert learner.publisher.figures.evictions == 0


@pytest.mark.parametrize("transport", ["shm", "stream", "file"])
def test_a_slow_member_ends_with_the_latest_version_and_the_fast_ones_have_got_every_one(
    learner: Learner, join: Join, transport: str
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def dawdle() -> None:
        held.set()
        assert go_on.wait(PATIENCE_S)

    fast, slow = join("fast"), join("slow", before_applying=dawdle)
    gathered(learner, "fast", "slow")
    for version in range(1, 5):
        learner.publish(version)
        assert same(fast.wait_for(version), learner.sent[version])
    assert held.is_set(), "it is still at the first one"
    go_on.set()
    assert same(slow.wait_for(4), learner.sent[4])
    learner.wait()
    assert sorted(slow.received) == [1, 4], "it has left out those that were overtaken"
    assert learner.publisher.figures.evictions == 0


def test_members_of_several_transports_are_fed_at_the_same_time(config: RunConfig, join: Join) -> None:
    auto = config.model_copy(update={"weights": config.weights.model_copy(update={"transport": "auto"})})
    with closing(Learner(auto, WeightPublisher(auto, build_transports(auto)))) as learner:
        members = {name: join(name, transports=(name,)) for name in ("shm", "gloo", "stream")}
        gathered(learner, *members)
        for version in (1, 2):
            learner.publish(version)
            for name, member in members.items():
                assert same(member.wait_for(version), learner.sent[version])
                assert member.announced[-1] == (version, name)


def test_a_member_without_a_transport_in_common_is_told_so_and_holds_up_nobody(learner: Learner, join: Join) -> None:
    good, stranger = join("good"), join("stranger", transports=("pigeon",))
    gathered(learner, "good", "stranger")
    learner.publish(1)
    assert same(good.wait_for(1), learner.sent[1])
    wait_until(lambda: bool(stranger.evictions))
    assert "receives through pigeon, but the learner sends through gloo, stream" in stranger.evictions[0]


@every_transport
@short_deadline
def test_a_member_that_never_answers_is_evicted_within_the_deadline_and_the_others_get_the_version(
    learner: Learner, join: Join
) -> None:
    mute = join("mute", says=lambda answer: None)
    good = join("good")
    gathered(learner, "good", "mute")
    learner.publish(1)
    assert same(good.wait_for(1), learner.sent[1])
    mute.close()
    learner.wait()
    assert learner.publisher.figures.evictions >= 1
    assert mute.received == {}


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("kind", [w.Ready, w.Loaded, w.Applied])
def test_an_answer_for_the_wrong_version_gets_its_member_evicted_at_once_by_name(
    learner: Learner, join: Join, kind: type[w.Ready | w.Loaded | w.Applied]
) -> None:
    def lie(answer: Any) -> Any:
        return msgspec.structs.replace(answer, version=answer.version + 7) if isinstance(answer, kind) else answer

    liar, good = join("liar", says=lie), join("good")
    gathered(learner, "liar", "good")
    learner.publish(1)
    assert same(good.wait_for(1), learner.sent[1])
    wait_until(lambda: bool(liar.evictions))
    assert liar.evictions[0] == f"answered {kind.__name__} for version 8, not for 1"
    assert good.evictions == []


@short_deadline
def test_a_member_that_never_enters_the_group_is_named_and_the_others_get_the_version(
    learner: Learner, join: Join
) -> None:
    stay_out = threading.Event()

    def never() -> None:
        stay_out.wait(PATIENCE_S)
        raise RuntimeError("stays outside")

    good, outside = join("good"), join("outside", before_entering=never)
    gathered(learner, "good", "outside")
    learner.publish(1)
    assert same(good.wait_for(1), learner.sent[1])
    wait_until(lambda: bool(outside.evictions))
    assert "did not enter the transfer group in time" in outside.evictions[0]
    assert good.evictions == []
    stay_out.set()


@short_deadline
def test_a_member_that_fails_again_and_again_stays_out_longer_each_time(learner: Learner, join: Join) -> None:
    def fail(answer: Any) -> Any:
        return (
            w.Failed(transfer=answer.transfer, stage="receive", detail="no") if isinstance(answer, w.Ready) else answer
        )

    good, bad = join("good"), join("bad", says=fail)
    gathered(learner, "good", "bad")
    for version in range(1, 6):
        learner.publish(version)
        assert same(good.wait_for(version), learner.sent[version])
    assert good.evictions == []
    wait_until(lambda: len(bad.evictions) >= 2)
    evictions = len(bad.evictions)
    for version in range(6, 9):  # it stays out for two seconds and more
        learner.publish(version)
        good.wait_for(version)
    assert len(bad.evictions) <= evictions + 1


def test_a_member_that_leaves_is_not_waited_for_and_does_not_count_as_evicted(learner: Learner, join: Join) -> None:
    entering = threading.Event()
    stays, leaves = join("stays"), join("leaves", leaves=True, before_applying=entering.set)
    gathered(learner, "stays", "leaves")
    learner.publish(1)
    for member in (stays, leaves):
        member.wait_for(1)
    leaves.close()
    gathered(learner, "stays")
    learner.publish(2)
    assert same(stays.wait_for(2), learner.sent[2])
    assert learner.publisher.figures.evictions == 0


@every_transport
def test_a_member_whose_engine_was_started_anew_gets_the_latest_version_again(learner: Learner, join: Join) -> None:
    member = join("member")
    gathered(learner, "member")
    learner.publish(1)
    member.wait_for(1)
    learner.wait()
    del member.received[1]
    member.restart()
    assert same(member.wait_for(1), learner.sent[1])
    learner.publish(2)
    assert same(member.wait_for(2), learner.sent[2])


@pytest.mark.parametrize("rolling", [True])
def test_rolling_updates_stop_one_member_at_a_time(learner: Learner, join: Join) -> None:
    applying: list[str] = []
    overlaps: list[list[str]] = []
    lock, pause = threading.Lock(), threading.Event()

    def begin(name: str) -> Callable[[], None]:
        def apply() -> None:
            with lock:
                applying.append(name)
                overlaps.append(list(applying))
            pause.wait(0.1)

        return apply

    def end(name: str) -> Callable[[Any], Any]:
        def say(answer: Any) -> Any:
            if isinstance(answer, w.Applied):
                with lock:
                    applying.remove(name)
            return answer

        return say

    names = ("one", "two", "three")
    members = [join(name, before_applying=begin(name), says=end(name)) for name in names]
    gathered(learner, *names)
    learner.publish(1)
    for member in members:
        assert same(member.wait_for(1), learner.sent[1])
    assert sorted(overlaps) == [["one"], ["three"], ["two"]]


@contextmanager
def victim(forks: ForkServerContext, config: RunConfig, transports: str, dies_at: str) -> Iterator[BaseProcess]:
    """A member in a process of its own, which kills or freezes itself."""
    process = forks.Process(target=member_main, args=(config.model_dump_json(), "victim", transports, dies_at))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("deadline_s", [4 * SHORT_S])
@pytest.mark.parametrize(
    ("transport", "dies_at"),
    [
        *(("gloo", moment) for moment in ("rest", "rest-frozen", "ready", "loading", "loading-frozen", "applying")),
        *((transport, moment) for transport in ("shm", "stream") for moment in ("loading", "loading-frozen")),
    ],
)
def test_a_member_that_dies_or_freezes_holds_up_nobody_beyond_the_deadline(
    config: RunConfig, learner: Learner, join: Join, forks: ForkServerContext, dies_at: str, transport: str
) -> None:
    survivor = join("survivor")
    with victim(forks, config, f"{transport},stream", dies_at) as dying:
        gathered(learner, "survivor", "victim")
        learner.publish(1)
        wait_until(lambda: len(learner.publisher.figures.stalls_s) >= 2)  # the victim has applied version 1
        if dies_at.startswith("rest"):
            assert dying.pid is not None, "it was started"
            os.kill(dying.pid, signal.SIGSTOP if dies_at == "rest-frozen" else signal.SIGKILL)
        for version in (2, 3):
            learner.publish(version)
            assert same(survivor.wait_for(version), learner.sent[version])
        wait_until(lambda: learner.publisher.figures.evictions >= 1)
        learner.wait()
    assert survivor.evictions == []


@pytest.mark.parametrize("deadline_s", [10 * PATIENCE_S])
def test_a_member_that_is_killed_while_it_applies_is_evicted_long_before_the_deadline(
    config: RunConfig, learner: Learner, join: Join, forks: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.learner.weights.conversation.SILENT_S", 3.0)
    survivor = join("survivor")
    with victim(forks, config, "gloo", "applying"):
        gathered(learner, "survivor", "victim")
        for version in (1, 2):
            learner.publish(version)
            assert same(survivor.wait_for(version), learner.sent[version])
        learner.wait()
    assert learner.publisher.figures.evictions == 1


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
        assert same(member.wait_for(1), learner.sent[1])
    assert stranger.announced == []


def test_a_busy_control_port_is_named_with_its_key(config: RunConfig) -> None:
    with (
        socket.create_server(("127.0.0.1", config.weights.control_port)),
        pytest.raises(ConfigError, match=rf"{config.weights.control_port}.*weights\.control_port"),
    ):
        WeightPublisher(config, {})
