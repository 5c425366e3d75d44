"""What is left of a request when vLLM dies of it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.base import Request
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.supervisor import RestartingEngine
from tests.contract.engines import VLLM_WARNINGS
from tests.contract.policies import distance, policy_of, write_policy

PROMPT = [3, 5, 7, 12]
TOKENS = 60
DEATH_AT_STEP = 25
EXACT = 1e-4
"""Mean |Δ| of log-probs in fp32."""

pytestmark = [VLLM_WARNINGS, pytest.mark.usefixtures("prompt_vllm")]


async def test_answers_continue_after_a_crash_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_policy(tmp_path / "model", tied=True)
    config = RunConfig.model_validate(
        {
            "model": {"path": tmp_path / "model", "dtype": "float32"},
            "rollout": {
                "sampling": {"max_tokens": TOKENS, "ignore_eos": True},
                "engine": {
                    "core": "inline",
                    "max_model_len": 128,
                    "max_sequences": 8,
                    "kv_cache_bytes": 16 << 20,
                    "start_deadline_s": 100,
                },
            },
        }
    )
    start = partial(start_engine, config, tmp_path / "model", eos_token_ids=())
    engine = RestartingEngine(await start(), start, config.rollout)
    first = engine.incarnation
    from vllm.v1.engine.llm_engine import LLMEngine

    steps, step = 0, LLMEngine.step

    def mortal_step(llm: LLMEngine) -> Any:
        nonlocal steps
        steps += 1
        if steps == DEATH_AT_STEP:
            raise RuntimeError("bus error")
        return step(llm)

    monkeypatch.setattr(LLMEngine, "step", mortal_step)
    try:
        answers = await engine.generate(Request(PROMPT, samples=4, deadline_s=100.0))
    finally:
        await engine.close()

    assert (engine.crashes, engine.requests_restarted) == (1, 0)
    assert engine.incarnation != first
    assert TOKENS - 5 < steps < TOKENS + 5, "no token was generated twice"
    assert len({tuple(answer.token_ids) for answer in answers}) == 4
    for answer in answers:
        assert (len(answer.token_ids), len(answer.logprobs), answer.finish_reason) == (TOKENS, TOKENS, "length")
        assert [(span.version, span.start, span.end) for span in answer.spans] == [(0, 0, TOKENS)]
        for start_at, end in ((0, DEATH_AT_STEP - 5), (DEATH_AT_STEP - 5, DEATH_AT_STEP + 5), (DEATH_AT_STEP, TOKENS)):
            assert distance(answer, policy_of(0, tied=True), PROMPT, start_at, end, temperature=1.0) < EXACT
