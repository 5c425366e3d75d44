"""Supervised fine-tuning: its loss against a plain computation, on one and two ranks, resumed, exported, recorded."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config, load_config
from slipstream.configs.paths import RunPaths, checkpoint_steps
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.signals import GracefulStop
from slipstream.learner.checkpoint import open_checkpoints
from slipstream.learner.metrics.catalog import CATALOG, Kind, Metric
from slipstream.learner.metrics.file_catalog import FILE_CATALOG, PREFERENCES
from slipstream.learner.metrics.samples import read_samples
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.assemble import _start_events, find_trainer
from slipstream.learner.trainers.setup import RankSetup
from slipstream.learner.trainers.supervised.base import SupervisedTrainer
from slipstream.models.folder import initial_model
from slipstream.models.tokenizer import Tokenizer
from tests.conftest import free_port

ROOT = Path(__file__).parents[4]
STEPS = 5
ROWS, MALFORMED = 30, 2


def write_run(folder: Path, model: Path, **trainer: Any) -> RunConfig:
    """A run on rows of different lengths, of which the third and the last can't be used."""
    lines = [
        json.dumps({"prompt": f"{n * 37 % 1000:03}r" * (1 + n % 3), "completion": str(n) * 2}) for n in range(ROWS)
    ]
    lines[MALFORMED], lines[-1] = '{"prompt": "1"', json.dumps({"prompt": "1" * 60, "completion": "2"})
    (folder / "rows.jsonl").write_text("\n".join(lines))
    config = {
        "run": {"name": "sft", "dir": str(folder)}, "model": {"path": str(model), "dtype": "float32"},
        "learner": {
            "trainer": {
                "name": "sft", "data": str(folder / "rows.jsonl"), "rows_per_step": 8, "max_tokens": 40,
                "validation": {"rows": 6, "every_steps": 2}, "completions": 2, "completion_tokens": 3, **trainer,
            },
            "steps": STEPS, "token_budget": 48, "optimizer": {"lr": 3e-3, "warmup_steps": 1},
            "checkpoint": {"every_steps": 3},
        },
    }  # fmt: skip
    return RunConfig.model_validate(config)


def build(config: RunConfig, world: World, cleanup: ExitStack) -> SupervisedTrainer[Any]:
    """The configured trainer, alone on its rank."""
    config.paths.root.mkdir(parents=True, exist_ok=True)
    open_checkpoints(config.paths.checkpoints, world, keep=2)
    setup = RankSetup(
        config=config, initial_model=initial_model(config), world=world, signals=GracefulStop(), cleanup=cleanup,
        started=0.0, events=_start_events(config.paths, 0.0, cleanup),
    )  # fmt: skip
    trainer = find_trainer(config.learner.trainer).from_setup(setup)
    assert isinstance(trainer, SupervisedTrainer), "a trainer on rows of files"
    assert trainer.reporter is not None
    for tracker in trainer.reporter._trackers:
        cleanup.callback(tracker.close)
    return trainer


def run(config: RunConfig, world: World) -> None:
    with ExitStack() as cleanup:
        build(config, world, cleanup).run()


def named(config: RunConfig, name: str, **learner: Any) -> RunConfig:
    """The run under another name, with other settings of `learner`."""
    tree = config.model_dump(mode="json")
    return RunConfig.model_validate(
        tree | {"run": {**tree["run"], "name": name}, "learner": {**tree["learner"], **learner}}
    )


def records(paths: RunPaths, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in paths.metrics.read_text(encoding="utf-8").splitlines()]
    return [record for record in found if record["kind"] == kind]


def losses(paths: RunPaths) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(paths, "step")}


