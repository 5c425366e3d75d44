"""What a worker process of vLLM has before it computes."""

import subprocess
import sys

import pytest
import torch

ASKS_LINUX = """
import ctypes
import slipstream.rollout_servers.engines.vllm.worker
arch_prctl, xcomp_perm, tile_data, granted = 158, 0x1022, 18, ctypes.c_uint64()
assert ctypes.CDLL(None).syscall(arch_prctl, xcomp_perm, ctypes.byref(granted)) == 0
print("granted" if granted.value >> tile_data & 1 else "withheld")
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_linux_lets_a_worker_compute_with_amx_else_attention_in_bfloat16_kills_it() -> None:
    told = subprocess.run([sys.executable, "-c", ASKS_LINUX], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.splitlines()[-1] == "granted"
