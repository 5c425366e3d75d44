"""An engine under test, whatever it is made of."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import Completion, Engine, Generation, Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.tally import Tally
from tests.contract.engines import Kind
from tests.contract.policies import CONTEXT, distance, policy_of, write_policy
from tests.contract.trainer import Trainer

EOS = 1
PROMPT = [3, 5, 7, 12]
SEQUENCES = 64
START_S = 200.0
DEADLINE_S = 60.0
LONGEST = CONTEXT - len(PROMPT)


@dataclass
class Subject:
    """Its engine's version v serves `policy_of(v)`; `first` is what each of its engines was asked for first."""

    kind: Kind
    config: RunConfig
    engine: Any
    first: list[Completion]

    @classmethod
    async def start(cls, kind: Kind, folder: Path) -> "Subject":
        """Starts an engine with version 0."""
        write_policy(folder, tied=kind.tied)
        config = RunConfig.model_validate(
            {
                "run": {"dir": folder.parent},
                "model": {"path": folder, "dtype": "float32"},
                "rollout": {
                    "engine": {
                        "max_model_len": CONTEXT,
                        "max_sequences": SEQUENCES,
                        "kv_cache_bytes": 4 << 20,  # of 8,192 tokens: it can be filled in a second
                        "start_deadline_s": START_S,
                        **kind.options,
                    }
                },
            }
        )
        subject = cls(kind, config, None, [])
        await subject.start_again()
        return subject

    async def start_again(self, *, seed: int = 0) -> None:
        """Starts another engine in the place of one that was closed."""
        assert self.config.model.path is not None, "given above"
        run = self.config.run.model_copy(update={"seed": seed})
        config = self.config.model_copy(update={"run": run})
        engine: Engine = await start_engine(config, self.config.model.path, eos_token_ids=(EOS,))
        self.engine = engine
        self.trainer = Trainer(engine, tied=self.kind.tied)
        self.first = await self.answers(temperature=0.7)

    async def close(self) -> None:
        """Closes the engine, and frees what it was fed from."""
        await self.engine.close()
        self.trainer.staging.abandon()

    async def answers(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        samples: int = 1,
        greedy: bool = False,
        deadline_s: float = 100.0,
        most: int | None = None,
        tally: Tally | None = None,
        **drawn: object,
    ) -> list[Completion]:
        """Answers of 40 tokens at temperature 1, past any EOS, unless `drawn` says otherwise."""
        plain: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True, "stop_token_ids": ()}
        self.engine.generation = Generation(**(plain | drawn))
        answers: list[Completion] = await self.engine.generate(
            Request(prompt, deadline_s, samples, greedy=greedy, max_tokens=most, tally=tally or Tally())
        )
        return answers

    async def begin(self, **asked: Any) -> "asyncio.Task[list[Completion]]":
        """Answers as above, which have about 30 tokens by now."""
        asking = asyncio.create_task(self.answers(**asked))
        await asyncio.sleep(0)  # it goes first
        await self.answers(max_tokens=30)
        return asking

    def distance_to(
        self,
        version: int,
        answer: Completion,
        start: int = 0,
        end: int | None = None,
        *,
        prompt: Sequence[int] = PROMPT,
        temperature: float = 1.0,
    ) -> float:
        """Mean |Δ| of an answer's log-probs to those of a version."""
        end = len(answer.token_ids) if end is None else end
        return distance(answer, policy_of(version, tied=self.kind.tied), prompt, start, end, temperature=temperature)

    def faithful(self, answer: Completion) -> bool:
        """Whether each token has the log-prob that the version gives it from which it is said to be."""
        exact = self.kind.exact
        return all(self.distance_to(span.version, answer, span.start, span.end) < exact for span in answer.spans)

    async def serves(self, version: int) -> bool:
        """Whether a new request is answered by that version and by no other."""
        (answer,) = await self.answers()
        assert [(span.version, span.start, span.end) for span in answer.spans] == [(version, 0, len(answer.token_ids))]
        exact = self.kind.exact
        return self.distance_to(version, answer) < exact and self.distance_to(version + 1, answer) > 100 * exact

    async def idle(self, deadline_s: float) -> None:
        """Waits until nothing is left to do for the engine, nor kept beside it. Raises: TimeoutError."""
        async with asyncio.timeout(deadline_s):
            while await self.kind.adapter.busy(self.engine):
                await asyncio.sleep(0.01)

    def memory_bytes(self) -> int:
        """Resident memory of this process and of the engine's."""
        return sum(process.memory_info().rss for process in (psutil.Process(), *children()))


def children() -> list[psutil.Process]:
    """The processes that this one started, and those that they started; without Python's own helpers."""
    every, helpers = psutil.Process().children(recursive=True), ("resource_tracker", "forkserver")
    return [each for each in every if not any(helper in word for word in each.cmdline() for helper in helpers)]
