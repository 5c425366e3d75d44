"""Mixtures of experts: engines load what the learner publishes, whatever transformers makes of it in memory."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.verify import verify
from tests.contract.engines import VLLM_WARNINGS
from tests.contract.experts import MODELS, change, write_experts
from tests.contract.policies import scores
from tests.contract.trainer import publish

EXACT = 1e-4
TOKENS = random.Random(0).choices(range(64), k=24)

pytestmark = [
    pytest.mark.usefixtures("prompt_vllm"),
    VLLM_WARNINGS,
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["hf", "vllm"])
async def test_updated_engine_agrees_with_the_learner(name: str, kind: str, tmp_path: Path) -> None:
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    folder = tmp_path / "model"
    write_experts(folder, kind)
    learner: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sizes = {"max_model_len": 64, "max_sequences": 4, "kv_cache_bytes": 1 << 20, "start_deadline_s": 200}
    config = RunConfig.model_validate(
        {
            "run": {"dir": tmp_path},
            "model": {"path": folder, "dtype": "float32"},
            "rollout": {"engine": {"name": name, "core": "inline", **sizes}, "sampling": {"max_tokens": 8}},
        }
    )
    engine = await start_engine(config, folder, eos_token_ids=(1,))
    try:
        assert await engine.score(TOKENS) == pytest.approx(scores(learner, TOKENS), abs=EXACT)
        for version in (1, 2):
            change(learner, seed=version)
            staging = Staging("experts", shared=False)
            manifest = publish(learner, version, staging)
            await engine.install(manifest.version, manifest, staging)
            await verify(engine, manifest, config.weights, dtype=config.model.dtype)
            assert await engine.score(TOKENS) == pytest.approx(scores(learner, TOKENS), abs=EXACT)
    finally:
        await engine.close()
