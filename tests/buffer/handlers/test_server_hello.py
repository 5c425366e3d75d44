"""Hello of rollout servers: run, environment and settings must match."""

import asyncio
from typing import Any

import pytest
import structlog

from slipstream.buffer.service import BufferService
from slipstream.buffer.wire import messages as m
from slipstream.configs import RunConfig, agreement
from slipstream.configs.runtime.errors import RefusedError
from slipstream.configs.runtime.hardware import Dtype
from tests.buffer.peers import Peer, connected, learner, serving


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
        ("env", "rows", "env.name"), ("env_fingerprint", "e2", "env.options"), ("train_tasks", 11, "env.options"),
        ("eval_tasks", 99, "env.options"), ("tokenizer_fingerprint", "t2", "model.path"),
        ("vocab_size", 33, "model.path"), ("model_fingerprint", "m2", "model.revision"),
    ],
)  # fmt: skip
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
        ({"run": {"seed": 7}}, "run.seed"),
        ({"buffer": {"filters": [{"name": "length", "max_tokens": 9}]}}, "buffer.filters"),
        ({"eval": {"reward": "digit_match"}}, "eval.reward"),
        ({"rewards": [{"name": "exact_match", "function": "math"}]}, "rewards: exact_match is 'function math"),
        ({"rewards": [{"name": "exact_match", "options": {"most": 3}}]}, "rewards: exact_match"),
        ({"rollout": {"episode": {"turns": 3}}}, "rollout.episode.turns"),
        ({"rollout": {"engine": {"max_model_len": 2048}}}, "rollout.engine.max_model_len"),
        ({"rollout": {"min_episodes": 1}, "learner": {"advantage": "reinforce_plus_plus"}}, "rollout.min_episodes"),
        ({"env": {"tools": [{"name": "calculator"}]}}, "env.tools"),
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


def resolved(config: RunConfig, dtype: Dtype) -> dict[str, str]:
    """Settings of a rollout server on a host where `model.dtype: auto` comes to this."""
    return agreement.server_settings(config) | {agreement.PRECISION: dtype}


def explicit(config: RunConfig, dtype: Dtype) -> RunConfig:
    """The configuration with this `model.dtype`, such as that of a learner on another host."""
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


@pytest.mark.parametrize(("first", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
async def test_first_server_fixes_precision(server: Peer, config: RunConfig, first: Dtype, other: Dtype) -> None:
    """The buffer's host has no say: `auto` is resolved where the model is."""
    await server.hello(settings=resolved(config, first))
    await server.receive(m.Welcome)
    async with connected(config, "r1") as second, learner(explicit(config, other)) as client:
        await second.hello(settings=resolved(config, other))
        reason = (await second.receive(m.Refused)).reason
        assert [part for part in ("model.dtype", first, other, "r0", "auto") if part not in reason] == []
        with pytest.raises(RefusedError, match=f"model.dtype is '{other}', but '{first}'"):
            await asyncio.to_thread(client.hello, 0)
        await second.hello(settings=resolved(config, first))
        await second.receive(m.Welcome)


async def test_precision_is_free_once_all_servers_left(server: Peer, config: RunConfig) -> None:
    await server.hello(settings=resolved(config, "float32"))
    await server.receive(m.Welcome)
    await server.send(m.ServerGoodbye(incarnation="i1"))
    await server.hello(settings=resolved(config, "bfloat16"), incarnation="i2")
    await server.receive(m.Welcome)
    await server.hello(settings=resolved(config, "float32"), incarnation="i3")  # it restarts with another one
    await server.receive(m.Welcome)


async def test_restarted_buffer_forgets_precision(config: RunConfig) -> None:
    for dtype in ("float32", "bfloat16"):
        async with serving(config), connected(config) as server:
            await server.hello(settings=resolved(config, dtype), incarnation=dtype)
            await server.receive(m.Welcome)


async def test_learner_fixes_precision_until_it_is_replaced(server: Peer, config: RunConfig) -> None:
    async with learner(explicit(config, "float32")) as first, learner(explicit(config, "bfloat16")) as next_one:
        await asyncio.to_thread(first.hello, 0)
        await server.hello(settings=resolved(config, "bfloat16"))
        assert "with the learner" in (await server.receive(m.Refused)).reason
        await asyncio.to_thread(next_one.hello, 0)
        await server.hello(settings=resolved(config, "bfloat16"))
        await server.receive(m.Welcome)
        await asyncio.to_thread(next_one.finish)
        await server.hello(settings=resolved(config, "float32"), incarnation="i2")
        await server.receive(m.Welcome)


async def test_explicit_precision_of_the_buffer_is_compared(config: RunConfig) -> None:
    async with serving(explicit(config, "float32")), connected(config) as server:
        await server.hello(settings=resolved(config, "bfloat16"))
        assert "with the buffer" in (await server.receive(m.Refused)).reason


async def test_servers_with_other_code_of_a_plugin_are_refused(server: Peer, config: RunConfig) -> None:
    await server.hello(settings={"code of my_rewards": "a1"})
    await server.receive(m.Welcome)
    async with connected(config, "r1") as other:
        await other.hello(settings={"code of my_rewards": "a2"})
        assert "code of my_rewards" in (await other.receive(m.Refused)).reason
        await other.hello(settings={"code of my_envs": "a2"})
        await other.receive(m.Welcome)
