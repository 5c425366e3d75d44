"""A tiny measurement of several turns: sessions, single turns, and agents in a process of their own."""

import pytest

from tests.benchmarks.conftest import Measure, with_goals

CASES = ("2 episodes", "2 single turns", "3 episodes on 2 places", "3 agents on 2 places")


@pytest.mark.usefixtures("forked_workers")
def test_all_cases_are_measured(measured: Measure) -> None:
    record = measured(
        "turns", "--engine hf --episodes 2 --sessions 3 --turns 3 --tool-ms 1 --least 2 --most 6 --calls 12 --rounds 1"
    )
    speeds = {name for name in record["value"] if name.endswith(": speed")}
    episodes, single, more, agents = CASES
    ratios = {f"{case} / {other}: speed" for case, other in ((episodes, single), (more, single), (agents, more))}
    assert speeds == {f"{case}: speed" for case in CASES} | ratios
    assert with_goals(record) == {*ratios, "overhead of the gateway, CPU per call"}
    assert {case: len(counts) for case, counts in record["details"].items()} == dict.fromkeys(
        ("episodes", "single turns", "more episodes", "agents"), 1
    )
    (count,) = record["details"]["agents"]
    assert count["calls"] == 12
    assert count["prompt_tokens"] > count["tokens"] >= count["steps"] > 0
