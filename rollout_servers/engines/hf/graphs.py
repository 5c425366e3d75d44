"""CUDA graphs of a step, in which kernels are launched together: a step of a small model is bound by launches.

Only for caches without windows and states. Never run on a GPU so far: what can't be captured is computed without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from slipstream.configs.runtime.logging import get_log
from slipstream.rollout_servers.engines.hf.cache import Slots

if TYPE_CHECKING:
    from slipstream.rollout_servers.engines.hf.model import HfModel

log = get_log("rollout.engine")

# B answers, R rows of a graph (B and unused ones), C columns, V vocabulary

WARM_UP = 2
"""Passes before a capture, in which libraries allocate what they keep."""


@dataclass
class Step:
    """A pass with fixed shapes and addresses.

    Attributes:
        tokens_R, starts_R: its inputs beside the cursor.
        logits_RV: what `replay` computes.
    """

    tokens_R: Tensor
    starts_R: Tensor
    logits_RV: Tensor
    replay: Callable[[], None]


class StepGraphs:
    """The graphs of a batch, one for each number of rows that is a power of two; made anew when the cache moves."""

    def __init__(self, policy: "HfModel", slots: Slots) -> None:
        self._policy, self._slots = policy, slots
        self._cursor = torch.zeros(1, dtype=torch.long, device=policy.device)
        self._steps: dict[int, Step] = {}
        self._made_for: tuple[int, ...] = ()
        self._usable = True
        self._pool: Any = torch.cuda.graph_pool_handle()  # of all graphs, since one runs at a time

    @classmethod
    def of(cls, policy: "HfModel", slots: Slots) -> Self | None:
        """None where there can be no graphs."""
        return cls(policy, slots) if policy.device.type == "cuda" and slots.static else None

    def step(self, tokens_B: Tensor) -> Tensor | None:
        """Adds a token to each answer; logits of the next, shape [B, V], until the next step; None if it can't."""
        if not self._usable:
            return None
        grid, count = self._slots.grid, len(tokens_B)
        form = (grid.rows, grid.columns, self._policy.changes)
        if form != self._made_for:
            self._steps, self._made_for = {}, form
        rows = min(1 << (count - 1).bit_length(), grid.rows)
        self._cursor.fill_(grid.end)
        step = self._steps.get(rows)
        if step is None:
            try:
                step = self._steps[rows] = self._captured(rows, tokens_B)
            except RuntimeError as error:  # of CUDA, or of an operation that waits for the GPU
                self._usable = False
                log.warning("no CUDA graphs for this model: steps are slower", error=str(error))
                return None
        self._fill(step, tokens_B)
        step.replay()
        return step.logits_RV[:count]

    def _fill(self, step: Step, tokens_B: Tensor) -> None:
        """Copies the inputs; rows that are not in use attend to their new token alone."""
        count = len(tokens_B)
        step.tokens_R[:count] = tokens_B
        step.starts_R[count:] = self._cursor
        step.starts_R[:count] = self._slots.starts_B

    def _captured(self, rows: int, tokens_B: Tensor) -> Step:
        grid, device = self._slots.grid, tokens_B.device
        step = Step(
            torch.zeros(rows, dtype=torch.long, device=device),
            torch.zeros(rows, dtype=torch.long, device=device),
            torch.empty(0),
            lambda: None,
        )
        columns_C = torch.arange(grid.columns, device=device)

        def forward() -> Tensor:
            starts_R1 = step.starts_R[:, None]
            mask_RC = ((columns_C >= starts_R1) & (columns_C <= self._cursor)).long()
            return self._policy.next_logits(
                step.tokens_R[:, None], mask_RC, self._cursor - starts_R1, self._slots.cache
            )

        self._fill(step, tokens_B)
        grid.cursor = self._cursor
        try:
            step.logits_RV, step.replay = capture(forward, self._pool)
        finally:
            grid.cursor = None
        return step


def capture(forward: Callable[[], Tensor], pool: Any) -> tuple[Tensor, Callable[[], None]]:
    """Records a function as a CUDA graph. Returns the tensor that it returned, and what computes it anew in place."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may use the GPU meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = forward()
    return result, graph.replay
