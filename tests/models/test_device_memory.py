"""Memory that processes share on a GPU: calls of the driver, and sums of a version's bytes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.models.device_memory import after, beside, export_memory, gpu_id, pin, sums_by_bucket

CALLS = """
import torch
from slipstream.models import device_memory as memory
torch.cuda.init = torch.cuda.empty_cache = lambda: None
torch.cuda.current_device = lambda: 1
torch.as_tensor = lambda held, device: held  # a build for CPUs takes no address of a GPU
gpu = torch.device("cuda", 1)
exported, handle = memory.export_memory(4096, gpu)
opened = memory.open_memory(handle, 4096, gpu)
print(*(hex(each.__cuda_array_interface__["data"][0]) for each in (exported, opened)))
del opened, exported
host = torch.empty(96, dtype=torch.uint8)
memory.pin(host)
del host
for call in (lambda: memory.export_memory(1 << 30, gpu), lambda: memory.open_memory(bytes(64), 8, gpu)):
    try:
        call()
    except (torch.OutOfMemoryError, memory.DeviceMemoryError) as error:
        print(type(error).__name__, error)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_driver_is_called_by_its_own_conventions(tmp_path: Path) -> None:
    """A library in the driver's place checks the arguments, the current context among them."""
    source = Path(__file__).with_name("driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CALLS], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "0x7f0000000000 0x7f0000000100",
        "OutOfMemoryError cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY",
        "DeviceMemoryError cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE",
    ], done.stderr
    assert done.stderr.splitlines() == [
        "alloc 7f0000001000", "handle 7f0000000000", "open 7f0000000100", "close 7f0000000100", "free 7f0000000000",
        "pin 60", "unpin 0",
    ]  # fmt: skip


READER = """
import sys, torch
from slipstream.models.device_memory import beside, open_memory, sums_by_bucket
gpu, size = torch.device("cuda", 0), int(sys.argv[2])
memory = open_memory(bytes.fromhex(sys.argv[1]), size, gpu)
with beside(gpu):
    copied = torch.empty_like(memory).copy_(memory)
    print(sums_by_bucket(copied, 1 << 20))
"""


@pytest.mark.gpu
def test_processes_read_memory_of_a_gpu() -> None:
    gpu, size = torch.device("cuda", 0), 5 << 20
    memory, handle = export_memory(size, gpu)
    host = torch.randint(0, 256, (size,), dtype=torch.uint8)
    pin(host)
    assert host.is_pinned()
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for _ in range(2):  # readers come and go
        with beside(gpu):
            memory.copy_(host, non_blocking=True)
            event = after(gpu)
        assert event is not None
        event.synchronize()
        command = [sys.executable, "-c", READER, handle.hex(), str(size)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == str(sums_by_bucket(host, 1 << 20)), done.stderr
        host += 1
    assert gpu_id(gpu).startswith("GPU-")


def test_sum_of_a_bucket_reveals_changed_and_exchanged_words() -> None:
    data = torch.randint(0, 256, (1040,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = sums_by_bucket(data, 256)
    assert len(before) == 5
    changed = data.clone()
    changed[700] ^= 1
    exchanged = data.clone()
    exchanged[:16] = data[:16].roll(8)
    for other, bucket in ((changed, 2), (exchanged, 0)):
        assert [
            at for at, (one, two) in enumerate(zip(before, sums_by_bucket(other, 256), strict=True)) if one != two
        ] == [bucket]
    assert sums_by_bucket(data[:0], 256) == []