@pytest.fixture(scope="module")
def trained(digits_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A whole run."""
    config = write_run(tmp_path_factory.mktemp("trained"), digits_model)
    run(config, world)
    return config


def test_loss_and_gradient_equal_plain_computation_in_float64(digits_model: Path, world: World, tmp_path: Path) -> None:
    config = write_run(tmp_path, digits_model)
    with ExitStack() as cleanup:
        trainer = build(config, world, cleanup)
        batch = trainer.next_batch()
        assert len(batch.packed) > 1
        rows = [ref.read() for ref in trainer.order.step(0, rows=8) if ref.index != MALFORMED]
        metrics = trainer.update(batch)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(digits_model, dtype=torch.float64), Tokenizer(digits_model)
    total, terms = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        prompt, answer = tokenizer.encode(row["prompt"]), tokenizer.encode(row["completion"])
        ids = torch.tensor([*prompt, *answer, tokenizer.end_token_id])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        total = total + F.cross_entropy(logits, ids[len(prompt) :], reduction="sum")
        terms += len(answer) + 1
    (total / terms).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert metrics["terms"] == terms
    assert metrics["loss"] == pytest.approx(total.item() / terms, rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_resumed_run_is_equal_to_the_bit(trained: RunConfig, world: World) -> None:
    begun = named(trained, "resumed", steps=STEPS)
    with ExitStack() as cleanup:
        trainer = build(begun, world, cleanup)
        trainer.start(resumed=False)
        for _ in range(4):  # one more than the checkpoint has
            trainer._step()
    assert checkpoint_steps(begun.paths.checkpoints) == [3]
    run(begun, world)
    assert losses(begun.paths) == losses(trained.paths)
    ours, theirs = (load_file(config.paths.export / "model.safetensors") for config in (begun, trained))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    starts = [json.loads(line) for line in begun.paths.events.read_text().splitlines()]
    assert [event["step"] for event in starts if event["kind"] == "restart"] == [3]


def test_two_ranks_equal_one(trained: RunConfig, digits_model: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path, digits_model)
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    code, output = _torchrun(file)
    assert code == 0, output
    assert losses(config.paths) == pytest.approx(losses(trained.paths), rel=1e-4)
    of_both = [{record["step"]: record["loss"] for record in records(each.paths, "eval")} for each in (config, trained)]
    assert of_both[0] == pytest.approx(of_both[1], rel=1e-4)
    rows, of_one = ([step["rows"] for step in records(each.paths, "step")] for each in (config, trained))
    assert rows == of_one
    exported = [load_file(each.paths.export / "model.safetensors") for each in (config, trained)]
    for name, tensor in exported[0].items():
        torch.testing.assert_close(tensor, exported[1][name], rtol=1e-3, atol=2e-4)


def _torchrun(file: Path) -> tuple[int, str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"),
        *("-m", "slipstream.learner.cli", str(file)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    return done.returncode, done.stdout + done.stderr


def test_unusable_rows_are_counted_and_named(trained: RunConfig, world: World) -> None:
    steps = records(trained.paths, "step")
    epoch = [step for step in steps if step["step"] <= 3]  # exactly one, of 24 rows
    assert sum(step.get("rows_dropped/malformed", 0) for step in epoch) == 1
    assert sum(step["rows"] for step in epoch) == ROWS - 6 - 1
    assert {record["rows"] for record in records(trained.paths, "eval")} == {5.0}
    with ExitStack() as cleanup, capture_logs() as logs:
        trainer = build(named(trained, "again"), world, cleanup)
        for refs in (*(trainer.order.step(step, rows=8) for step in range(6)), trainer.held_out):
            trainer.prepare(refs)
    left_out = [(log["row"].rpartition(":")[2], log["reason"]) for log in logs if log["event"] == "row left out"]
    assert left_out == [(str(MALFORMED + 1), "malformed"), (str(ROWS), "too_long")]  # once each, in two epochs
    summary = json.loads(trained.paths.summary.read_text())
    assert summary["rows_dropped"]["malformed"] >= 1


def test_validation_and_completions_are_recorded(trained: RunConfig) -> None:
    measured = records(trained.paths, "eval")
    assert [record["step"] for record in measured] == [0, 2, 4, 5]
    assert measured[-1]["loss"] < measured[0]["loss"]
    samples = read_samples(trained.paths.samples, "eval")
    assert [(sample.number, sample.task) for sample in samples] == [
        (step, task) for step in (0, 2, 4, 5) for task in (0, 1)
    ]
    assert all(len(sample.trajectory.spans) == 1 for sample in samples)


def test_completions_are_those_of_transformers(trained: RunConfig) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(trained.paths.export)
    tokenizer = Tokenizer(trained.paths.export)
    for sample in read_samples(trained.paths.samples, "eval")[-2:]:
        span = sample.trajectory.spans[0]
        ids = memoryview(sample.trajectory.token_ids).cast("i").tolist()
        generated = model.generate(
            torch.tensor([ids[: span.start]]), max_new_tokens=3, do_sample=False, eos_token_id=tokenizer.end_token_id
        )
        assert generated[0, span.start :].tolist() == ids[span.start : span.end]


@pytest.mark.parametrize("kind", CATALOG)
def test_every_metric_is_catalogued(kind: Kind, trained: RunConfig) -> None:
    if kind == "summary":
        found = _keys(json.loads(trained.paths.summary.read_text()))
    else:
        found = {key for record in records(trained.paths, kind) for key in record if key != "kind"}
    known = (*CATALOG[kind], *FILE_CATALOG[kind])
    assert not {key for key in found if not any(metric.matches(key) for metric in known)}
    own = [metric for metric in FILE_CATALOG[kind] if metric not in PREFERENCES]
    names = [Metric((name,), "", "") for metric in own for name in metric.names]
    assert not [metric.names for metric in names if not any(metric.matches(key) for key in found)]


def _keys(values: dict[str, Any], prefix: str = "") -> set[str]:
    found = set[str]()
    for name, value in values.items():
        found |= _keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return found


def test_step_without_usable_rows_leaves_the_model(digits_model: Path, world: World, tmp_path: Path) -> None:
    config = write_run(tmp_path, digits_model, rows_per_step=1)
    with ExitStack() as cleanup:
        trainer = build(config, world, cleanup)
        step = next(step for step in range(ROWS) if trainer.order.step(step, rows=1)[0].index == MALFORMED)
        before = [parameter.detach().clone() for parameter in trainer.policy.model.parameters()]
        metrics = trainer.update(trainer.prepare(trainer.order.step(step, rows=1)))
        assert metrics["rows"] == 0
        assert "loss" not in metrics
        assert all(
            parameter.equal(old) for parameter, old in zip(trainer.policy.model.parameters(), before, strict=True)
        )


def test_source_without_usable_rows_is_refused(digits_model: Path, world: World, tmp_path: Path) -> None:
    config = write_run(tmp_path, digits_model, max_tokens=2)
    with ExitStack() as cleanup, pytest.raises(ConfigError, match=r"learner\.trainer\.data\.0: .*too_long"):
        build(config, world, cleanup)


@pytest.mark.parametrize(
    ("settings", "named_key"),
    [
        (["learner.trainer={name: sft}"], "data"),
        (["learner.trainer={name: sft, data: []}"], "data"),
        (["learner.trainer={name: sft, data: [{path: a, weight: 1}, b]}"], "weight"),
        (["learner.trainer={name: sft, data: a, validation: {}}"], "validation"),
        (["learner.trainer={name: sft, data: a, validation: {rows: 1, data: b}}"], "validation"),
        (["learner.trainer={name: sft, data: a, epochs: 3}"], "epochs"),
        (["learner.trainer={name: sft, data: a}", "learner.steps=5"], "warmup_steps"),
    ],
)
def test_wrong_settings_are_named(settings: Sequence[str], named_key: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {build: digits}", encoding="utf-8")
    with pytest.raises(ConfigError, match=named_key):
        load_config(file, settings)
