"""The KV cache of running answers: preallocated tensors with a row for each answer, written in place.

Rows are right-aligned: each answer ends in the same column, so that a token of all answers is one column, and masks and
windows are those of a batch that is padded on the left. Columns of ended answers are left behind, until the last column
is written: then the ones in use are moved to the first.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from slipstream.configs.runtime.errors import ConfigError

# B running answers, R rows, C columns, N new answers, H heads, D head size

MARGIN = 16
"""Columns that are free after a move, at least: a move copies all that is in use."""

_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
_BOTH = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


def spare(tokens: int) -> int:
    """Free columns beside so many in use that keep moves rare."""
    return max(2 * MARGIN, tokens // 4)


@dataclass
class Grid:
    """The part of the rows and columns that is in use, the same in all layers."""

    rows: int = 0
    columns: int = 0
    used: int = 0
    """Rows in use, from the first."""
    start: int = 0
    """First column of the longest answer."""
    end: int = 0
    """Column of the next token."""
    cursor: Tensor | None = None
    """`end` on the device, while shapes and addresses must not depend on it: attention is then to all columns."""


class SlotLayer(CacheLayerMixin):
    """The KV cache of an attention layer.

    Of a layer with a window, only columns that the window reaches are kept, in a shorter tensor whose first column is
    the column `_offset` of the grid.
    """

    keys: Tensor
    values: Tensor
    is_compileable = True  # else masks are inspected, and the GPU waited for, at each token

    def __init__(self, grid: Grid, probe: Any) -> None:
        """`probe`: the same layer of a cache with tokens."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.grid = grid
        self.window: int | None = getattr(probe, "sliding_window", None)
        self.is_sliding = self.window is not None
        self.is_initialized = True
        self._shapes = [(states.shape[1], states.shape[3]) for states in (probe.keys, probe.values)]
        self._storage: list[Tensor] = [probe.keys.new_empty(0), probe.values.new_empty(0)]
        self._offset = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: `reserve` and `lay_out` have done it."""

    def bytes(self, rows: int, columns: int) -> int:
        """Size of a grid in this layer."""
        numbers: int = sum(heads * size for heads, size in self._shapes)
        return rows * self._columns(columns) * numbers * self._storage[0].itemsize

    def reserve(self, rows: int, columns: int) -> None:
        """Allocates memory for a grid of so many cells, in whatever form."""
        cells = rows * self._columns(columns)
        for place, (heads, size) in enumerate(self._shapes):
            if self._storage[place].numel() < cells * heads * size:
                # Zeros, because masked columns count as 0 times their values, which must not be NaN.
                self._storage[place] = self._storage[place].new_zeros(cells * heads * size)

    def lay_out(self, rows: int, columns: int, end: int) -> None:
        """Takes another form, in which the answers end before the column `end`."""
        grid, reach = self.grid, end if self.window is None else self.window - 1
        kept = min(grid.end - grid.start, reach)
        live = [part[:, :, part.shape[2] - kept :].clone() for part in self._parts(grid.end)] if grid.used else []
        self.reserve(rows, columns)
        width = self._columns(columns)
        self.keys, self.values = (
            storage[: rows * heads * width * size].view(rows, heads, width, size)
            for storage, (heads, size) in zip(self._storage, self._shapes, strict=True)
        )
        self._offset = end - min(end, reach)
        for states, part in zip((self.keys, self.values), live, strict=False):
            states[: grid.used, :, end - kept - self._offset : end - self._offset] = part

    def adopt(self, source: Any, index_N: Tensor) -> None:
        """Copies sequences of a cache into the rows after those in use."""
        grid = self.grid
        rows, length = slice(grid.used, grid.used + len(index_N)), source.keys.shape[2]
        columns = slice(grid.end - length - self._offset, grid.end - self._offset)
        self.keys[rows, :, columns] = source.keys[index_N]
        self.values[rows, :, columns] = source.values[index_N]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies rows."""
        for part in self._parts(self.grid.end):
            part[targets] = part[sources]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_options: object
    ) -> tuple[Tensor, Tensor]:
        """Writes a token of each answer. Returns keys and values of the columns that it may attend to."""
        grid, rows = self.grid, len(key_states)
        if grid.cursor is not None:
            self.keys[:rows].index_copy_(2, grid.cursor, key_states)
            self.values[:rows].index_copy_(2, grid.cursor, value_states)
            return self.keys[:rows], self.values[:rows]
        if self.window is not None and grid.end - self._offset == self.keys.shape[2]:
            for states in (self.keys, self.values):
                states[:rows, :, : self.window - 1] = states[:rows, :, 1 - self.window :].clone()
            self._offset = grid.end - self.window + 1
        column = grid.end - self._offset
        self.keys[:rows, :, column] = key_states[:, :, 0]
        self.values[:rows, :, column] = value_states[:, :, 0]
        keys, values = self._parts(grid.end + 1)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of columns that the next token may attend to, and the first."""
        if self.grid.cursor is not None:
            return self.grid.columns, 0
        first = self._first(self.grid.end + query_length)
        return self.grid.end + query_length - first, first

    def get_seq_length(self) -> Any:
        """Column of the next token."""
        return self.grid.end if self.grid.cursor is None else self.grid.cursor

    def get_max_length(self) -> int:
        """The number of columns."""
        return self.grid.columns

    def _columns(self, columns: int) -> int:
        return columns if self.window is None else min(columns, self.window + spare(self.window))

    def _first(self, end: int) -> int:
        """First column before `end` that is in use."""
        return self.grid.start if self.window is None else max(self.grid.start, end - self.window)

    def _parts(self, end: int) -> list[Tensor]:
        """Keys and values of the cells in use before the column `end`."""
        columns = slice(max(0, self._first(end) - self._offset), end - self._offset)
        return [states[: self.grid.used, :, columns] for states in (self.keys, self.values)]


_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")


class StateLayer(LinearAttentionLayer):
    """The states of a layer that keeps as much of any number of tokens, so that there is nothing to preallocate."""

    def __init__(self, probe: Any) -> None:
        """`probe`: the same layer of a cache with tokens."""
        LinearAttentionLayer.__init__(self, number_of_states=probe.number_of_states)
        self.row_bytes = sum(state.nbytes // len(state) for _, _, state in _states(probe))

    def adopt_states(self, source: Any, index_N: Tensor) -> None:
        """Appends the states of sequences of a cache."""
        mine = {(name, key): state for name, key, state in _states(self)}
        for name, key, state in _states(source):
            earlier = [mine[name, key]] if (name, key) in mine else []
            getattr(self, name)[key] = torch.cat([*earlier, state[index_N]])
        for name in _FLAGS:
            getattr(self, name).update(getattr(source, name))
        self.conv_kernel_size, self.dtype, self.device = source.conv_kernel_size, source.dtype, source.device

    def select_states(self, order_B: Tensor) -> None:
        """Keeps the rows `order_B`, in this order."""
        for name, key, state in _states(self):
            getattr(self, name)[key] = state[order_B]

    def clear_states(self) -> None:
        """Forgets all rows."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)


