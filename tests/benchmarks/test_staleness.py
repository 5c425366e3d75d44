"""A tiny study of staleness, its processes, the delay of groups, and groups from the learner's own model."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.__main__ import command
from benchmarks.demo import DEMO
from benchmarks.staleness_train import DelayQueue, Sampler
from benchmarks.workers import Stopped
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.wire.codec import token_ids
from slipstream.buffer.wire.messages import TRAIN, Group, VersionSpan
from slipstream.configs import RunConfig
from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.env.registry import build_env
from slipstream.learner.data.buffer_feed import build_step
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import join_world, leave_world
from slipstream.learner.trainers.rl.parts import build_train_step
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.models.folder import initial_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.rewards.functions.text import digit_match
from tests.benchmarks.conftest import Measure
from tests.learner.recorded import vivid

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

STEPS = 60


def test_correction_learns_from_stale_data_clipping_does_not(measured: Measure, tmp_path: Path) -> None:
    plot = tmp_path / "staleness.png"
    options = f"--lags 16 --seeds 1 --steps {STEPS} --jobs 1 --objectives decoupled behaviour-clipped"
    record = measured("staleness", options, "--plot", str(plot))
    value = record["value"]
    assert value["decoupled, k = 16, area"] > value["behaviour-clipped, k = 16, area"]
    assert value["decoupled, k = 16, end"] > value["behaviour-clipped, k = 16, end"] + 0.06
    for run in record["details"]["runs"]:
        assert len(run["rewards"]) == STEPS + 1
        assert run["lags"] == [16] * STEPS
        assert run["figures"]["ess"][0] == pytest.approx(1, abs=1e-3)  # the weights that generated the groups
        assert run["figures"]["kl_k3"][STEPS // 2] > 0.005  # 16 steps later they differ
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_unknown_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--objectives ppo: .*behaviour-clipped, decoupled"):
        command(["staleness", "--objectives", "ppo"])


def test_signal_ends_all_processes(tmp_path: Path) -> None:
    """The signal comes while the first run is trained: it would take hours."""
    options = "--lags 0 --seeds 2 --steps 100000 --jobs 1 --objectives decoupled"
    before = set(psutil.Process().children())

    def interrupt() -> None:
        while not any("staleness_train" in " ".join(child.cmdline()) for child in psutil.Process().children()):
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    ended = threading.Event()
    user = threading.Thread(target=interrupt)
    user.start()
    try:
        with pytest.raises(Stopped, match="SIGINT"):
            command(["staleness", *options.split(), "--json", str(tmp_path / "out.json")])
    finally:
        ended.set()
        user.join()
    assert set(psutil.Process().children()) <= before
    assert list(tmp_path.iterdir()) == []


def one_group(version: int) -> list[Group]:
    return [Group(id=str(version), kind=TRAIN, epoch=0, indices=[0], trajectories=[])]


def trained_versions(queue: DelayQueue, lags: Sequence[int]) -> list[int]:
    """The version whose groups each step trains on."""
    return [int(queue.take(version, lag=lag)[0].id) for version, lag in enumerate(lags)]


@pytest.mark.parametrize(
    ("lags", "trained", "dropped"),
    [
        ([0] * 4, [0, 1, 2, 3], 0),
        ([3] * 8, [0, 0, 0, 0, 1, 2, 3, 4], 0),
        ([4] * 6 + [2] * 2 + [3] + [4] * 5, [0, 0, 0, 0, 0, 1, 4, 5, 6, 7, 8, 8, 9, 9], 2),
    ],
)
def test_groups_are_delayed_by_the_lag(lags: list[int], trained: list[int], dropped: int) -> None:
    queue = DelayQueue(one_group)
    assert trained_versions(queue, lags) == trained
    assert queue.dropped == dropped


@pytest.mark.parametrize("lags", [[5, 0, 5, 5, 5, 5, 5, 5], [0, 7, 7, 1, 3], [3, 3, 2, 1, 0]])
def test_no_group_exceeds_the_lag_and_each_version_generates(lags: list[int]) -> None:
    generated: list[int] = []

    def generate(version: int) -> list[Group]:
        generated.append(version)
        return one_group(version)

    ages = [version - trained for version, trained in enumerate(trained_versions(DelayQueue(generate), lags))]
    assert all(0 <= age <= lag for age, lag in zip(ages, lags, strict=True))
    assert sorted(set(generated)) == list(range(len(lags)))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The demo with few answers at another temperature, its model's matrices ten times as large."""
    changes = ["learner.groups_per_step=4", "rollout.group_size=3", "rollout.sampling.temperature=0.7"]
    made = load_config(DEMO, [f"run.dir={tmp_path}", *changes])
    vivid(initial_model(made))
    return made


@pytest.fixture
def train_step(config: RunConfig) -> Iterator[TrainStep]:
    """The learner before its first step."""
    world = join_world()
    yield build_train_step(config, initial_model(config), world)
    leave_world()


@pytest.fixture
def sampler(config: RunConfig, train_step: TrainStep) -> Sampler:
    """A sampler on the learner's model."""
    return Sampler(config, train_step.model, initial_model(config))


@torch.no_grad()
def test_log_mu_equals_the_learners_scores(config: RunConfig, train_step: TrainStep, sampler: Sampler) -> None:
    assigned = [[(group, 1.0) for group in sampler.groups(0)]]
    data = build_step(assigned, algorithms=config.algorithms, rewards=config.rewards, step=0, consuming_version=0)
    ((batch,),) = data.updates
    scores = score_actions(train_step.model, batch, temperature=0.7)
    own_BT = torch.zeros_like(data.rows.mask_BT)
    batch.put(own_BT, scores.logprobs_A)
    assert data.rows.mask_BT.tolist() == [[1.0] * 3] * 12
    assert own_BT.std() > 0.5
    torch.testing.assert_close(own_BT, data.rows.behaviour_logprobs_BT, rtol=0, atol=1e-5)


def test_groups_follow_the_buffers_task_order_and_rewards(config: RunConfig, sampler: Sampler) -> None:
    env = build_env(config.env)
    groups = sampler.groups(5) + sampler.groups(6)
    order = task_order(env.size("train"), seed=0, epoch=0)
    assert [group.indices for group in groups] == [[index] for index in order[:8]]
    assert [group.id for group in groups] == [str(number) for number in range(8)]
    text = Tokenizer(initial_model(config))
    for group in groups:
        task = env.task("train", group.indices[0])
        for trajectory in group.trajectories:
            tokens = token_ids(trajectory).tolist()
            prompt, answer = text.decode([tokens[:4], tokens[4:]])
            assert prompt == task.prompt
            assert trajectory.reward == digit_match(answer, task.reference, {})
            assert trajectory.scores == {"digit_match": trajectory.reward, "exact_match": answer == task.reference}


def test_answers_differ_and_have_the_requested_version(sampler: Sampler) -> None:
    sampler.groups(5)
    groups = sampler.groups(6)
    spans = [trajectory.spans for group in groups for trajectory in group.trajectories]
    assert spans == [[VersionSpan(version=6, start=4, end=7)]] * 12
    assert len({trajectory.token_ids for trajectory in groups[0].trajectories}) > 1
