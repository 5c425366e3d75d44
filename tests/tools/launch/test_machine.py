"""The machine's GPUs, as nvidia-smi and CUDA_VISIBLE_DEVICES give them."""

import os

import pytest

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.tools.launch.machine import chosen_gpus, parse_gpus, this_machine

TABLE = "0, NVIDIA H100 80GB HBM3, 81559\n1, NVIDIA A100-SXM4-40GB, 40960\n2, NVIDIA H100 MIG, [N/A]\n"


def test_table_of_gpus_is_read() -> None:
    first, second = parse_gpus(TABLE)
    assert (first.id, first.name, first.memory_bytes) == ("0", "NVIDIA H100 80GB HBM3", 81559 << 20)
    assert (second.id, second.memory_bytes) == ("1", 40 << 30)


@pytest.mark.parametrize(
    ("visible", "ids"),
    [(None, ["0", "1"]), ("1", ["1"]), ("1,0", ["1", "0"]), ("0,7", ["0"]), ("GPU-ab, GPU-cd", ["GPU-ab", "GPU-cd"])],
)
def test_visible_gpus_keep_their_order(visible: str | None, ids: list[str]) -> None:
    gpus = chosen_gpus(parse_gpus(TABLE), visible)
    assert [gpu.id for gpu in gpus] == ids
    assert all(gpu.memory_bytes >= 40 << 30 for gpu in gpus)


def test_visible_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.tools.launch.machine.QUERY", ("printf", TABLE))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.id for gpu in this_machine().gpus] == ["1"]


@pytest.mark.parametrize("query", [("no-such-program",), ("false",)], ids=["absent", "fails"])
def test_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, query: tuple[str, ...]) -> None:
    monkeypatch.setattr("slipstream.tools.launch.machine.QUERY", query)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert this_machine().gpus == ()


def test_driver_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.tools.launch.machine.QUERY", ("sleep", "600"))
    monkeypatch.setattr("slipstream.tools.launch.machine.QUERY_S", 0.05)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SlipstreamError, match="sleep 600"):
        this_machine()


def test_hidden_gpus_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    machine = this_machine()
    assert machine.gpus == ()
    assert machine.threads == 3
    assert set(machine.cores) == os.sched_getaffinity(0)
