"""The learner's part: leases, reads and decodes groups. Meanwhile it asks for the next step's, and says that those of
before were trained."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slipstream.buffer.client.groups import GroupReader
from slipstream.buffer.client.learner import BufferClient, new_incarnation
from slipstream.buffer.store.types import Lease
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import DeadlineError
from slipstream.tools.bench.stage import GROUPS_PER_STEP

STEPS_PER_CHECKPOINT = 4
DEADLINE_S = 60.0
"""Far above what a step's groups take."""


@dataclass(frozen=True)
class Consumed:
    """What the consumer saw; times are of the machine's monotonic clock."""

    last_decoded: float
    lease_s: float
    """Spent on waiting for leases, all steps together."""


class Consumer:
    """A learner without a model; for one run."""

    def __init__(self, config: RunConfig, go_on: Callable[[], None]) -> None:
        self._go_on = go_on
        incarnation = new_incarnation()
        self._feed = BufferClient(config, "feed", incarnation)
        self._control = BufferClient(config, "control", incarnation)
        self._reader = GroupReader(config)
        self._leasing, self._confirming = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._step = 0
        self._control.hello(0)

    def consume(self, groups: int) -> Consumed:
        """Takes so many groups, a step's worth at a time.

        Raises: SlipstreamError when a process has died, DeadlineError when the groups don't come.
        """
        lease_s = last_decoded = 0.0
        confirmed = self._confirming.submit(self._go_on)
        leasing = self._leasing.submit(self._lease, self._step)
        for steps_left in reversed(range(groups // GROUPS_PER_STEP)):
            started = time.monotonic()
            lease = leasing.result()
            lease_s += time.monotonic() - started
            if steps_left:
                leasing = self._leasing.submit(self._lease, self._step + 1)
            self._reader.read(lease.ids)
            last_decoded = time.monotonic()
            confirmed.result()  # as in the learner, the next step's groups are fetched while one trains
            confirmed = self._confirming.submit(self._confirm, self._step)
            self._step += 1
        confirmed.result()
        return Consumed(last_decoded=last_decoded, lease_s=lease_s)

    def close(self) -> None:
        """Closes its connections to the service."""
        self._leasing.shutdown()
        self._confirming.shutdown()
        self._feed.close()
        self._control.close()

    def _confirm(self, step: int) -> None:
        """A step was trained, and its weights published; now and then there is a checkpoint."""
        self._control.trained(step)
        self._control.published(step + 1, evaluate=False)
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            self._control.checkpointed(step + 1)

    def _lease(self, step: int) -> Lease:
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            self._go_on()
            try:
                lease = self._feed.lease(step, count=GROUPS_PER_STEP, consuming_version=step, wait_s=1.0)
            except DeadlineError:
                self._go_on()  # if the service has died, that is what there is to say
                raise
            if lease is not None:
                return lease
        raise DeadlineError(f"no {GROUPS_PER_STEP} groups became ready within {DEADLINE_S:g} s")
