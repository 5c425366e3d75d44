"""How many groups a server takes on, so that its engine keeps what it has begun in its KV cache."""

from slipstream.configs.schema.rollout import ConcurrencyConfig
from slipstream.rollout_servers.engines.base import Pressure


class Concurrency:
    """Additive increase, multiplicative decrease; without pressure it stays at the most.

    A request that is preempted loses its KV cache and is computed again, so more groups at once can mean fewer tokens.
    Source: Chiu & Jain 1989, doi:10.1016/0169-7552(89)90019-6. As in RFC 5681, section 3.2, one congestion decreases it
    once: while more is in flight than the limit, nothing changes, because what it was decreased for still goes on.

    Attributes:
        limit: groups that may be in flight, between `min_groups` and the most.
    """

    def __init__(self, config: ConcurrencyConfig, *, most: int) -> None:
        self._config = config
        self._most = most
        self._least = min(config.min_groups, most)
        self._preemptions = 0
        self.limit = most

    def observe(self, pressure: Pressure, *, groups: int) -> int:
        """The limit, after a look at the engine while so many groups are in flight."""
        pressed = self._preempted(pressure) or pressure.kv_cache_usage > self._config.kv_cache_high
        if groups <= self.limit:
            wanted = int(self.limit * self._config.decrease) if pressed else self.limit + self._config.increase
            self.limit = max(self._least, min(self._most, wanted))
        return self.limit

    def _preempted(self, pressure: Pressure) -> bool:
        """Whether requests were preempted since the last look; fewer than before are those of another engine."""
        before, self._preemptions = self._preemptions, pressure.preemptions
        return pressure.preemptions != before and pressure.preemptions > 0
