"""Greedy completions of a few validation prompts by the learner's own forward pass, kept as samples.

There is no KV cache: the packed forward pass of training serves every model and mesh that can be trained, and a few
short answers now and then are cheap.

# A sequences, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from slipstream.buffer.wire.messages import LOGPROB_DTYPE, MASK_DTYPE, TOKEN_DTYPE, Trajectory, VersionSpan
from slipstream.learner.data.examples import Example
from slipstream.learner.data.packing import TokenSequence, pack
from slipstream.learner.metrics.samples import SampleStore, Source
from slipstream.learner.parallel.fsdp import reshard
from slipstream.learner.parallel.mesh import World

DUMMY = 0
"""Token behind each sequence: the last token of a packed sequence is no input, and the one before it is to be."""


@dataclass(frozen=True)
class Prompt:
    """A validation row's prompt."""

    task: int
    """Index of the row among the validation rows."""
    token_ids: list[int]
    demonstration: list[int]
    """The tokens that follow in the row, up to its end."""

    @classmethod
    def of(cls, task: int, example: Example) -> Self | None:
        """The prompt before the last answer of an example; None if nothing precedes it."""
        sequence = example.sequences[-1]
        mask = sequence.action_mask.astype(bool)
        starts = np.flatnonzero(mask[1:] & ~mask[:-1]) + 1
        if not len(starts):
            return None
        ids, start = sequence.token_ids.tolist(), int(starts[-1])
        end = start + int(np.argmin([*mask[start:].tolist(), False]))
        return cls(task, ids[:start], ids[start:end])


@dataclass(frozen=True)
class Completion:
    """An answer to a prompt."""

    token_ids: list[int]
    logprobs: list[float]
    is_ended: bool
    """It has its stop token."""


@torch.no_grad()
def complete(
    model: nn.Module, prompts: Sequence[Prompt], *, tokens: int, stops: Sequence[int], world: World
) -> list[Completion]:
    """Greedy answers of at most so many tokens; a collective. All ranks compute all of them, and follow rank 0."""
    answers = [Completion([], [], False) for _ in prompts]
    for _ in range(tokens):
        running = [index for index, answer in enumerate(answers) if not answer.is_ended]
        if not running:
            break
        chosen = _next_tokens(model, [prompts[index].token_ids + answers[index].token_ids for index in running], world)
        for index, (token, logprob) in zip(running, chosen, strict=True):
            before = answers[index]
            answers[index] = Completion([*before.token_ids, token], [*before.logprobs, logprob], token in stops)
    reshard(model)
    return answers


def _next_tokens(model: Any, contexts: Sequence[list[int]], world: World) -> list[tuple[int, float]]:
    """The likeliest next token of each context, and its log-prob."""
    sequences = []
    for context in contexts:
        mask = np.zeros(len(context) + 1, dtype=bool)
        mask[-1] = True
        sequences.append(TokenSequence(np.array([*context, DUMMY]), mask))
    (batch,) = pack(sequences, token_budget=sum(map(len, contexts)) + len(contexts))
    batch = batch.to(world.device)
    logits_AV = model(**batch.model_inputs(), logits_to_keep=batch.action_positions_S).logits[0].float()
    logprobs_A, tokens_A = logits_AV.log_softmax(-1).max(-1)
    found = dict(zip(batch.rows_B.tolist(), zip(tokens_A.tolist(), logprobs_A.tolist(), strict=True), strict=True))
    # As text: rank 0's, in case that rounding differs.
    of_root = world.from_root([[found[row][0], found[row][1]] for row in range(len(contexts))])
    return [(int(token), float(logprob)) for token, logprob in of_root]


def keep_completions(
    store: SampleStore, prompts: Sequence[Prompt], answers: Sequence[Completion], *, step: int
) -> None:
    """Keeps answers as samples of a step's evaluation; the reward is 1 where one equals the demonstration."""
    trajectories, sources = [], []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt.token_ids), len(prompt.token_ids) + len(answer.token_ids)
        is_equal = float(answer.token_ids == prompt.demonstration)
        trajectories.append(
            Trajectory(
                token_ids=np.array(prompt.token_ids + answer.token_ids, dtype=TOKEN_DTYPE).tobytes(),
                action_mask=np.array([0] * start + [1] * (end - start), dtype=MASK_DTYPE).tobytes(),
                behaviour_logprobs=np.array([0.0] * start + answer.logprobs, dtype=LOGPROB_DTYPE).tobytes(),
                spans=[VersionSpan(version=step, start=start, end=end)],
                reward=is_equal,
                scores={"equals_demonstration": is_equal},
                finish_reason="stop" if answer.is_ended else "length",
                episode=number,
            )
        )
        sources.append(Source("", prompt.task))
    chosen = {f"row {prompt.task}": number for number, prompt in enumerate(prompts)}
    store.keep("eval", step, trajectories, sources, chosen=chosen)
