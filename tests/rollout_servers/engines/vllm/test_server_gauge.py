"""How close vLLM's server is to its limits, by its metrics."""

import pytest

from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.engines.vllm.server_gauge import ServerGauge


def metrics(*cores: tuple[float, int, int]) -> str:
    """For each engine core: the share of its KV cache, its preemptions, and the requests that run."""
    lines = ["# HELP vllm:kv_cache_usage_perc KV-cache usage."]
    for number, (usage, preemptions, running) in enumerate(cores):
        labels = f'{{engine="{number}",model_name="/a model"}}'
        lines += [f"vllm:kv_cache_usage_perc{labels} {usage}", f"vllm:num_preemptions_total{labels} {preemptions}.0"]
        lines += [f"vllm:num_preemptions_created{labels} 1.7e+09", f"vllm:num_requests_running{labels} {running}.0"]
    return "\n".join(lines)


def test_the_fullest_core_counts_and_the_preemptions_of_all() -> None:
    pressure = ServerGauge().pressure(metrics((0.25, 2, 0), (0.75, 3, 0)))
    assert (pressure.kv_cache_usage, pressure.preemptions) == (0.75, 5)


def test_preemptions_for_an_update_do_not_count_and_later_ones_do() -> None:
    gauge = ServerGauge()
    assert gauge.pressure(metrics((0.5, 2, 4))).preemptions == 2
    gauge.excuse_running(metrics((0.5, 2, 4)))
    assert gauge.pressure(metrics((0.5, 5, 4))).preemptions == 2
    assert gauge.pressure(metrics((0.5, 7, 4))).preemptions == 3


def test_preemptions_before_an_update_count_though_nobody_asked_meanwhile() -> None:
    gauge = ServerGauge()
    gauge.excuse_running(metrics((0.5, 6, 4)))
    assert gauge.pressure(metrics((0.5, 10, 4))).preemptions == 6


def test_metrics_that_tell_nothing_are_an_error() -> None:
    with pytest.raises(EngineError, match="vllm:num_preemptions_total at /metrics"):
        ServerGauge().pressure("# nothing")
