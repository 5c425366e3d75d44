"""Versions go straight into SGLang's own server, where an environment with it is named.

Only NCCL and CUDA are missing here: gloo takes their place, in SGLang's process group and in the learner's.
"""

import os
import threading
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo

from slipstream.learner.weights.broadcast import SglangTransport
from tests.contract.engines import SGLANG_PYTHON
from tests.rollout_servers.engines.direct import PATIENCE_S, Run, broken_off_half_way, published_while_it_generates, run

pytestmark = [
    pytest.mark.skipif(SGLANG_PYTHON not in os.environ, reason=f"{SGLANG_PYTHON} names no environment with SGLang"),
    pytest.mark.timeout(900),  # it is started again, which takes minutes on a busy machine
]
TRANSPORT = "slipstream.learner.weights.broadcast"
SGLANG = "slipstream.rollout_servers.engines.sglang"


class Group:
    """Rank 0's. As with NCCL, its end wakes nobody else.

    Attributes:
        buckets: how many were broadcast.
        hangs_at: the bucket that never leaves.
    """

    def __init__(self, store: PrefixStore, world: int) -> None:
        self._group: Any = ProcessGroupGloo(PrefixStore("cpu/", store), 0, world, timedelta(seconds=PATIENCE_S))
        self.hangs_at: int | None = None
        self._aborted = threading.Event()
        self.buckets = 0

    def broadcast(self, packed: Tensor, root: int) -> Any:
        if self.buckets == self.hangs_at:
            self._aborted.wait()
            raise RuntimeError("aborted")
        self.buckets += 1
        return self._group.broadcast(packed, root)

    def abort(self) -> None:
        self._aborted.set()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Those of the learner, in the order in which they were made."""
    made: list[Group] = []

    def process_group(store: PrefixStore, world: int) -> Group:
        made.append(Group(store, world))
        return made[-1]

    monkeypatch.setattr(f"{TRANSPORT}.process_group", process_group)
    monkeypatch.setattr(f"{SGLANG}.protocol.BACKEND", "gloo")
    monkeypatch.setattr(f"{SGLANG}.engine.uses_nccl", lambda settings, gpu: True)
    return made


def over_nccl(folder: Path, *, deadline_s: float = 60.0) -> AbstractAsyncContextManager[Run]:
    return run(folder, SglangTransport, {"name": "sglang", "python": os.environ[SGLANG_PYTHON]}, deadline_s=deadline_s)


async def test_versions_are_broadcast_until_one_breaks_off(tmp_path: Path, groups: list[Group]) -> None:
    async with over_nccl(tmp_path, deadline_s=20.0) as at, at.server("server-1") as engine:
        await published_while_it_generates(at, engine, groups, tokens=300)
        await broken_off_half_way(at, engine, groups)
