"""Runs by the real training step and the real ledger, whose groups are sampled in this process; some are poisoned."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream.buffer.handlers.inspection import Inspector
from slipstream.buffer.identity import config_identity
from slipstream.buffer.policies.sampling import task_order
from slipstream.buffer.store.kept import KeptGroups
from slipstream.buffer.store.ledger import Ledger
from slipstream.buffer.store.redis import connect_async
from slipstream.buffer.store.types import DeliveredGroup, IssuedTask, TicketRequest
from slipstream.buffer.wire import messages as m
from slipstream.buffer.wire.codec import encode
from slipstream.configs import RunConfig
from slipstream.configs.load import create_run_folder
from slipstream.env.builtin.digits import Digits
from slipstream.learner.models.reproducibility import Surroundings
from slipstream.learner.parallel.fsdp import full_weights
from slipstream.learner.parallel.mesh import World, join_world, leave_world
from slipstream.learner.step_records import StartRecord, StepRecord, StepRecords
from slipstream.learner.trainers.rl.replay import Replayer
from slipstream.models.digits import TOKENS
from slipstream.models.folder import initial_model
from slipstream.rewards.functions.text import digit_match

SERVER: Final = "r0"
ANSWER: Final = 3
"""Tokens of an answer."""
Poison = Callable[[m.Group], m.Group]


def flipped(group: m.Group) -> m.Group:
    """A verifier that returns the negative of a reward in percent."""
    return with_answers(group, [with_reward(each, 0.0 - 100 * each.reward) for each in group.trajectories])


def garbage(group: m.Group) -> m.Group:
    """Random tokens whose log-probs say that they were nearly impossible: ratios near e^11."""
    answers, rng = [], np.random.default_rng(0)
    for number, each in enumerate(group.trajectories):
        ids = np.frombuffer(each.token_ids, dtype=m.TOKEN_DTYPE).copy()
        ids[-ANSWER:] = rng.integers(17, len(TOKENS), ANSWER)
        mask = np.frombuffer(each.action_mask, dtype=m.MASK_DTYPE)
        logprobs = (-15.0 * mask).astype(m.LOGPROB_DTYPE)
        replaced = msgspec.structs.replace(each, token_ids=ids.tobytes(), behaviour_logprobs=logprobs.tobytes())
        answers.append(with_reward(replaced, float(number % 2)))
    return with_answers(group, answers)


def with_answers(group: m.Group, answers: Sequence[m.Trajectory]) -> m.Group:
    return msgspec.structs.replace(group, trajectories=list(answers))


def with_reward(trajectory: m.Trajectory, reward: float) -> m.Trajectory:
    return msgspec.structs.replace(trajectory, reward=reward, scores=dict.fromkeys(trajectory.scores, reward))


@dataclass
class MadeRun:
    """A run as its processes leave it: configuration, steps, metrics, and the groups in Redis."""

    config: RunConfig
    poison: Mapping[int, Poison] = field(default_factory=dict)
    """By step, of the group with the largest spread of rewards."""
    poisoned: list[str] = field(default_factory=list, init=False)
    """Ids of the groups."""

    @property
    def folder(self) -> Path:
        return self.config.paths.root

    def train(self) -> None:
        """All steps of the configuration."""
        create_run_folder(self.config.paths, self.config)
        world = join_world(self.config.learner.parallel)
        try:
            asyncio.run(self._train(world))
        finally:
            leave_world()

    async def _train(self, world: World) -> None:
        config = self.config
        self._generator = torch.Generator().manual_seed(config.run.seed)
        replayer = Replayer.build(config, initial_model(config), world)
        sampler = AutoModelForCausalLM.from_pretrained(initial_model(config), dtype=torch.float32)
        env = Digits(**config.env.options)
        size = env.size("train")
        start = StartRecord(
            time_s=time.time(), step=0, checksum=replayer.train_step.checksum(),
            config=config.model_dump(mode="json"), surroundings=Surroundings.here(ranks=1, device=world.device),
        )  # fmt: skip
        async with connect_async(config.redis) as client:
            records = StepRecords(config.paths.steps)
            records.append(start)
            ledger = Ledger(client, config)
            await ledger.identify({**config_identity(config), "train_tasks": str(size)})
            await ledger.join(SERVER, "first")
            for step in range(1, config.learner.steps + 1):
                version, count = step - 1, config.learner.groups_per_step
                issued, *_ = await ledger.issue([TicketRequest(SERVER, version, count, count)], train_tasks=size)
                sampler.load_state_dict(dict(full_weights(replayer.train_step.model)), strict=False)
                tasks = sorted(issued, key=lambda task: int(task.id))
                groups = {group.id: group for group in self._groups(tasks, sampler, env, version)}
                if step in self.poison:
                    poisoned = max(groups.values(), key=lambda group: np.std([t.reward for t in group.trajectories]))
                    groups[poisoned.id] = self.poison[step](poisoned)
                    self.poisoned.append(poisoned.id)
                blobs = {name: bytes(encode(group)) for name, group in groups.items()}
                stored = [Inspector(config).admit(group, blobs[name]) for name, group in groups.items()]
                await ledger.deliver([group for group in stored if isinstance(group, DeliveredGroup)])
                KeptGroups(config.paths.kept_groups).write(step, 0, blobs)
                lease = await ledger.lease(step - 1, consuming_version=version, count=count)
                assert lease is not None
                record = StepRecord(
                    step=step, groups=lease.ids, importance_weights=lease.importance_weights,
                    oldest_version=lease.oldest_version, staleness=lease.staleness, consuming_version=version,
                    unpublished_steps=0, lr_scale=1.0, kl_coefficient=None, checksum="",
                )  # fmt: skip
                metrics, checksum = replayer.run(record, [groups[name] for name in lease.ids])
                records.append(replace(record, checksum=checksum))
                with config.paths.metrics.open("a") as file:
                    finite = {key: value if np.isfinite(value) else None for key, value in metrics.items()}
                    file.write(json.dumps({"kind": "step", "time_s": float(step), "step": step, **finite}) + "\n")
                await ledger.train(step - 1)
                await ledger.publish(version + 1, evaluate=False)
            records.close()

    def _groups(self, tasks: Sequence[IssuedTask], model: nn.Module, env: Digits, version: int) -> list[m.Group]:
        """A group of answers to each task by the present weights."""
        order = task_order(env.size("train"), seed=self.config.run.seed, epoch=0)
        indices, size = [int(order[task.position]) for task in tasks], self.config.rollout.group_size
        problems = [env.task("train", index) for index in indices]
        prompts = torch.tensor([[TOKENS.index(letter) for letter in problem.prompt] for problem in problems])
        start, (ids, logprobs) = prompts.shape[1], self._sampled(model, prompts.repeat_interleave(size, 0))
        mask = (np.arange(start + ANSWER) >= start).astype(m.MASK_DTYPE)

        def answer(row: int, reference: str) -> m.Trajectory:
            text = "".join(TOKENS[token] for token in ids[row, start:])
            reward = digit_match(text, reference, {})
            return m.Trajectory(
                token_ids=ids[row].astype(m.TOKEN_DTYPE).tobytes(), action_mask=mask.tobytes(),
                behaviour_logprobs=logprobs[row].astype(m.LOGPROB_DTYPE).tobytes(),
                spans=[m.VersionSpan(version=version, start=start, end=start + ANSWER)],
                reward=reward, scores={"digit_match": reward, "exact_match": reward},
                finish_reason="length", episode=row % size,
            )  # fmt: skip

        return [
            m.Group(
                id=task.id, kind=m.TRAIN, epoch=task.epoch, indices=[index],
                trajectories=[answer(place * size + episode, problem.reference) for episode in range(size)],
            )
            for place, (task, index, problem) in enumerate(zip(tasks, indices, problems, strict=True))
        ]  # fmt: skip

    @torch.no_grad()
    def _sampled(self, model: nn.Module, ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Prompts with sampled answers, and the log-probs of their tokens, 0 for the prompts'."""
        logprobs = torch.zeros(ids.shape)
        for _ in range(ANSWER):
            log_p = model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
            chosen = log_p.exp().multinomial(1, generator=self._generator)
            ids, logprobs = torch.cat([ids, chosen], 1), torch.cat([logprobs, log_p.gather(1, chosen)], 1)
        return ids.numpy(), logprobs.numpy()
