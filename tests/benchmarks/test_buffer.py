"""Tiny measurements of the buffer and of a fleet of simulated rollout servers."""

from tests.benchmarks.conftest import Measure, with_goals

BUFFER = "--groups 128 --spilled-groups 1 --path-groups 128 --rounds 1 --latency-s 0.2 --ready 240 300"
FLEET = "--servers 8 --churn 2 --groups-per-step 8 --steps 10 --step-s 0.02 --group-s 0.01"


def test_buffer(measured: Measure) -> None:
    record = measured("buffer", BUFFER)
    assert with_goals(record) == {
        "group path / bare", "last token to ready at half load, p99", "lease, fifo, 300 / 240 ready",
        "lease, prioritized, 300 / 240 ready", "service's memory, growth",
    }  # fmt: skip
    # Growth may be negative, and the CPU time of a few groups less than a clock tick.
    assert all(value > 0 for name, value in record["value"].items() if "growth" not in name and "CPU" not in name)
    assert {"CPU of redis", "CPU of producer"} < record["value"].keys()
    assert record["details"]["group_bytes"] > 8 * 1024 * 9


def test_fleet(measured: Measure) -> None:
    record = measured("fleet", FLEET)
    assert with_goals(record) == {"work of a server, max/mean", "work of a server after it, max/mean"}
    assert record["value"]["servers"] == 8
    assert record["value"]["work of a server, max/mean"] < 2
