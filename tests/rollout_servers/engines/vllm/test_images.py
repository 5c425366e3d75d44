"""vLLM with a vision-language model: the learner's log-probs, placeholders, and updates of the encoder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.configs import RunConfig
from slipstream.env.builtin.colours import Colours
from slipstream.learner.data.images import ImageReader
from slipstream.learner.data.packing import TokenSequence, pack
from slipstream.learner.models.load import ModelOptions, load_model
from slipstream.learner.models.scoring import score_actions
from slipstream.learner.parallel.mesh import join_world, leave_world
from slipstream.learner.weights.snapshot import Prober, SnapshotTaker
from slipstream.models.tokenizer import Tokenizer
from slipstream.rollout_servers.engines.base import Engine, Request, RequestRefused
from slipstream.rollout_servers.engines.registry import start_engine
from slipstream.rollout_servers.engines.staging import Staging
from slipstream.rollout_servers.placeholders import ImagePlaceholders
from slipstream.rollout_servers.weights.verify import verify
from tests.contract.engines import VLLM_WARNINGS
from tests.vision import FAMILIES, PLACEHOLDERS, VOCABULARY, write_vision_model

EXACT = 1e-4
HOST = torch.device("cpu")

pytestmark = [pytest.mark.usefixtures("vllm_environment", "prompt_vllm"), VLLM_WARNINGS]


async def difference(engine: Engine, model: Any, folder: Path) -> float:
    """Largest |Δ| of log-probs between engine and learner, over answers to one and to two pictures."""
    tokenizer, placeholders, reader = Tokenizer(folder), ImagePlaceholders(folder), ImageReader(folder)
    sequences, sampled = list[TokenSequence](), list[torch.Tensor]()
    for number in (1, 2):
        task = Colours(images=number).task("train", number)
        prompt, images = placeholders.expand(tokenizer.encode(task.prompt), task.images)
        for answer in await engine.generate(Request(prompt, 60.0, samples=4, images=images)):
            assert not set(PLACEHOLDERS) & set(answer.token_ids)
            ids = np.array([*prompt, *answer.token_ids])
            sequences.append(TokenSequence(ids, np.arange(len(ids)) >= len(prompt), reader.read(ids, task.images)))
            sampled.append(torch.tensor(answer.logprobs))
    (batch,) = pack(sequences, token_budget=1000)
    with torch.no_grad():
        scored = score_actions(model, batch, temperature=1.0).logprobs_A
    return (scored - torch.cat([sampled[row] for row in batch.rows_B.tolist()])).abs().max().item()


async def install(engine: Engine, model: Any, config: RunConfig, *, version: int) -> None:
    """Publishes the model and verifies that the engine has it."""
    probe = Prober(model, tokens=32, vocabulary=VOCABULARY, device=HOST).score()
    taker = SnapshotTaker(model, dtype=torch.float32, bucket_bytes=1 << 20, device=HOST)
    snapshot = taker.take(version, evaluate=False, keep=True, probe=probe)
    assert snapshot is not None
    manifest, staging = snapshot.sealed().manifest, Staging("vision", shared=False)
    staging.begin(manifest).copy_(snapshot.data)
    staging.finish(manifest)
    await engine.install(version, manifest, staging)
    await verify(engine, manifest, config.weights, dtype="float32")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family == "qwen2_5_vl" else pytest.mark.soak) for family in FAMILIES]
)
async def test_engine_agrees_with_the_learner(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model", family)
    sizes = {"max_model_len": 128, "max_sequences": 8, "kv_cache_bytes": 8 << 20, "start_deadline_s": 200}
    config = RunConfig.model_validate(
        {
            "run": {"dir": tmp_path},
            "model": {"path": folder, "dtype": "float32"},
            "rollout": {"engine": {"core": "inline", **sizes}, "sampling": {"max_tokens": 12, "ignore_eos": True}},
        }
    )
    model: Any = load_model(folder, ModelOptions(dtype=torch.float32, attention="segments"), join_world())
    leave_world()  # vLLM has a process group of its own
    engine = await start_engine(config, folder, eos_token_ids=(6,))
    try:
        assert await difference(engine, model, folder) < EXACT
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        assert await difference(engine, model, folder) > 100 * EXACT
        await install(engine, model, config, version=1)
        assert await difference(engine, model, folder) < EXACT
        with torch.no_grad():  # features of the same pictures, computed by the encoder before, must not be used
            for parameter in model.model.visual.merger.parameters():
                parameter.mul_(1.5)
        await install(engine, model, config, version=2)
        assert await difference(engine, model, folder) < EXACT
        task = Colours().task("train", 0)
        prompt, images = ImagePlaceholders(folder).expand(Tokenizer(folder).encode(task.prompt), task.images)
        for wrong in ([*prompt[:-1], VOCABULARY], [*prompt[: images[0].start], *prompt[images[0].start + 1 :]]):
            with pytest.raises(RequestRefused):
                await engine.generate(Request(wrong, 60.0, images=images))
    finally:
        await engine.close()
