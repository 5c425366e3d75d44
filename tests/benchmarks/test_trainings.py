"""SFT and DPO beside TRL's trainers, in a small measurement: the losses of each step are equal."""

import importlib.util
import sys

import pytest

from benchmarks.trainings import OURS, TRAININGS, TRL
from tests.benchmarks.conftest import Measure, with_goals


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed here")
def test_losses_equal_those_of_trl(measured: Measure) -> None:
    size = "--steps 2 --rows 4 --tokens 8 --micro-batch 2 --rounds 1"
    record = measured("trainings", f"{size} --trl-python {sys.executable}")
    speedups = {f"{training}: a step, TRL / slipstream" for training in TRAININGS}
    assert with_goals(record) == {*speedups, "largest difference of losses"}
    for training in TRAININGS:
        (ours,), (theirs,) = (record["details"][training][loop] for loop in (OURS, TRL))
        assert len(ours["losses"]) == 2
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert min(ours["process_bytes"], theirs["process_bytes"]) > 4 * 34.6e6
