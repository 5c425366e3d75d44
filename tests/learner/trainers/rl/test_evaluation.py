"""The wait for the last evaluation, and the engine mismatch of its answers."""

from collections.abc import Callable
from typing import cast

import msgspec
import pytest
import torch

from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import action_mask, behaviour_logprobs
from slipstream.configs import RunConfig
from slipstream.learner.data.buffer_feed import token_sequence
from slipstream.learner.data.packing import pack
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.rl import evaluation
from slipstream.learner.trainers.rl.evaluation import await_reports, engine_mismatch
from tests.learner.recorded import build_train_step, step_groups

DEADLINE_S = 30.0
EVALUATED = m.EvalReport(version=3, score=0.5, tasks=2, failures={}, eval_s=1.0, group_ids=["7", "8"])


class Forgetful:
    """A buffer whose Redis has lost that a version is to be evaluated."""

    def __init__(self) -> None:
        self.asked = False

    def repeat_reports(self) -> None:
        self.asked = True

    def state(self) -> None:
        """Brings the reports."""

    def take_evals(self) -> list[m.EvalReport]:
        return [EVALUATED] if self.asked else []


def test_lost_final_evaluation_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "CALLBACK_S", 0.2)
    buffer = cast(BufferClient, Forgetful())
    assert await_reports(buffer, EVALUATED.version, deadline_s=DEADLINE_S) == [EVALUATED]


def test_engine_mismatch_measures_known_error(world: World, make_config: Callable[..., RunConfig]) -> None:
    config, difference = make_config(), 1e-4
    model = build_train_step(config, world).model

    def off_by(answer: m.Trajectory) -> m.Trajectory:
        (batch,) = pack([token_sequence(answer, {})], token_budget=64)
        with torch.no_grad():
            own_A = score_actions(model, batch, temperature=1.0).logprobs_A
        logprobs = behaviour_logprobs(answer).copy()
        logprobs[action_mask(answer) > 0] = own_A.numpy() + difference
        return msgspec.structs.replace(answer, behaviour_logprobs=logprobs.tobytes())

    group = step_groups(0, config)[0]
    group = msgspec.structs.replace(group, trajectories=[off_by(each) for each in group.trajectories])
    figures = engine_mismatch(model, [group], version=0, token_budget=64, temperature=1.0, device=world.device)
    assert figures["mismatch_abs"] == pytest.approx(difference, rel=0.01)
    assert figures["mismatch_k3"] == pytest.approx(difference**2 / 2, rel=0.02)


def test_engine_mismatch_is_of_evaluated_version_only(world: World, make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    group = step_groups(1, config)[0]
    spans = [span for answer in group.trajectories for span in answer.spans]
    assert {span.version for span in spans} == {0, 1}
    model = build_train_step(config, world).model
    figures = engine_mismatch(model, [group], version=1, token_budget=64, temperature=1.0, device=world.device)
    assert figures["mismatch_tokens"] == sum(span.end - span.start for span in spans if span.version == 1)
