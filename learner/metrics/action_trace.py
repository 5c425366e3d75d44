"""Values of the actions of a few rows during a training step, for the kept samples.

# B rows (trajectories) of a step or micro-batch, T actions of the longest, A actions of one row
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.buffer.wire.codec import action_mask
from slipstream.buffer.wire.messages import Trajectory
from slipstream.learner.algorithms.losses.base import LOG_BOUND
from slipstream.learner.algorithms.objective import ActionValues
from slipstream.learner.data.packing import MicroBatch
from slipstream.learner.metrics.samples import ActionColumns


class ActionTrace:
    """Keeps parts of the step's own tensors; nothing is computed, or copied to the host, before `columns`."""

    def __init__(self, trajectories: Mapping[int, Trajectory]) -> None:
        """`trajectories`: those to record, by their row in the rank's part of the step."""
        self._actions = {row: int(np.count_nonzero(action_mask(each)[1:])) for row, each in trajectories.items()}
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._advantages_BT: Tensor | None = None
        self._values: dict[int, tuple[Tensor, Tensor, Tensor, Tensor | None]] = {}

    def prepared(self, updates: Sequence[Sequence[MicroBatch]], advantages_BT: Tensor) -> None:
        """Takes the advantages, and finds the micro-batches of the rows.

        Args:
            updates: of the step, on the host.
        """
        self._advantages_BT = advantages_BT
        for update, batches in enumerate(updates):
            for index, batch in enumerate(batches):
                rows = batch.rows_B.tolist()
                self._places[update, index] = [(rows.index(row), row) for row in self._actions if row in rows]

    def add(self, update: int, index: int, values: ActionValues) -> None:
        """Takes values of the rows in the update's micro-batch at `index`."""
        for place, row in self._places.get((update, index), ()):
            entropy_T = None if values.entropy_BT is None else values.entropy_BT[place]
            self._values[row] = (values.target_BT[place], values.behaviour_BT[place], values.kept_BT[place], entropy_T)

    def columns(self) -> dict[int, ActionColumns]:
        """The recorded values, by row; NaN in rows that were not reached."""
        advantages_BT = self._advantages_BT
        return {} if advantages_BT is None else {row: self._columns(row, advantages_BT[row]) for row in self._actions}

    def _columns(self, row: int, advantages_T: Tensor) -> ActionColumns:
        actions = self._actions[row]
        advantage_A = _floats(advantages_T, actions)
        ratio_A = entropy_A = np.full_like(advantage_A, np.nan)
        trained_A = np.zeros_like(advantage_A)
        if row in self._values:
            target_T, behaviour_T, kept_T, entropy_T = self._values[row]
            log_ratio_A = _floats(target_T, actions) - _floats(behaviour_T, actions)
            ratio_A = np.exp(log_ratio_A.clip(-LOG_BOUND, LOG_BOUND))
            trained_A = _floats(kept_T, actions)
            entropy_A = entropy_A if entropy_T is None else _floats(entropy_T, actions)
        return ActionColumns(*(column.tobytes() for column in (ratio_A, advantage_A, trained_A, entropy_A)))


def _floats(values_T: Tensor, actions: int) -> NDArray[np.float32]:
    array: NDArray[np.float32] = values_T[:actions].float().numpy(force=True)  # from a GPU, too
    return array
