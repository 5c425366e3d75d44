"""An engine that does as it is told, for tests of what stands around one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.buffer.wire.weights import Form, Manifest
from slipstream.rollout_servers.engines.base import Completion, EngineError


def completion(token_ids: Sequence[int], *, finish_reason: str = "stop") -> Completion:
    """An answer of version 0 with log-probs -1, -2, …"""
    logprobs = [-float(place + 1) for place in range(len(token_ids))]
    return Completion(token_ids, logprobs, [VersionSpan(version=0, start=0, end=len(token_ids))], finish_reason)


@dataclass
class ScriptedEngine:
    """Answers every prompt with `answers`; records what it was asked; fails with `failure`, if there is one."""

    answers: list[Completion] = field(default_factory=list)
    failure: EngineError | None = None
    version: int = 0
    workers: int = 1
    asked: list[object] = field(default_factory=list)

    async def generate(
        self, prompt_ids: Sequence[int], *, samples: int, greedy: bool, deadline_s: float
    ) -> list[Completion]:
        self._note((list(prompt_ids), samples, greedy))
        return self.answers

    async def join(self, group: Form) -> None:
        self._note(group)

    async def receive(self, manifest: Manifest) -> None:
        self._note(manifest)

    async def apply(self, manifest: Manifest) -> float:
        self._note("apply")
        self.version = manifest.version
        return 0.25

    async def close(self) -> None:
        self._note("close")

    def _note(self, what: object) -> None:
        self.asked.append(what)
        if self.failure is not None:
            raise self.failure
