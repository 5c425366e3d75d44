"""A taskset of verifiers.v1 with a harness of its own, a program that calls the model once."""

import sys
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

PROGRAM = """
import json, sys, urllib.request
url, key, model, prompt = sys.argv[1:]
body = json.dumps({"model": model, "messages": [{"role": "user", "content": prompt}]}).encode()
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)).read()
"""


class CapitalConfig(vf.TasksetConfig):  # type: ignore[misc]
    fails: str = ""


class CapitalData(vf.TaskData):  # type: ignore[misc]
    fails: str = ""


class CapitalTask(vf.Task[CapitalData]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: Any) -> float:
        if self.data.fails == "reward":
            raise RuntimeError("the judge is broken")
        return float(trace.last_reply == f"{self.data.name}ville")

    @vf.metric  # type: ignore[untyped-decorator]
    async def words(self, trace: Any) -> float:
        return len(trace.last_reply.split())


class CapitalTaskset(vf.Taskset[CapitalTask, CapitalConfig]):  # type: ignore[misc]
    def load(self) -> Iterable[CapitalTask]:
        for name in "abcdefghijklmnopqrst":
            yield CapitalTask(CapitalData(name=name, prompt=f"Capital of {name}", fails=self.config.fails))


class OneCall(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    NEEDS_CONTAINER = False

    async def setup(self, runtime: Any) -> None:
        """Needs nothing."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        if data.fails == "harness":
            raise RuntimeError("the harness is broken")
        return await runtime.run_program([sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt], {})


__all__ = ["CapitalTaskset", "OneCall"]
