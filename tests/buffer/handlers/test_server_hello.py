"""Hello of rollout servers: run, environment and settings must match."""

from typing import Any

import pytest
import structlog

from slipstream.buffer.service import BufferService
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig, agreement
from tests.buffer.peers import OTHER_DTYPE, Peer, connected


async def test_welcome_has_latest_version(server: Peer, service: BufferService) -> None:
    await service.ledger.publish(7, evaluate=False)
    await server.hello()
    assert (await server.receive(m.Welcome)).version == 7


async def test_server_of_other_run_is_refused(server: Peer, config: RunConfig) -> None:
    await server.hello(run="somebody-else")
    reason = (await server.receive(m.Refused)).reason
    assert "somebody-else" in reason
    assert config.run.name in reason


@pytest.mark.parametrize(
    ("field", "value", "set_by"),
    [
        ("env", "rows", "env.name"),
        ("env_fingerprint", "e2", "env.options"),
        ("train_tasks", 11, "env.options"),
        ("eval_tasks", 99, "env.options"),
        ("tokenizer_fingerprint", "t2", "model.path"),
        ("vocab_size", 33, "model.path"),
        ("model_fingerprint", "m2", "model.revision"),
    ],
)
async def test_differing_server_is_refused(
    server: Peer, config: RunConfig, field: str, value: str | int, set_by: str
) -> None:
    await server.join()
    async with connected(config, "r1") as other:
        await other.hello(**{field: value})
        reason = (await other.receive(m.Refused)).reason
        assert [part for part in (field, set_by, repr(str(value)), "run.name") if part not in reason] == []
        await other.credits(8)
        await other.receive(m.UnknownPeer)


async def test_restarted_server_must_match_identity(server: Peer, config: RunConfig) -> None:
    await server.join()
    await server.hello(env_fingerprint="e2", incarnation="i2")
    assert "env_fingerprint" in (await server.receive(m.Refused)).reason


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rollout": {"sampling": {"temperature": 0.5}}}, "rollout.sampling.temperature"),
        ({"rollout": {"sampling": {"max_tokens": 9}}}, "rollout.sampling.max_tokens"),
        ({"rollout": {"overlong": {"cache_tokens": 9}}}, "rollout.overlong"),
        ({"rewards": [{"name": "exact_match", "weight": 2}]}, "rewards is 'exact_match: 2.0'"),
        ({"rollout": {"group_size": 5}}, "rollout.group_size"),
        ({"model": {"dtype": OTHER_DTYPE}}, "model.dtype"),
        ({"run": {"seed": 7}}, "run.seed"),
        ({"buffer": {"filters": [{"name": "length", "max_tokens": 9}]}}, "buffer.filters"),
        ({"eval": {"reward": "digit_match"}}, "eval.reward"),
    ],
)
async def test_server_with_other_settings_is_refused(
    server: Peer, service: BufferService, config: RunConfig, change: dict[str, Any], key: str
) -> None:
    known = config.model_dump()
    others = {key: known[key] | value if isinstance(value, dict) else value for key, value in change.items()}
    await server.hello(settings=agreement.server_settings(RunConfig.model_validate(known | others)))
    assert (await server.receive(m.Refused)).reason.startswith(key)
    assert "env" not in await service.ledger.identity()
    await server.hello(settings=agreement.server_settings(config))
    await server.receive(m.Welcome)


async def test_repeated_hellos_are_logged_once(server: Peer) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await server.hello(train_tasks=0)
            assert "no tasks" in (await server.receive(m.Refused)).reason
            await server.lead()
        await server.hello(train_tasks=0, incarnation="i2")
        await server.receive(m.Refused)
    assert [line["event"] for line in logs] == ["server refused", "learner joined", "server refused"]
