"""Offline distillation: its loss against a plain computation, a run towards the teacher, refusals."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import ConfigError
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.supervised.distill import DistillTrainer
from slipstream.models.digits import build_digits_model
from tests.learner.recorded import vivid
from tests.learner.trainers.supervised.test_sft import build, records, write_run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "digits"
    build_digits_model(folder, seed=2)
    vivid(folder)
    return folder


def distilling(folder: Path, model: Path, *, streams: dict[str, float], **distill: Any) -> RunConfig:
    config = write_run(folder, model, name="distill", completions=0)
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree["learner"] |= {"distill": distill, "streams": streams}
    return RunConfig.model_validate(tree)


def test_loss_is_that_of_plain_models(digits_model: Path, teacher: Path, world: World, tmp_path: Path) -> None:
    streams = {"ref_kl": 2.0, "ce": 0.5}
    config = distilling(tmp_path, digits_model, streams=streams, teachers=[{"model": str(teacher)}], loss="forward_kl")
    own, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (digits_model, teacher))
    with ExitStack() as cleanup:
        trainer = build(config, world, cleanup)
        batch = trainer.next_batch()
        kl = cross_entropy = 0.0
        for example in (example for packed in batch.packed for example in packed.examples):
            for sequence in example.sequences:
                ids = torch.from_numpy(sequence.token_ids.astype("int64"))
                targets = torch.from_numpy(sequence.action_mask.astype(bool))[1:]
                with torch.no_grad():
                    p, q = (
                        model(input_ids=ids[None]).logits[0, :-1][targets].log_softmax(-1) for model in (other, own)
                    )
                kl += float((p.exp() * (p - q)).sum())
                cross_entropy -= float(q.gather(1, ids[1:][targets][:, None]).sum())
        terms = sum(trainer.terms(packed) for packed in batch.packed)
        figures = trainer.update(batch)
    assert figures["distill/kl"] == pytest.approx(kl / terms, rel=1e-4)
    assert figures["ce_loss"] == pytest.approx(cross_entropy / terms, rel=1e-4)
    assert figures["loss"] == pytest.approx((2 * kl + 0.5 * cross_entropy) / terms, rel=1e-4)


def test_run_comes_closer_to_its_teacher(digits_model: Path, teacher: Path, world: World, tmp_path: Path) -> None:
    config = distilling(tmp_path, digits_model, streams={"ref_kl": 1.0}, teachers=[{"model": str(teacher)}])
    with ExitStack() as cleanup:
        build(config, world, cleanup).run()
    validated = [record["distill/kl"] for record in records(config.paths, "eval")]
    assert validated[-1] < validated[0]
    assert config.paths.summary.is_file()


@pytest.mark.parametrize(
    ("streams", "distill", "named"),
    [
        ({"ref_kl": 1.0}, {"teachers": [{}]}, r"learner\.distill\.teachers"),
        ({"ref_kl": 1.0}, {"teachers": [{"model": "m"}], "loss": "advantage"}, r"learner\.distill\.loss"),
        ({}, {"teachers": [{"model": "m"}]}, r"learner\.streams\.ref_kl"),
    ],
)
def test_what_rows_can_not_do_is_refused(
    digits_model: Path, tmp_path: Path, streams: dict[str, float], distill: dict[str, Any], named: str
) -> None:
    config = distilling(tmp_path, digits_model, streams=streams, **distill)
    with pytest.raises(ConfigError, match=named):
        raise ConfigError(DistillTrainer.problems(config))
