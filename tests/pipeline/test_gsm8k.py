"""The recipe `gsm8k` from rows of verl to a trained chat model: first steps with a tiny model."""

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pyarrow
from pyarrow import parquet

from slipstream.tools.cli import ledger
from tests.pipeline.conftest import ROOT, Pipeline
from tests.pipeline.runs import train
from tests.rollout_servers.rollouts.chat import build_chat_model

STEPS = 2


def write_rows(file: Path, numbers: range) -> Path:
    """Rows in verl's shape."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is the result of adding {number} and 2?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 2)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in numbers
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_first_steps_of_gsm8k(pipeline: Pipeline, forks: ForkServerContext, tmp_path: Path) -> None:
    model = build_chat_model(tmp_path / "model", "chatml")
    rows, held_out = (
        write_rows(tmp_path / "train.parquet", range(16)),
        write_rows(tmp_path / "test.parquet", range(16, 20)),
    )
    overrides = (
        f"model.path={model}", "model.dtype=float32", f"env.options={{path: {rows}, eval_path: {held_out}}}",
        "rollout.sampling.max_tokens=16", "rollout.engine.max_model_len=128", "rollout.engine.max_sequences=64",
        "rollout.engine.name=hf", "rollout.groups_in_flight=8",
        "scoring.workers=1", f"learner.steps={STEPS}", "learner.groups_per_step=4",
    )  # fmt: skip
    assert train(forks, pipeline, *overrides, file=ROOT / "configs" / "recipes" / "gsm8k.yaml") == 0
    steps = pipeline.records("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(0 <= step["score/math"] <= 1 for step in steps)
    assert [record["tasks"] for record in pipeline.records("eval")] == [4, 4]
    assert ledger(["verify", str(pipeline.run_folder)]) == 0
