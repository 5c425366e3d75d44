"""The recipes over rows of files: first steps, with a tiny model in the place of one of a hub."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from slipstream.configs.load import load_config
from slipstream.configs.schema.run import EnvConfig
from slipstream.env.base import Split
from slipstream.env.registry import build_env
from slipstream.rewards.functions.code import Code
from slipstream.tools.cli import ledger
from tests.pipeline.conftest import ROOT, Pipeline
from tests.pipeline.runs import train
from tests.rewards.episodes import episode
from tests.rollout_servers.rollouts.chat import build_chat_model

STEPS = 2
SPLITS: tuple[Split, ...] = ("train", "eval")


def write_gsm8k(folder: Path) -> None:
    """Rows in verl's shape."""
    import pyarrow
    from pyarrow import parquet

    for split, numbers in (("train", range(16)), ("test", range(16, 20))):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"What is the result of adding {number} and 2?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(number + 2)},
                "extra_info": {"split": split, "index": number},
            }
            for number in numbers
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def write_mbpp(folder: Path) -> None:
    """A source with the columns of MBPP."""
    for split, numbers in (("train", range(8)), ("test", range(8, 12))):
        tasks = [
            {
                "task_id": number,
                "text": f"Write a function to add {number} to a number.",
                "code": f"def add_{number}(x):\r\n  return x + {number}",
                "test_list": [f"assert add_{number}(1) == {number + 1}", f"assert add_{number}(-1) == {number - 1}"],
                "test_setup_code": "",
            }
            for number in numbers
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def make_rows(name: str, folder: Path, *options: str) -> None:
    """Runs the script of the examples."""
    script = [sys.executable, str(ROOT / "examples" / "rows" / "make_rows.py"), name, str(folder), *options]
    subprocess.run(script, check=True, timeout=120, env={**os.environ, "HF_HOME": str(folder / "hub")})


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows of a recipe."""
    folder = tmp_path_factory.mktemp("rows")
    if request.param in ("constants", "mbpp"):
        request.getfixturevalue("sandbox")  # of their reward
    if request.param == "gsm8k":
        write_gsm8k(folder)
    elif request.param == "mbpp":
        source = tmp_path_factory.mktemp("source")
        write_mbpp(source)
        make_rows("mbpp", folder, "--source", str(source))
    else:
        make_rows(request.param, folder)
    return folder


@pytest.mark.parametrize(
    ("rows", "recipe", "score"),
    [
        ("gsm8k", "gsm8k", "math"),
        ("arithmetic", "smollm2_arithmetic", "math"),
        ("constants", "constants", "code"),
        ("mbpp", "mbpp", "code"),
    ],
    indirect=["rows"],
)
def test_first_steps(
    rows: Path, recipe: str, score: str, pipeline: Pipeline, forks: ForkServerContext, tmp_path: Path
) -> None:
    file = ROOT / "configs" / "recipes" / f"{recipe}.yaml"
    is_built = load_config(file).model.build is not None
    model = () if is_built else (f"model.path={build_chat_model(tmp_path / 'model', 'chatml')}",)
    options = f"{{path: {rows / 'train.parquet'}, eval_path: {rows / 'test.parquet'}}}"
    overrides = (
        *model, "model.dtype=float32", f"env.options={options}", "eval.tasks=4",
        "rollout.sampling.max_tokens=16", "rollout.engine.max_model_len=256", "rollout.engine.max_sequences=64",
        "rollout.engine.name=hf", "rollout.groups_in_flight=8",
        "scoring.workers=1", f"learner.steps={STEPS}", "learner.optimizer.warmup_steps=0", "learner.groups_per_step=4",
    )  # fmt: skip
    assert train(forks, pipeline, *overrides, file=file) == 0
    steps = pipeline.records("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(0 <= step[f"score/{score}"] <= 1 for step in steps)
    assert [record["tasks"] for record in pipeline.records("eval")] == [4, 4]
    assert ledger(["verify", str(pipeline.run_folder)]) == 0


@pytest.mark.parametrize("rows", ["arithmetic"], indirect=True)
def test_arithmetic_rows_are_right(rows: Path) -> None:
    env = build_env(rows_config(rows))
    assert [env.size(split) for split in SPLITS] == [792, 200]
    for index in range(200):
        task = env.task("eval", index)
        assert not isinstance(task.prompt, str)
        expression = str(task.prompt[-1]["content"]).removeprefix("What is ").partition("?")[0]
        assert str(eval(expression)) == task.reference


@pytest.mark.parametrize("rows", ["largest"], indirect=True)
def test_largest_rows_are_right(rows: Path) -> None:
    from pyarrow import parquet

    splits = {path.stem: parquet.read_table(path).to_pylist() for path in rows.glob("*.parquet")}
    prompts = {split: {row["prompt"] for row in splits[split]} for split in ("demonstrations", "prompts", "test")}
    assert {split: len(each) for split, each in prompts.items()} == {"demonstrations": 64, "prompts": 1000, "test": 200}
    assert len(set().union(*prompts.values())) == 1264  # none is in two of them
    assert {row["prompt"] for row in splits["pairs"]} == prompts["prompts"]
    for row in itertools.chain.from_iterable(splits.values()):
        right = str(max(map(int, row["prompt"].removeprefix("max(").removesuffix(")=").split(","))))
        assert row.get("completion", row.get("chosen")) == right != row.get("rejected")


@pytest.mark.parametrize("rows", ["constants"], indirect=True)
def test_constants_pass_their_tests(rows: Path) -> None:
    env = build_env(rows_config(rows))
    assert [env.size(split) for split in SPLITS] == [800, 100]
    reward = Code(**load_config(ROOT / "configs" / "recipes" / "constants.yaml").rewards[0].options)
    for index in range(4):
        task = env.task("eval", index)
        for answer, value in ((task.reference, 1.0), (f"0+{task.reference}", 1.0), (f"1+{task.reference}", 0.0)):
            assert asyncio.run(reward(episode(answer, info=task.info))).value == value


@pytest.mark.parametrize("rows", ["mbpp"], indirect=True)
def test_right_program_passes_tests_of_mbpp_rows(rows: Path) -> None:
    task = build_env(rows_config(rows)).task("eval", 0)
    assert "assert add_8(1) == 9" in str(task.prompt)
    for added, value in ((8, 1.0), (9, 0.0)):
        answer = f"```python\ndef add_8(x):\n    return x + {added}\n```"
        scored = asyncio.run(Code()(episode(answer, info=task.info)))
        assert scored.value == value
    assert asyncio.run(Code()(episode(task.reference, info=task.info))).value == 1.0


def rows_config(rows: Path) -> EnvConfig:
    """The env of a recipe with these rows."""
    return EnvConfig(
        name="rows", options={"path": str(rows / "train.parquet"), "eval_path": str(rows / "test.parquet")}
    )
