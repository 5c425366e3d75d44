"""Sequences that are generated together: their KV cache, aligned at the last token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer

from slipstream.rollout_servers.engines.hf.policy import Policy

# B sequences, T tokens in the cache (padding on the left), V vocabulary


class Batch:
    """The KV cache of B sequences."""

    def __init__(self, policy: Policy, cache: Cache, mask_BT: Tensor) -> None:
        self._policy = policy
        self._cache: Any = cache  # its layers are of many kinds
        self._mask_BT = mask_BT

    @classmethod
    def of(cls, policy: Policy, sequences: Sequence[Sequence[int]]) -> tuple["Batch", Tensor]:
        """The cache of these tokens, and the logits of those that follow, shape [B, V]; of equal ones computed once."""
        places: dict[tuple[int, ...], int] = {}
        place_B = [places.setdefault(tuple(sequence), len(places)) for sequence in sequences]
        longest = max(map(len, places))
        ids = [[0] * (longest - len(each)) + list(each) for each in places]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in places]
        cache, mask_BT = policy.new_cache(), torch.tensor(mask, device=policy.device)
        logits_BV = policy.next_logits(torch.tensor(ids, device=policy.device), mask_BT, cache)
        batch = cls(policy, cache, mask_BT)
        if len(places) < len(place_B):
            index_B = torch.tensor(place_B, device=policy.device)
            batch._reorder(index_B)
            logits_BV = logits_BV[index_B]
        return batch, logits_BV

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Adds a token to each sequence; logits of the next, shape [B, V]."""
        ids_B1 = torch.tensor(token_ids, device=self._policy.device)[:, None]
        self._mask_BT = pad(self._mask_BT, (0, 1), value=1)
        return self._policy.next_logits(ids_B1, self._mask_BT, self._cache)

    def join(self, other: "Batch") -> None:
        """Takes in the sequences of another batch, behind its own; only where `policy.joins`."""
        length = max(self._mask_BT.shape[1], other._mask_BT.shape[1])
        self._resize(length)
        other._resize(length)
        self._mask_BT = torch.cat([self._mask_BT, other._mask_BT])
        for mine, others in zip(self._cache.layers, other._cache.layers, strict=True):
            mine.keys = torch.cat([mine.keys, others.keys])
            mine.values = torch.cat([mine.values, others.values])

    def keep(self, places: Sequence[int]) -> None:
        """Drops all sequences but these, and the padding that no other needs."""
        self._reorder(torch.tensor(places, device=self._policy.device))
        if self._policy.joins:
            self._resize(int(self._mask_BT.sum(-1).max()))

    def _reorder(self, index_B: Tensor) -> None:
        self._cache.reorder_cache(index_B)
        self._mask_BT = self._mask_BT[index_B]

    def _resize(self, length: int) -> None:
        """Adds or removes padding on the left, to T = `length`; a negative pad removes."""
        self._mask_BT = pad(self._mask_BT, (length - self._mask_BT.shape[1], 0))
        for layer in self._cache.layers:
            kept = length
            if isinstance(layer, DynamicSlidingWindowLayer):
                kept = min(length, layer.sliding_window - 1)
                layer.cumulative_length = length
            more = kept - layer.keys.shape[-2]
            layer.keys = pad(layer.keys, (0, 0, more, 0))
            layer.values = pad(layer.values, (0, 0, more, 0))
