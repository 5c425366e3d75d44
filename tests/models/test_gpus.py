"""GPUs that a process may use, and their power."""

import pytest

from slipstream.models import gpus
from slipstream.models.gpus import Gpu, PowerMeter, chosen_gpus, mean_power_w

FOUR = [Gpu(f"GPU-{letter}0", "NVIDIA H100", 80 << 30) for letter in "abcd"]


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ["GPU-a0", "GPU-b0", "GPU-c0", "GPU-d0"]), ("", []), ("-1", []), ("2,0", ["GPU-c0", "GPU-a0"]),
        ("GPU-b", ["GPU-b0"]), (" 1 , GPU-d0", ["GPU-b0", "GPU-d0"]), ("1,9,2", ["GPU-b0"]),
        ("MIG-x", ["MIG-x"]),
    ],
)  # fmt: skip
def test_visible_gpus_are_those_of_cuda(visible: str | None, ids: list[str]) -> None:
    assert [gpu.id for gpu in chosen_gpus(FOUR, visible)] == ids
    assert chosen_gpus([], visible) == []


@pytest.mark.parametrize(
    ("before", "now", "power_w"),
    [((10.0, 5e6), (12.0, 6e6), 500.0), ((10.0, 5e6), (10.0, 6e6), None), ((10.0, 5e6), (12.0, 1e3), None)],
)
def test_power_is_that_of_the_energy_between(
    before: tuple[float, float], now: tuple[float, float], power_w: float | None
) -> None:
    assert mean_power_w(before, now) == power_w


def test_machine_without_a_driver_has_no_gpus() -> None:
    if gpus.driver_version() is not None:
        pytest.skip("this machine has a driver")
    assert gpus.visible_gpus() == []
    assert PowerMeter("GPU-a0").mean_w() is None
