"""`slipstream bench fit`: measured peaks of a learner's memory on a CPU, beside what `slipstream fit` computes."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.configs.runtime.logging import configure_logging
from benchmarks.figures import Figure, Figures, Goal, bench_parser
from benchmarks.workers import Workers
from slipstream.tools.cli import at_least

TOKENS = 2048
"""Of a micro-batch."""
ERROR = 0.10
"""Largest relative error that the goal allows."""
MODEL: Mapping[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
"""26 million parameters: 105 MB in fp32."""


@dataclass(frozen=True)
class Variant:
    """Settings of a measurement."""

    title: str
    learner: Mapping[str, Any]
    tokens: int = TOKENS
    ranks: int = 1


VARIANTS = (
    Variant("none", {}),
    Variant("selective", {"checkpointing": "selective"}),
    Variant("full", {"checkpointing": "full"}),
    Variant("full, four times the tokens", {"checkpointing": "full"}, tokens=4 * TOKENS),
    Variant("full, muon", {"checkpointing": "full", "optimizer": "muon"}),
    Variant("full, two ranks", {"checkpointing": "full"}, ranks=2),
)


def command(argv: Sequence[str]) -> int:
    """Measures, prints and saves all figures; returns 0. Raises: SlipstreamError when a process fails."""
    arguments = _parser().parse_args(argv)
    # Imported here: torch takes seconds, and --help should not.
    from benchmarks.shape_step import ONE_MAP_PER_TENSOR, Case, run_case, write_model

    configure_logging("bench", level="warning", folder=None)
    figures, details = Figures(), dict[str, Any]()
    with Workers.start() as workers:
        model = write_model(MODEL, workers.folder / "model", dtype="float32")
        for variant in VARIANTS[: arguments.variants]:
            tokens = variant.tokens * arguments.tokens // TOKENS
            case = Case(
                model=str(model),
                lengths=[tokens // 4] * 8 * variant.ranks,  # two micro-batches: the second finds gradients
                token_budget=tokens,
                **variant.learner,
            )
            result = run_case(workers, case, ranks=variant.ranks, environment=ONE_MAP_PER_TENSOR)
            expected = expected_peak(case, model, ranks=variant.ranks)
            error = abs(sum(expected.values()) / result.peak_bytes - 1)
            figures.show(
                [
                    Figure(f"{variant.title}: measured", result.peak_bytes / 1e6, "MB"),
                    Figure("  computed", sum(expected.values()) / 1e6, "MB"),
                    Figure("  error", error, "", Goal("<", ERROR)),
                ]
            )
            details[variant.title] = {"measured": asdict(result), "computed": expected}
    figures.save_bench("fit", arguments, details=details)
    return 0


def expected_peak(case: Any, model: Path, *, ranks: int) -> dict[str, float]:
    """Computed bytes by purpose of a rank on a CPU, for a `shape_step.Case` with the model in a folder."""
    import torch
    from transformers import AutoConfig

    from slipstream.learner.models.footprint import model_size
    from slipstream.learner.parallel.mesh import MeshSizes
    from slipstream.tools.memory import Estimator, LearnerSetting

    config = AutoConfig.from_pretrained(model)
    setting = LearnerSetting(
        mesh=MeshSizes(dp_shard=ranks),
        dtype=getattr(torch, case.dtype),
        tokens=case.token_budget,
        logits_bytes=case.config(model).learner.logits_bytes,
        checkpointing=case.checkpointing,
        optimizer=case.optimizer,
        offload=case.offload,
        on_gpu=False,
    )
    return dict(Estimator(model_size(config), config).learner(setting).gpu)


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("fit", "Compare measured peaks of memory with computed ones, on a CPU.")
    parser.add_argument(
        "--variants", type=at_least(1), default=len(VARIANTS), help=f"number of settings (default: all {len(VARIANTS)})"
    )
    parser.add_argument("--tokens", type=at_least(16), default=TOKENS, help=f"of a micro-batch (default: {TOKENS})")
    return parser
