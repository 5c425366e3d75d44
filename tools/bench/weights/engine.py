"""An engine that takes every version, and has nothing to say."""

import uuid
from collections.abc import Sequence

from slipstream.buffer.wire.weights.protocol import Manifest
from slipstream.rollout_servers.engines.base import Completion, DirectTransfer, Pressure, RequestRefused
from slipstream.rollout_servers.engines.staging import Staging


class SilentEngine:
    """Costs nothing, so that a server's time is that of the weight channel."""

    shares_memory = False
    ready = True

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.version = 0
        self.direct: DirectTransfer | None = None

    async def install(self, manifest: Manifest, staging: Staging) -> float:
        """Takes note of the version."""
        self.version = manifest.version
        return 0.0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        samples: int,
        greedy: bool,
        deadline_s: float,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        """Refuses."""
        raise RequestRefused("this engine does not generate")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Refuses."""
        raise RequestRefused("this engine does not score")

    async def checksums(self) -> None:
        """It has no tensors."""

    async def pressure(self) -> Pressure:
        """None."""
        return Pressure(kv_cache_usage=0.0, preemptions=0)

    async def fail(self, reason: str) -> None:
        """Nothing can be wrong with it."""

    async def close(self) -> None:
        """It holds nothing."""
