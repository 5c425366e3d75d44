"""System calls that the filter denies, by their numbers on this machine, and memory that no limit would count."""

import platform

import pytest

from slipstream.sandbox import SandboxLimits, run_python
from slipstream.sandbox.seccomp import syscall_filter

NUMBERS = {
    "x86_64": {"memfd_create": 319, "shmget": 29, "msgget": 68, "io_uring_setup": 425, "userfaultfd": 323}
    | {"ptrace": 101, "process_vm_readv": 310, "pidfd_getfd": 438, "bpf": 321, "keyctl": 250, "perf_event_open": 298}
    | {"mount": 165, "unshare": 272, "setns": 308, "clone3": 435, "x32 getpid": 0x40000000 + 39},
    "aarch64": {"memfd_create": 279, "shmget": 194, "msgget": 186, "io_uring_setup": 425, "userfaultfd": 282}
    | {"ptrace": 117, "process_vm_readv": 270, "pidfd_getfd": 438, "bpf": 280, "keyctl": 219, "perf_event_open": 241}
    | {"mount": 40, "unshare": 97, "setns": 268, "clone3": 435},
}
CALLS = """
import ctypes, errno, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
for name, number in NUMBERS.items():
    libc.syscall(number, 0, 0, 0, 0, 0, 0)
    print(name, errno.errorcode.get(ctypes.get_errno()))
for family in (socket.AF_INET, socket.AF_VSOCK, socket.AF_PACKET, socket.AF_NETLINK, 38):  # 38: AF_ALG
    try:
        socket.socket(family)
    except PermissionError:
        print(family, "EPERM")
try:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
except ValueError:
    print("limit EPERM")
print(len(socket.socketpair()))
"""
MEMORY = """
import ctypes, mmap, os, socket
libc = ctypes.CDLL(None, use_errno=True)
size, held, shares = 16 << 20, 0, []
for file in range(3, 64):  # what it has inherited
    try:
        held += os.write(file, bytes(8 << 20))
    except OSError:
        pass
for take in (lambda: os.memfd_create("x"), lambda: libc.shmget(0, size, 0o1600)):
    for _ in range(100):
        try:
            file = take()
        except OSError:
            break
        if file < 0:
            break
        held += size
for _ in range(1000):
    try:
        shares.extend(socket.socketpair())
        shares[-1].setblocking(False)
        while True:
            held += shares[-1].send(bytes(1 << 16))
    except BlockingIOError:
        pass
    except OSError:
        break
print(held)
"""
pytestmark = pytest.mark.usefixtures("sandbox")


async def test_dangerous_system_calls_are_denied() -> None:
    numbers = NUMBERS[platform.machine()]
    result = await run_python(CALLS.replace("NUMBERS", repr(numbers)), limits=SandboxLimits(wall_s=60))
    *denied, pair = result.stdout.splitlines()
    absent = {"clone3", "x32 getpid"}
    expected = [f"{name} {'ENOSYS' if name in absent else 'EPERM'}" for name in numbers]
    assert denied == [*expected, "2 EPERM", "40 EPERM", "17 EPERM", "16 EPERM", "38 EPERM", "limit EPERM"], (
        result.stderr
    )
    assert pair == "2"


async def test_memory_beyond_address_space_is_small() -> None:
    result = await run_python(MEMORY, limits=SandboxLimits(wall_s=60, memory_bytes=64 << 20))
    assert 0 < int(result.stdout) < 32 << 20, result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import os\nprocess = os.fork()\nprocess and print(os.waitpid(process, 0)[1] == 0)",
        "from concurrent.futures import ThreadPoolExecutor\nprint(*ThreadPoolExecutor(2).map(bool, [1]))",
        "import asyncio\nprint(asyncio.run(asyncio.wait_for(asyncio.sleep(0, True), 9)))",
        "import subprocess\nprint(subprocess.run(['/bin/sh', '-c', 'exit 3']).returncode == 3)",
    ],
    ids=["fork", "threads", "asyncio", "subprocess"],
)
async def test_ordinary_programs_run(code: str) -> None:
    assert (await run_python(code, limits=SandboxLimits(wall_s=60))).stdout == "True\n"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_is_a_program_of_the_kernel(machine: str) -> None:
    lines = syscall_filter(machine)
    assert lines is not None
    assert len(lines) % 8 == 0
    assert len(lines) // 8 <= 4096  # BPF_MAXINSNS


def test_unknown_machine_has_no_filter() -> None:
    assert syscall_filter("vax") is None
