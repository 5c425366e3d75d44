"""A whole trainer: next-token loss over rows of token ids, which need neither a buffer nor rollout servers."""

import json
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from slipstream.configs.schema.base import Section, UserPath
from slipstream.learner.data.packing import MicroBatch, TokenSequence, aligned, all_actions, pack
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.trainers.base import Trainer
from slipstream.learner.trainers.setup import RankSetup, SingleModel


class Options(Section):
    path: UserPath
    """A file with a JSON list of token ids in each line."""
    rows_per_step: int = 4


@dataclass(kw_only=True)
class NextToken(Trainer[list[MicroBatch]]):
    policy: SingleModel
    rows: list[TokenSequence]
    rows_per_step: int

    @classmethod
    def from_setup(cls, setup: RankSetup) -> Self:
        options = setup.read_options(Options)
        lines = options.path.read_text(encoding="utf-8").splitlines()
        return cls(
            config=setup.config,
            initial_model=setup.initial_model,
            world=setup.world,
            signals=setup.signals,
            reporter=setup.build_reporter(),
            policy=SingleModel.load(setup.config, setup.initial_model, setup.world),
            rows=[all_actions(np.array(json.loads(line))) for line in lines],
            rows_per_step=options.rows_per_step,
        )

    @property
    def models(self) -> SingleModel:
        return self.policy

    def next_batch(self) -> list[MicroBatch]:
        step, size = self.state.step, self.rows_per_step
        mine = range(step * size + self.world.data_rank, (step + 1) * size, self.world.data_size)
        rows = [self.rows[index % len(self.rows)] for index in mine]
        return aligned(pack(rows, token_budget=self.config.learner.token_budget), self.world)

    def update(self, batch: list[MicroBatch]) -> dict[str, float]:
        tokens, loss = self.world.sum(torch.tensor(float(sum(each.actions for each in batch)))), torch.zeros(())
        for each in batch:
            share = -score_actions(self.policy.model, each, temperature=1.0).logprobs_A.sum() / tokens
            torch.autograd.backward(share * self.world.data_size)  # FSDP averages gradients over the ranks
            loss += share.detach().cpu()
        return {"loss": float(self.world.sum(loss)), **self.policy.update(self.state.step)}
