"""Values of the actions of a few rows during a training step, for the kept samples.

# B rows (trajectories) of a step or micro-batch, T actions of the longest, A actions of one row
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.learner.algorithms.losses.base import bounded_exp
from slipstream.learner.algorithms.objective import ActionValues
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.metrics.samples import ActionColumns


class ActionTrace:
    """Collects on the device; nothing is copied to the host before `columns`."""

    def __init__(self, rows: Iterable[int]) -> None:
        """`rows`: those to record, of the rank's part of the step."""
        self._rows = tuple(rows)
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._actions: dict[int, int] = {}
        self._advantages: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def prepared(self, updates: Sequence[Sequence[MicroBatch]], advantages_BT: Tensor) -> None:
        """Records the advantages, and in which micro-batches the rows are.

        Args:
            updates: of the step, on the host.
        """
        for update, batches in enumerate(updates):
            for index, batch in enumerate(batches):
                rows = batch.rows_B.tolist()
                places = [(rows.index(row), row) for row in self._rows if row in rows]
                self._places[update, index] = places
                for place, row in places:
                    self._actions[row] = int((batch.sequence_A == place).sum())
        self._advantages = {row: advantages_BT[row, : self._actions[row]] for row in self._rows}

    def add(self, update: int, index: int, values: ActionValues) -> None:
        """Records values of the rows in the update's micro-batch at `index`."""
        for place, row in self._places.get((update, index), ()):
            actions = slice(self._actions[row])
            log_ratio_A = values.target_BT[place, actions] - values.behaviour_BT[place, actions]
            kept_A = values.kept_BT[place, actions]
            entropy_BT = torch.full_like(values.kept_BT, torch.nan) if values.entropy_BT is None else values.entropy_BT
            entropy_A = entropy_BT[place, actions]
            self._values[row] = torch.stack([bounded_exp(log_ratio_A), kept_A, entropy_A])

    def columns(self) -> dict[int, ActionColumns]:
        """What was recorded, by row; NaN for values of rows that were not reached."""
        return {row: self._columns(row) for row in self._advantages}

    def _columns(self, row: int) -> ActionColumns:
        advantage = _floats(self._advantages[row])
        if row in self._values:
            ratio, trained, entropy = _floats(self._values[row])
        else:
            ratio = entropy = np.full_like(advantage, np.nan)
            trained = np.zeros_like(advantage)
        return ActionColumns(*(column.tobytes() for column in (ratio, advantage, trained, entropy)))


def _floats(values: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = values.float().cpu().numpy()
    return array