class HybridLayer(StateLayer, SlotLayer):  # type: ignore[override]
    """The cache of a layer with attention and states side by side."""

    def __init__(self, grid: Grid, probe: Any) -> None:
        SlotLayer.__init__(self, grid, probe)
        StateLayer.__init__(self, probe)


def _states(layer: Any) -> list[tuple[str, int, Tensor]]:
    """Name of the attribute, key and tensor of each state of a layer."""
    return [
        (name, key, state)
        for name in ("conv_states", "recurrent_states")
        for key, state in getattr(layer, name).items()
        if state is not None
    ]


class Slots:
    """The KV cache of B answers in rows.

    Attributes:
        cache: as transformers' models take it.
        starts_B: column of the first token of each answer, on the device.
    """

    def __init__(self, probe: Cache, *, max_rows: int, max_tokens: int) -> None:
        """`probe`: a cache with a token, whose shapes and dtypes it takes over; `max_tokens`: of an answer.

        Raises: ConfigError for kinds of layers of which it can keep no rows.
        """
        self.grid, self._max_rows, self._max_tokens = Grid(), max_rows, max_tokens
        self.cache = Cache(layers=[self._layer(layer) for layer in probe.layers])
        self._attention = [layer for layer in self.cache.layers if isinstance(layer, SlotLayer)]
        self._recurrent = [layer for layer in self.cache.layers if isinstance(layer, StateLayer)]
        self._starts: list[int] = []
        self.starts_B = torch.empty(0, dtype=torch.long)
        self._budget_bytes = self._bytes(max_rows, max_tokens + spare(max_tokens))

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return self.grid.end - self.grid.start

    @property
    def full(self) -> bool:
        """True if the next token needs a move to the first columns, and maybe more memory."""
        return self.grid.end >= self.grid.columns

    @property
    def usage(self) -> float:
        """Share of the memory that is in use."""
        return self._bytes(self.grid.used, self.longest) / self._budget_bytes

    @property
    def static(self) -> bool:
        """True if shapes and addresses can be the same for many tokens."""
        return not self._recurrent and all(layer.window is None for layer in self._attention)

    def fits(self, rows: int, tokens: int) -> bool:
        """True if there is memory for so many answers, the longest of so many tokens."""
        return self._bytes(rows, tokens) <= self._budget_bytes

    @property
    def least_bytes(self) -> int:
        """Size of the cache of one answer."""
        return self._bytes(1, self._max_tokens + MARGIN)

    def limit(self, budget_bytes: int) -> None:
        """Takes no more memory than this. Raises: ConfigError when that is too little for an answer."""
        if budget_bytes < self.least_bytes:
            raise ConfigError(
                f"a KV cache of {budget_bytes} bytes has no room for one answer of rollout.engine.max_model_len="
                f"{self._max_tokens}, which needs {self.least_bytes}: lower it, or raise rollout.engine.kv_cache_bytes"
            )
        self._budget_bytes = min(self._budget_bytes, budget_bytes)

    def reserve(self) -> None:
        """Allocates all memory at once, so that none is in pieces later."""
        columns = self._most_columns(self._max_rows)
        for layer in self._attention:
            layer.reserve(self._max_rows, columns)

    def adopt(self, source: Cache, index_N: Tensor, lengths: Sequence[int]) -> None:
        """Appends sequences `index_N` of a cache, which are padded on the left, as answers of `lengths` tokens."""
        grid, tokens = self.grid, max(lengths)
        if grid.used + len(lengths) > grid.rows or tokens > grid.end:
            self._lay_out(grid.used + len(lengths), max(self.longest, tokens))
        for mine, others in zip(self.cache.layers, source.layers, strict=True):
            if isinstance(mine, SlotLayer):
                mine.adopt(others, index_N)
            if isinstance(mine, StateLayer):
                mine.adopt_states(others, index_N)
        self._starts += [grid.end - length for length in lengths]
        self.starts_B = torch.tensor(self._starts, device=index_N.device)
        grid.used, grid.start = len(self._starts), min(self._starts)

    def make_room(self) -> None:
        """Makes a column free for the next token of all answers."""
        if self.full:
            self._lay_out(self.grid.used, self.longest)

    def advance(self) -> None:
        """Counts the column that was written."""
        self.grid.end += 1

    def keep(self, places: Sequence[int]) -> list[int]:
        """Drops all answers but these. Returns the earlier place of each one that is left, by its place now."""
        order = list(places)
        count, kept = len(order), set(order)
        late = [place for place in order if place >= count]
        holes = [place for place in range(count) if place not in kept]
        moved = dict(zip(holes, late, strict=True))
        order = [moved.get(place, place) for place in range(count)]
        self._starts = [self._starts[place] for place in order]
        device = self.starts_B.device
        order_B = torch.tensor(order, device=device)
        if holes:
            sources, targets = torch.tensor(late, device=device), torch.tensor(holes, device=device)
            for layer in self._attention:
                layer.move(sources, targets)
        for state in self._recurrent:
            state.select_states(order_B)
        self.starts_B = self.starts_B[order_B]
        self.grid.used, self.grid.start = count, min(self._starts)
        return order

    def clear(self) -> None:
        """Forgets all answers."""
        self._starts, self.starts_B = [], self.starts_B[:0]
        self.grid.used = self.grid.start = self.grid.end = 0
        for layer in self._recurrent:
            layer.clear_states()

    def _lay_out(self, rows: int, tokens: int) -> None:
        """Takes a form for at least so many answers, the longest of so many tokens, with free columns after them."""
        rows = max(rows, self._most_rows(tokens + spare(tokens)))
        columns = min(tokens + spare(tokens), self._most_columns(rows))
        if columns <= tokens:
            raise RuntimeError(f"the KV cache has no room for {rows} answers of {tokens + 1} tokens")
        for layer in self._attention:
            layer.lay_out(rows, columns, tokens)
        shift = tokens - self.grid.end
        self._starts = [start + shift for start in self._starts]
        self.starts_B = self.starts_B + shift
        self.grid.start += shift
        self.grid.rows, self.grid.columns, self.grid.end = rows, columns, tokens

    def _bytes(self, rows: int, columns: int) -> int:
        states = rows * sum(layer.row_bytes for layer in self._recurrent)
        return states + sum(layer.bytes(rows, columns) for layer in self._attention)

    def _most_columns(self, rows: int) -> int:
        """Columns for which there is memory in so many rows."""
        counts = range(1, self._max_tokens + spare(self._max_tokens) + 1)
        return bisect_right(counts, self._budget_bytes, key=lambda columns: self._bytes(rows, columns))

    def _most_rows(self, columns: int) -> int:
        """Rows for which there is memory with so many columns."""
        counts = range(1, self._max_rows + 1)
        return bisect_right(counts, self._budget_bytes, key=lambda rows: self._bytes(rows, columns))

    def _layer(self, probe: Any) -> Any:
        kind = type(probe)
        if kind is LinearAttentionLayer:
            return StateLayer(probe)
        if kind not in _ATTENTION + _BOTH:
            raise ConfigError(
                f"rollout.engine.name=hf has no KV cache for layers of transformers' {kind.__name__}; choose another"
            )
        return HybridLayer(self.grid, probe) if kind in _BOTH else SlotLayer(self.grid, probe)
