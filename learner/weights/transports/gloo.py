"""Gloo between CPUs: every bucket is broadcast once to all rollout servers of the group."""

import threading
from datetime import timedelta

from torch.distributed import ProcessGroupGloo

from slipstream.buffer.wire.weights.fabric import GlooFabric
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot
from slipstream.learner.weights.transports.base import TransferError
from slipstream.learner.weights.transports.rendezvous import Rendezvous


class GlooTransport:
    """Broadcasts buckets of host memory."""

    name = "gloo"
    on_device = False

    def __init__(self, config: WeightsConfig) -> None:
        """Listens. Raises: ConfigError when the address is taken or no address of this host."""
        self._deadline_s = config.deadline_s
        self._rendezvous = Rendezvous(config)
        self._fabric = GlooFabric()

    def form(self, epoch: int, world: int) -> None:
        """Enters transfer group `epoch` as rank 0 of `world`."""
        self._rendezvous.begin()

        def connect(_: threading.Event) -> ProcessGroupGloo:
            store = self._rendezvous.gather(epoch, world)
            return ProcessGroupGloo(store, 0, world, timedelta(seconds=self._deadline_s))

        try:
            self._fabric.enter(connect)
        except RuntimeError as error:
            raise TransferError(f"the {world} of the transfer group could not connect to each other: {error}") from None

    def send(self, snapshot: Snapshot) -> None:
        """Broadcasts the version's bytes, bucket by bucket."""
        try:
            for _ in self._fabric.broadcast(snapshot.data, snapshot.manifest.bucket_bytes, self._deadline_s):
                pass
        except RuntimeError as error:
            raise TransferError(f"version {snapshot.manifest.version} was not sent: {error}") from None

    def abort(self) -> None:
        """Ends a wait in `form` or `send`; the group is left."""
        self._rendezvous.abort()
        self._fabric.leave()

    def close(self) -> None:
        """Leaves the group and stops listening."""
        self.abort()
        self._rendezvous.close()
        self._fabric.close()
