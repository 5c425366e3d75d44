"""The dtype that `auto` stands for, by the machine's devices and CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.configs.runtime import hardware
from slipstream.configs.runtime.hardware import fastest_dtype
from slipstream.configs.schema.run import ModelConfig

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Sets devices and flags of the CPU."""

    def pretend(devices: tuple[str, ...], flags: str) -> None:
        for name in devices:
            (tmp_path / name).touch()
        info = tmp_path / "cpuinfo"
        info.write_text(f"flags\t\t: fpu {flags} sse2\n", encoding="utf-8")
        monkeypatch.setattr(
            hardware, "Path", lambda path: {"/dev": tmp_path, "/proc/cpuinfo": info}.get(path, Path(path))
        )

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fastest_dtype.cache_clear()
    yield pretend
    fastest_dtype.cache_clear()


@pytest.mark.parametrize(
    ("devices", "flags", "expected"),
    [
        ((), "avx512f", "float32"),
        ((), "avx512f avx512_bf16", "float32"),
        ((), "avx512_bf16 amx_bf16 amx_tile", "bfloat16"),
        (("nvidia0", "nvidiactl"), "avx2", "bfloat16"),
        (("kfd",), "avx2", "bfloat16"),
    ],
)
def test_auto_follows_the_machine(machine: Machine, devices: tuple[str, ...], flags: str, expected: str) -> None:
    machine(devices, flags)
    assert ModelConfig(build="text").dtype_here == expected


def test_hidden_gpu_does_not_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(("nvidia0",), "avx2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert fastest_dtype() == "float32"


def test_chosen_dtype_stays() -> None:
    for dtype in ("float32", "bfloat16"):
        assert ModelConfig.model_validate({"build": "text", "dtype": dtype}).dtype_here == dtype
