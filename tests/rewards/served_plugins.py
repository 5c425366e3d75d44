"""Rewards that ask an HTTP server; worker processes import them too."""

from collections.abc import Mapping
from typing import Any

import httpx

from slipstream.rewards.base import Score


class Served:
    """The score that a server has for an answer, by one client for all calls; part: most calls that were open."""

    def __init__(self, url: str) -> None:
        self.client = httpx.AsyncClient(base_url=url, timeout=60)
        self._open = self._most = 0

    async def __call__(self, answer: str, reference: str, info: Mapping[str, Any]) -> Score:
        self._open += 1
        self._most = max(self._most, self._open)
        try:
            reply = await self.client.post("/score", json={"answer": answer})
        finally:
            self._open -= 1
        reply.raise_for_status()
        return Score(float(reply.json()["score"]), {"most": self._most})
