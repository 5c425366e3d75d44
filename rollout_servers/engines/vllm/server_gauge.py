"""How close vLLM's server is to its limits, from the metrics that it tells."""

import re

from slipstream.rollout_servers.engines.base import EngineError, Pressure


class ServerGauge:
    """Reads `/metrics`; the server's engine cores are taken together."""

    def __init__(self) -> None:
        self._seen = 0
        self._preemptions = 0
        self._excused = 0

    def pressure(self, metrics: str) -> Pressure:
        """The fullest KV cache and all preemptions. Raises: EngineError when the metrics don't tell of them."""
        total = int(sum(_values(metrics, "vllm:num_preemptions_total")))
        excused = min(self._excused, total - self._seen)
        self._excused -= excused
        self._preemptions += total - self._seen - excused
        self._seen = total
        usage = max(_values(metrics, "vllm:kv_cache_usage_perc"))
        return Pressure(kv_cache_usage=usage, preemptions=self._preemptions)

    def excuse_running(self, metrics: str) -> None:
        """The requests that ran were preempted for an update, not for want of room; they tell of it when they go on."""
        self.pressure(metrics)
        self._excused = int(sum(_values(metrics, "vllm:num_requests_running")))


def _values(metrics: str, name: str) -> list[float]:
    """One value for each engine core, from lines such as `name{engine="0"} 1.0`."""
    values = [float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)]
    if not values:
        raise EngineError(f"vLLM's server tells nothing of {name} at /metrics")
    return values
