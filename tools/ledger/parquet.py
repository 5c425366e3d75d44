"""Groups as rows of a parquet file, a row group at a time, so that any number of them fits into memory."""

from collections.abc import Sequence
from importlib import import_module
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.store.reader import GroupRecord
from slipstream.buffer.wire.codec import action_mask, behaviour_logprobs, token_ids
from slipstream.buffer.wire.messages import Group, Trajectory
from slipstream.configs.runtime.errors import SlipstreamError

ROW_GROUP_TOKENS = 1 << 21
"""A row group is written once it has so many: about 20 MB in memory."""
ROW_GROUP_ROWS = 1 << 16

PLAIN = {
    "group_id": "string",
    "task": "int64",
    "epoch": "int64",
    "steps": "list<int64>",
    "answer": "int64",
    "reward": "float64",
    "finish_reason": "string",
    "oldest_version": "int64",
    "newest_version": "int64",
}
"""Columns with a value a row, before those of the scores."""
ARRAYS = {
    "prompt_token_ids": "int32",
    "answer_token_ids": "int32",
    "answer_logprobs": "float32",
    "answer_action_mask": "uint8",
}
"""Columns with a list a row, and the type of its items."""


class NewScores(Exception):
    """An answer has scores without a column."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        super().__init__(", ".join(sorted(names)))


def import_pyarrow() -> Any:
    """The module pyarrow.

    Raises: SlipstreamError naming the extra that brings it.
    """
    try:
        return import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise SlipstreamError("the export needs pyarrow: `pip install 'slipstream[export]'`") from error


class GroupFile:
    """A parquet file that is being written; leaving its `with` block completes it."""

    def __init__(self, output: IO[bytes], scores: Sequence[str]) -> None:
        """`scores` are the names that get a column `score_<name>`."""
        self._arrow = import_pyarrow()
        self._scores = list(scores)
        self._schema = self._make_schema()
        self._writer = import_module("pyarrow.parquet").ParquetWriter(output, self._schema, compression="zstd")
        self._clear()

    def __enter__(self) -> "GroupFile":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._flush()
        finally:
            self._writer.close()

    def add(self, record: GroupRecord, group: Group) -> int:
        """Adds a group's answers; how many.

        Raises: NewScores, and has added nothing then.
        """
        names = {name for trajectory in group.trajectories for name in trajectory.scores}
        if not names <= set(self._scores):
            raise NewScores(names - set(self._scores))
        for number, trajectory in enumerate(group.trajectories):
            self._add_answer(record, group, number, trajectory)
        if self._tokens >= ROW_GROUP_TOKENS or len(self._plain["group_id"]) >= ROW_GROUP_ROWS:
            self._flush()
        return len(group.trajectories)

    def _add_answer(self, record: GroupRecord, group: Group, number: int, trajectory: Trajectory) -> None:
        versions = [span.version for span in trajectory.spans]
        values = {
            "group_id": group.id,
            "task": group.indices[0],
            "epoch": group.epoch,
            "steps": record.steps,
            "answer": number,
            "reward": trajectory.reward,
            "finish_reason": trajectory.finish_reason,
            "oldest_version": min(versions),
            "newest_version": max(versions),
            **{f"score_{name}": trajectory.scores.get(name) for name in self._scores},
        }
        for name, value in values.items():
            self._plain[name].append(value)
        tokens, mask = token_ids(trajectory), action_mask(trajectory)
        start = int(np.argmax(mask))  # the prompt ends where the policy's first token stands
        self._arrays["prompt_token_ids"].append(tokens[:start])
        self._arrays["answer_token_ids"].append(tokens[start:])
        self._arrays["answer_logprobs"].append(behaviour_logprobs(trajectory)[start:])
        self._arrays["answer_action_mask"].append(mask[start:])
        self._tokens += len(tokens)

    def _clear(self) -> None:
        self._plain: dict[str, list[Any]] = {name: [] for name in self._schema.names if name not in ARRAYS}
        self._arrays: dict[str, list[NDArray[Any]]] = {name: [] for name in ARRAYS}
        self._tokens = 0

    def _flush(self) -> None:
        if not self._plain["group_id"]:
            return
        columns = [
            self._list_array(self._arrays[column.name], ARRAYS[column.name])
            if column.name in ARRAYS
            else self._arrow.array(self._plain[column.name], column.type)
            for column in self._schema
        ]
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
        self._clear()

    def _list_array(self, rows: Sequence[NDArray[Any]], item: str) -> Any:
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
        # Not through Python's lists, which would take ten times the memory.
        return self._arrow.ListArray.from_arrays(offsets, self._arrow.array(np.concatenate(rows), item))

    def _make_schema(self) -> Any:
        def type_of(name: str) -> Any:
            return self._arrow.list_(self._arrow.int64()) if name == "list<int64>" else self._arrow.type_for_alias(name)

        fields = [(name, type_of(kind)) for name, kind in PLAIN.items()]
        fields += [(f"score_{name}", self._arrow.float64()) for name in self._scores]
        fields += [(name, self._arrow.list_(type_of(item))) for name, item in ARRAYS.items()]
        return self._arrow.schema(fields)
