"""The learner's part: leases, reads and decodes groups, and says that they were trained."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.buffer.client import BufferClient, GroupReader
from slipstream.configs import RunConfig
from slipstream.configs.errors import SlipstreamError
from slipstream.tools.bench.stage import GROUPS_PER_STEP

STEPS_PER_CHECKPOINT = 4


@dataclass(frozen=True)
class Consumed:
    """What the consumer saw; times are of the machine's monotonic clock."""

    last_decoded: float
    lease_s: float
    """Spent on waiting for leases, all steps together."""
    read_s: float
    """On reading and decoding."""


class Consumer:
    """A learner without a model; for one run."""

    def __init__(self, config: RunConfig, go_on: Callable[[], None]) -> None:
        self._go_on = go_on
        self._client = BufferClient(config, "consumer")
        self._reader = GroupReader(config)
        self._step = 0
        self._client.hello(0)

    def consume(self, groups: int) -> Consumed:
        """Takes so many groups, a step's worth at a time.

        Raises: SlipstreamError when the groups don't come.
        """
        lease_s = read_s = last_decoded = 0.0
        for _ in range(groups // GROUPS_PER_STEP):
            self._go_on()
            started = time.monotonic()
            lease = self._client.lease(self._step, count=GROUPS_PER_STEP, consuming_version=self._step, wait_s=60.0)
            if lease is None:
                raise SlipstreamError(f"no {GROUPS_PER_STEP} groups became ready within 60 s")
            leased = time.monotonic()
            self._reader.read(lease.group_ids)
            last_decoded = time.monotonic()
            lease_s += leased - started
            read_s += last_decoded - leased
            self._client.trained(self._step)
            self._step += 1
            self._client.published(self._step, evaluate=False)
            if self._step % STEPS_PER_CHECKPOINT == 0:
                self._client.checkpointed(self._step)
        return Consumed(last_decoded=last_decoded, lease_s=lease_s, read_s=read_s)

    def close(self) -> None:
        """Closes its connection to the service."""
        self._client.close()
