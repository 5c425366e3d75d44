"""`slipstream ledger account`."""

import json

import pytest

from slipstream.buffer.store.redis import run_prefix
from slipstream.configs import RunConfig
from tests.tools.conftest import CommandLine
from tests.tools.ledger.conftest import SERVER, on


def test_account_of_a_played_run(ledger: CommandLine, played: RunConfig) -> None:
    assert ledger("account", played.paths.root) == 0
    assert "32 generated = 16 trained + 8 ready + 8 leased" in ledger.out
    assert ledger("account", played.paths.root, "--json") == 0
    found = json.loads(ledger.out)
    (row,) = found["rows"]
    assert (row["env"], row["server"], row["kind"]) == ("digits", SERVER, "train")
    assert (row["generated"], row["trained"], row["ready"], row["leased"], row["lost"]) == (32, 16, 8, 8, {})
    assert found["total"]["closes"]


@pytest.mark.parametrize("command", ["account", "verify"])
def test_account_that_does_not_close_names_the_group(ledger: CommandLine, played: RunConfig, command: str) -> None:
    prefix = run_prefix(played.run.name)

    async def damage(redis: object, _: object) -> None:
        await redis.hincrby(f"{prefix}:account:1", "generated", 5)  # type: ignore[attr-defined]
        await redis.hset(f"{prefix}:account_open", "7", "1:5")  # type: ignore[attr-defined]

    on(played, damage)
    assert ledger(command, played.paths.root) == 1
    assert "7 (+5)" in ledger.out + ledger.err
