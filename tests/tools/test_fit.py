"""`slipstream fit`: memory by purpose, remedies, and meshes."""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from slipstream.configs.load import load_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.schema.rollout import EngineConfig
from slipstream.learner.models.footprint import model_size
from slipstream.tools.fit import FitReport, command, fit, memory
from slipstream.tools.memory import Estimator
from tests.contract.families import write_family

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
ANSWERS_32K = SHAPES / "answers_32k.yaml"
GB = 1e9
TWO_GPUS_EACH = "rollout.engine.options.tensor_parallel_size=2"


@cache
def report_of(model: str, *overrides: str, gpus: int, gpu_memory: float = 80 * GB) -> FitReport:
    config = load_config(ANSWERS_32K, [f"model.path={SHAPES / model}", *overrides])
    return fit(config, gpus=gpus, gpu_bytes=gpu_memory)


def test_8b_fits_eight_gpus() -> None:
    report = report_of("Qwen3-8B", gpus=8)
    assert report.parameters == pytest.approx(8.19 * GB, rel=0.001)
    assert report.learner["weights"] == report.learner["gradients"] == report.parameters * 4 / 8
    assert report.learner["optimizer"] == report.parameters * 8 / 8
    # The input of each of 36 layers is kept, and one layer is computed again.
    assert report.learner["activations"] > 36 * 4096 * 2 * report.tokens
    assert report.fits and not report.remedies and report.proposed is None
    # 36 layers with keys and values of 8 heads of 128, in 2 bytes.
    assert report.engine["KV cache per 1,000 tokens"] == 1000 * 36 * 2 * 8 * 128 * 2


def test_remedies_are_named_where_memory_is_short() -> None:
    report = report_of("Qwen3-32B", TWO_GPUS_EACH, gpus=8)
    assert not report.fits
    assert report.remedies == ["learner.offload=true"]
    assert report.proposed is not None and report.proposed.startswith("--gpus 16 ")
    offloaded = report_of("Qwen3-32B", TWO_GPUS_EACH, "learner.offload=true", gpus=8)
    assert offloaded.fits
    assert offloaded.host.keys() == {"weights", "gradients", "optimizer"}


@pytest.mark.parametrize(
    ("trainer", "longest"), [("{name: sft, data: rows.jsonl}", 16384), ("{name: dpo, data: rows.jsonl}", 2 * 16383)]
)
def test_learner_alone_has_no_engine(trainer: str, longest: int) -> None:
    report = report_of("Qwen3-8B", "learner.token_budget=16384", f"learner.trainer={trainer}", gpus=8)
    assert report.tokens == longest, "both answers of a pair are in one micro-batch"
    assert report.fits and not report.engine and report.engine_remedy is None
    assert "engine" not in report.text


def test_adapters_have_the_only_gradients() -> None:
    report = report_of("Qwen3-32B", TWO_GPUS_EACH, "model.lora.rank=16", gpus=4)
    assert report.fits
    assert report.learner["gradients"] + report.learner["optimizer"] < 0.03 * report.learner["weights"]


def test_axes_divide_what_they_split() -> None:
    plain, split = (
        report_of("Qwen3-235B-A22B", *axes, gpus=128)
        for axes in ((), ("learner.parallel.cp=4", "learner.parallel.ep=32"))
    )
    assert split.learner["weights"] == plain.learner["weights"]
    assert split.learner["activations"] == pytest.approx(plain.learner["activations"] / 4, rel=0.15)
    assert split.learner["gathered layers"] < plain.learner["gathered layers"] / 4


def test_engine_without_room_for_a_sequence_does_not_fit() -> None:
    report = report_of("Qwen3-32B", "learner.optimizer.name=adamw_8bit", gpus=32)
    assert sum(report.learner.values()) < report.gpu_memory
    assert report.sequences == 0 and not report.fits
    assert report.engine_remedy == TWO_GPUS_EACH


SHORT = ("rollout.engine.max_model_len=4096", "rollout.sampling.max_tokens=2048", "learner.token_budget=16384")


def test_remedies_are_arguments_of_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of("Qwen3-8B", *SHORT, "learner.activation_checkpointing=none", gpus=8)
    assert "learner.token_budget=4096" in report.remedies  # the length of the model's context
    assert report.proposed is not None
    given = [str(ANSWERS_32K), f"model.path={SHAPES / 'Qwen3-8B'}", *SHORT, "learner.activation_checkpointing=none"]
    for remedy in (report.proposed, *(f"--gpus 8 {each}" for each in report.remedies)):
        assert command([*given, *remedy.split()]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "axes"), [(8, ()), (6, ()), (8, ("learner.parallel.dp_shard=8",))])
def test_plain_mesh_with_checkpointing_is_proposed_first(gpus: int, axes: tuple[str, ...]) -> None:
    report = report_of("Qwen3-8B", *SHORT, "learner.activation_checkpointing=none", *axes, gpus=gpus)
    assert report.proposed == f"--gpus {gpus} learner.activation_checkpointing=full"


def test_margin_is_left_free() -> None:
    needed = sum(report_of("Qwen3-8B", gpus=8).learner.values())
    assert not report_of("Qwen3-8B", gpus=8, gpu_memory=1.02 * needed).fits
    assert report_of("Qwen3-8B", gpus=8, gpu_memory=1.06 * needed).learner_fits


def test_impossible_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.parallel"):
        report_of("Qwen3-8B", "learner.parallel.ep=2", gpus=8)


def test_command_exits_with_1_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(ANSWERS_32K), f"model.path={SHAPES / 'Qwen3-8B'}", "--gpus", "8", "--gpu-memory"]
    assert command([*given, "24GB", "--json"]) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["gpu_memory"] == 24 * GB and found["remedies"] == []
    assert command([*given, "80GiB"]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "size"), [("80GB", 80e9), ("80 GiB", 80 * 2**30), ("24e9", None), ("much", None)])
def test_memory_sizes_have_units(text: str, size: float | None) -> None:
    if size is None:
        with pytest.raises(argparse.ArgumentTypeError):
            memory(text)
    else:
        assert memory(text) == size


@pytest.mark.parametrize(("family", "cached"), [("LFM2", 1), ("Falcon-H1", 2), ("Qwen3", 2)])
def test_cache_is_of_layers_with_attention(family: str, cached: int, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    config = AutoConfig.from_pretrained(tmp_path)
    engine = Estimator(model_size(config), config).engine(EngineConfig(), dtype=torch.bfloat16, gpu_bytes=80 * GB)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert engine.per_token == cached * 2 * 2 * head_size * config.num_key_value_heads
