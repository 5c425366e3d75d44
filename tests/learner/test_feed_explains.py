"""What a learner that waits for groups is told of the buffer and of the servers."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from slipstream.learner.data import buffer_feed as learner_feed


@pytest.fixture
def config(make_config: Callable[..., RunConfig]) -> RunConfig:
    return make_config()


def explained(
    counts: m.LedgerCounts, *, versions: Sequence[int], tasks: Mapping[str, int], run: RunConfig, deaths: int = 0
) -> str:
    """What a learner hears that waits at version 3, beside servers of these versions, whose engines died so often."""
    servers = [
        m.ServerStatus(server=f"r{number}", version=version, engine_deaths=deaths)
        for number, version in enumerate(versions)
    ]
    state = m.State(request=0, version=3, counts=counts, servers=servers, evals=[], tasks=dict(tasks))
    return learner_feed._explain(state, run, 3)


@pytest.mark.parametrize(("solved", "said"), [(3, True), (2, False)])
def test_who_waits_for_groups_of_tasks_that_are_solved_hears_how_to_end(
    config: RunConfig, solved: int, said: bool
) -> None:
    counts = m.LedgerCounts(issued=40, filtered=30, reissued=4, reasons={"filtered:dynamic_sampling": 30})
    told = explained(counts, versions=[3], tasks={"solved": solved, "mixed": 2}, run=config)
    assert "of 40 issued it dropped 30 filtered:dynamic_sampling, 4 were issued again" in told
    assert (f"{solved} tasks are solved" in told and "learner.steps" in told) == said


def test_who_waits_without_a_rollout_server_hears_that_there_is_none(config: RunConfig) -> None:
    told = explained(m.LedgerCounts(in_flight=1), versions=[], tasks={}, run=config)
    assert told == "the buffer has 0 ready, 1 in flight, 0 leased; no rollout server is connected"


def test_only_servers_whose_groups_would_be_too_stale_are_named(config: RunConfig) -> None:
    run = config.model_copy(update={"buffer": config.buffer.model_copy(update={"max_staleness": 1})})
    told = explained(m.LedgerCounts(), versions=[3, 1, 2, 0], tasks={}, run=run)
    assert "it dropped none, 0 were issued again; r1 holds version 1, r3 holds version 0, the policy is at 3" in told


def test_of_a_server_without_weights_it_is_told_that_its_engine_died(config: RunConfig) -> None:
    run = config.model_copy(update={"buffer": config.buffer.model_copy(update={"max_staleness": 1})})
    told = explained(m.LedgerCounts(), versions=[0], tasks={}, run=run, deaths=2)
    assert "r0 holds version 0 (deaths of its engine: 2, see its log), the policy is at 3: does it reach" in told
