"""The last evaluation: the wait for it, and the mismatch between engine and learner on its answers."""

import time
from collections.abc import Sequence

import torch
from torch import nn

from slipstream.buffer.client import BufferClient
from slipstream.buffer.wire.messages import EvalReport, Group
from slipstream.configs.runtime.logging import get_log
from slipstream.learner.algorithms.divergence import k3
from slipstream.learner.data.buffer_feed import CALLBACK_S, token_sequence
from slipstream.learner.data.images import ImageReader
from slipstream.learner.data.packing import pack
from slipstream.learner.data.rows import build_rows
from slipstream.learner.models.scoring import score_actions

log = get_log("learner.evaluation")

POLL_S = 0.1


def await_reports(buffer: BufferClient, version: int, *, deadline_s: float) -> list[EvalReport]:
    """Reports of evaluations until that of `version` is among them, or `deadline_s` have passed."""
    asked = time.monotonic()
    until = asked + deadline_s
    reports: list[EvalReport] = []
    while (now := time.monotonic()) < until:
        if now - asked > CALLBACK_S:
            buffer.repeat_reports()
            asked = now
        buffer.state()
        reports += buffer.take_evals()
        if any(report.version == version for report in reports):
            return reports
        time.sleep(POLL_S)
    log.warning("the last evaluation did not finish in time", version=version, deadline_s=deadline_s)
    return reports


@torch.no_grad()
def engine_mismatch(
    model: nn.Module,
    groups: Sequence[Group],
    *,
    version: int,
    token_budget: int,
    temperature: float,
    device: torch.device,
    images: ImageReader | None = None,
) -> dict[str, float]:
    """Difference between log-probs of engine and learner on actions that `version` generated; a collective.

    Args:
        model: the learner's model, holding the weights of `version`.
        groups: answers to held-out tasks.
        temperature: that of the distribution whose log-probs they have.
        images: reads the images of a vision-language model.
    """
    rows = build_rows([(group, 1.0) for group in groups], terms=()).to(device)
    own_BT = torch.zeros_like(rows.mask_BT)
    sequences = [
        token_sequence(trajectory, group.images, images) for group in groups for trajectory in group.trajectories
    ]
    for batch in pack(sequences, token_budget=token_budget):
        moved = batch.to(device)
        moved.put(own_BT, score_actions(model, moved, temperature=temperature).logprobs_A)
    delta = (own_BT - rows.behaviour_logprobs_BT)[rows.versions_BT == version]
    return {
        "mismatch_tokens": float(delta.numel()),
        "mismatch_abs": float(delta.abs().mean()),
        "mismatch_k3": float(k3(delta).mean()),
    }
