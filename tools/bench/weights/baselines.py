"""What transports are measured against: the same bytes, moved with nothing around it."""

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.configs import RunConfig

TIMEOUT = timedelta(seconds=120)
HOST = "127.0.0.1"


class MemoryCopy:
    """A copy into memory that was written before."""

    def __init__(self, source: Tensor) -> None:
        self._source = source.numpy()
        self._target = np.ones_like(self._source)

    def run(self) -> None:
        """Copies once, in this thread."""
        np.copyto(self._target, self._source)


def checksum(source: Tensor) -> None:
    """Hashes all of it, in this thread."""
    xxhash.xxh3_64_intdigest(source.numpy().data)


class BareGloo:
    """A broadcast from rank 0 to rank 1, bucket after bucket."""

    def __init__(self, config: RunConfig, rank: int, data: Tensor | None) -> None:
        """Connects; rank 0 gives the bytes.

        Raises: RuntimeError, as torch does, when the other side is not there in time.
        """
        self._data = data
        self._bucket_bytes = config.weights.bucket_bytes
        store = TCPStore(HOST, config.weights.store_port, None, rank == 0, TIMEOUT, wait_for_workers=False)
        self._group: Any = ProcessGroupGloo(PrefixStore("bare", store), rank, 2, TIMEOUT)

    def run(self, size_bytes: int) -> None:
        """Broadcasts once."""
        if self._data is None:
            self._data = torch.ones(size_bytes, dtype=torch.uint8)
        for start in range(0, size_bytes, self._bucket_bytes):
            self._group.broadcast(self._data[start : start + self._bucket_bytes], 0).wait()
