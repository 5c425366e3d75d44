"""The curriculum over real sockets and a real Redis: easy, hard and medium tasks over several epochs."""

import msgspec

from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig
from tests.buffer.conftest import MakeConfig
from tests.buffer.groups import answered
from tests.buffer.peers import connected, serving

TASKS = 30
CREDITS = 10
EPOCHS = 5
CURRICULUM = {"after_groups": 2, "issue_probability": 0.1}


def played(ticket: m.Ticket) -> m.Group:
    """A group that is solved, unsolved or mixed by the task's index."""
    kind = ticket.indices[0] % 3
    group = answered(ticket, reward=float(kind != 1))
    if kind == 2:
        group.trajectories[0] = msgspec.structs.replace(group.trajectories[0], reward=0.0)
    return group


async def play(config: RunConfig) -> list[tuple[int, int]]:
    """Epoch and index of every ticket of the first epochs."""
    issued: list[tuple[int, int]] = []
    async with serving(config) as service, connected(config) as server:
        await server.hello(train_tasks=TASKS)
        await server.receive(m.Welcome)
        await server.credits(CREDITS)
        while not issued or issued[-1][0] < EPOCHS:
            tickets = await server.tickets()
            issued += [(ticket.epoch, ticket.indices[0]) for ticket in tickets]
            await server.deliver(*map(played, tickets))
        assert await service.ledger.verify() == []
        counts = await service.ledger.counts()
        tasks = (await service.ledger.snapshot()).tasks
    assert tasks == {"solved": TASKS // 3, "unsolved": TASKS // 3, "mixed": TASKS // 3}
    whole = [each for each in issued if each[0] < EPOCHS]
    assert counts.skipped_tasks >= EPOCHS * TASKS - len(whole) > 0
    return whole


async def test_mixed_tasks_are_issued_more_often(make_config: MakeConfig) -> None:
    issued = await play(make_config(curriculum=CURRICULUM, max_staleness=1000))
    of_epochs = [[index for each, index in issued if each == epoch] for epoch in range(EPOCHS)]
    for indices in of_epochs:
        assert len(set(indices)) == len(indices), "a task twice in an epoch"
        assert {index for index in indices if index % 3 == 2} == set(range(2, TASKS, 3))
    assert [len(indices) for indices in of_epochs[:2]] == [TASKS, TASKS]
    assert sum(map(len, of_epochs[2:])) <= 2 * TASKS


async def test_solved_tasks_alone_are_still_issued(make_config: MakeConfig) -> None:
    config = make_config(curriculum={"after_groups": 1, "issue_probability": 1e-9}, max_staleness=1000)
    async with serving(config) as service, connected(config) as server:
        await server.join(credits=CREDITS)
        for _ in range(5):
            await server.deliver(*[answered(ticket) for ticket in await server.tickets()])
        await server.tickets()
        counts = await service.ledger.counts()
        assert (counts.issued, counts.skipped_tasks > 0) == (6 * CREDITS, True)
        assert await service.ledger.verify() == []
