"""Families of models: engines agree with the learner on log-probs, at start and after each update."""

import importlib.util
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.weights.verify import verify
from tests.contract.engines import VLLM_WARNINGS
from tests.contract.experts import change
from tests.contract.families import FAMILIES, write_family
from tests.contract.policies import scores
from tests.contract.trainer import publish

EXACT = {"float32": 1e-4, "bfloat16": 0.15}
TOKENS = random.Random(0).choices(range(64), k=24)
DOCS = Path(__file__).parents[2] / "docs" / "models.md"
ENGINES = {"float32": "vLLM, hf", "bfloat16": "vLLM (bf16), hf", None: "hf"}
HF = [pytest.param("hf", family) for family in FAMILIES]
VLLM = [
    pytest.param("vllm", name, marks=[pytest.mark.soak] if family.soak else [])
    for name, family in FAMILIES.items()
    if family.vllm
]


@dataclass(frozen=True)
class Version:
    """A version as a rollout server receives it, and the learner's log-probs of `TOKENS` under it."""

    manifest: Any
    staging: Staging
    logprobs: list[float]


def distance(found: list[float], expected: list[float], dtype: str) -> float:
    """Maximal |Δ| of log-probs; in bfloat16, whose rounding chooses other experts for single tokens, the median."""
    differences = np.abs(np.subtract(found, expected))
    return float(differences.max() if dtype == "float32" else np.median(differences))


@VLLM_WARNINGS
@pytest.mark.usefixtures("prompt_vllm")
@pytest.mark.parametrize(("engine_name", "family"), [*HF, *VLLM])
async def test_updated_engine_agrees_with_the_learner(engine_name: str, family: str, tmp_path: Path) -> None:
    if engine_name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here")
    folder, dtype = tmp_path / "model", (FAMILIES[family].vllm or "float32") if engine_name == "vllm" else "float32"
    write_family(folder, family)
    learner: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    initial, versions = scores(learner, TOKENS), []
    for number in (1, 2):
        change(learner, seed=number)
        # Before vLLM starts in this process: it replaces classes of transformers that it runs.
        staging = Staging("families", shared=False)
        manifest = publish(learner, number, staging, dtype=getattr(torch, dtype))
        versions.append(Version(manifest, staging, scores(learner, TOKENS)))
    sizes = {"max_model_len": 64, "max_sequences": 4, "kv_cache_bytes": 1 << 20, "start_deadline_s": 200}
    config = RunConfig.model_validate(
        {
            "run": {"dir": tmp_path},
            "model": {"path": folder, "dtype": dtype},
            "rollout": {"engine": {"name": engine_name, "core": "inline", **sizes}, "sampling": {"max_tokens": 8}},
        }
    )
    engine = await start_engine(config, folder, eos_token_ids=(1,))
    try:
        assert distance(await engine.score(TOKENS), initial, dtype) < EXACT[dtype]
        for version in versions:
            assert distance(await engine.score(TOKENS), version.logprobs, dtype) > 10 * EXACT[dtype]
            await engine.install(version.manifest.version, version.manifest, version.staging)
            await verify(engine, version.manifest, config.weights, dtype=dtype)
            assert distance(await engine.score(TOKENS), version.logprobs, dtype) < EXACT[dtype]
    finally:
        await engine.close()


def test_documented_families_are_those_that_are_tested() -> None:
    row = re.compile(r"^\| (.+?) \| `(\w+ForCausalLM)` \| (.+?) \|", re.MULTILINE)
    assert row.findall(DOCS.read_text(encoding="utf-8")) == [
        (name, family.architecture, ENGINES[family.vllm]) for name, family in FAMILIES.items()
    ]
