"""The gauge in the place of vLLM's Prometheus logger."""

import pytest

# vLLM and what it imports warn of their own futures.
pytestmark = [
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def test_whatever_vllm_tells_its_loggers_beside_steps_is_heard_without_prometheus() -> None:
    from vllm.v1.metrics.loggers import ADMISSION_REASONS

    from slipstream.rollout_servers.engines.vllm.core import PressureGauge

    gauge = PressureGauge(None)
    gauge.log_engine_initialized()
    gauge.record_sleep_state(1, 2)
    for reason in ADMISSION_REASONS:
        gauge.record_admission_rejection(reason)
    assert (gauge.pressure.kv_cache_usage, gauge.pressure.preemptions) == (0.0, 0)
