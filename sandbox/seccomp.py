"""The filter of system calls that bubblewrap installs before a program starts, as a program for the kernel's BPF.

It closes what namespaces and resource limits leave open: memory that no limit counts, sockets that no network namespace
confines, parts of the kernel that few programs need and many exploits used. Source: man 2 seccomp; the kernel's tables
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

import errno
import platform
import struct
from functools import lru_cache
from typing import Final, NamedTuple

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_ARCHITECTURES: Final = {"x86_64": (_X86_64, 0), "aarch64": (_AARCH64, 1), "arm64": (_AARCH64, 1)}
"""Audit number, and column of the tables below, by machine."""

_DENIED: Final = {
    # Memory that RLIMIT_AS does not count.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # Large and rarely needed parts of the kernel.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241), "fanotify_init": (300, 262),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "personality": (135, 92),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # The machine.
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116),
}  # fmt: skip
"""Numbers of system calls (x86_64, aarch64) that fail with EPERM."""
_CLONE3: Final = (435, 435)  # its flags lie in memory, out of a filter's sight; C libraries then use clone
_NEWEST: Final = 462  # mseal, of Linux 6.10: what later kernels add is absent
_NAMESPACES: Final = 0x7E020000  # all CLONE_NEW* of clone
_SIGKILL, _AF_UNIX, _RLIMIT_CPU = 9, 1, 0
_INTERNET: Final = (
    2,
    10,
    16,
)  # AF_INET, AF_INET6, AF_NETLINK: in a network namespace of its own they end at its loopback


_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_EPERM, _ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _ABOVE, _ANY_BIT = 0x15, 0x25, 0x45
"""Codes of BPF's instructions; the last three jump."""


class _Test(NamedTuple):
    """A condition on the lower half of one argument."""

    argument: int
    value: int
    jump: int = _EQUAL
    negated: bool = False
    mask: int = 0xFFFFFFFF


class _Rule(NamedTuple):
    """Action on a system call (x86_64, aarch64) that meets all tests."""

    call: tuple[int, int]
    action: int
    tests: tuple[_Test, ...]


_NOT_UNIX: Final = _Test(0, _AF_UNIX, negated=True)
_RULES: Final = (
    _Rule((41, 198), _EPERM, (_NOT_UNIX,)),  # socket: AF_VSOCK reaches a virtual machine's host
    _Rule((53, 199), _EPERM, (_NOT_UNIX,)),  # socketpair
    _Rule((56, 220), _EPERM, (_Test(0, _NAMESPACES, jump=_ANY_BIT),)),  # clone
    _Rule(_CLONE3, _ENOSYS, ()),
    # An end by SIGKILL comes from outside: no program exits with its code, or lowers its limit of CPU seconds.
    _Rule((60, 93), _KILL, (_Test(0, 128 + _SIGKILL, mask=0xFF),)),  # exit
    _Rule((231, 94), _KILL, (_Test(0, 128 + _SIGKILL, mask=0xFF),)),  # exit_group
    _Rule((160, 164), _EPERM, (_Test(0, _RLIMIT_CPU),)),  # setrlimit
    _Rule((302, 261), _EPERM, (_Test(1, _RLIMIT_CPU),)),  # prlimit64
    # The kernel ignores what the first process of a namespace sends itself.
    _Rule((62, 129), _KILL, (_Test(0, 0), _Test(1, _SIGKILL))),  # kill its own group
    _Rule((62, 129), _KILL, (_Test(0, 1), _Test(1, _SIGKILL))),
    _Rule((234, 131), _KILL, (_Test(0, 1), _Test(2, _SIGKILL))),  # tgkill
)


@lru_cache
def syscall_filter(machine: str = platform.machine(), *, loopback: bool = False) -> bytes | None:
    """The filter as bubblewrap's `--seccomp` reads it; None for a machine whose system calls are not known here.

    With `loopback`, sockets of IP are allowed, too.
    """
    if machine not in _ARCHITECTURES:
        return None
    architecture, column = _ARCHITECTURES[machine]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    lines += [(_LOAD, 0, 0, 0), (_ABOVE, 0, 1, _NEWEST), (_RETURN, 0, 0, _ENOSYS)]  # also the calls of x32
    for numbers in _DENIED.values():
        lines += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
    for rule in _RULES:
        is_socket = loopback and rule.tests and rule.tests[0] == _NOT_UNIX
        allowed = tuple(_Test(0, family, negated=True) for family in _INTERNET) if is_socket else ()
        lines += _instructions(rule._replace(tests=(*rule.tests, *allowed)), column)
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def _instructions(rule: _Rule, column: int) -> list[tuple[int, int, int, int]]:
    """Code, jump if true, jump if false and operand of each; the end is reached if the rule does not apply."""
    body = [(_RETURN, 0, 0, rule.action)]
    for test in reversed(rule.tests):
        away = len(body)
        jumps = (away, 0) if test.negated else (0, away)
        body = [(_LOAD, 0, 0, 16 + 8 * test.argument), (_AND, 0, 0, test.mask), (test.jump, *jumps, test.value), *body]
    return [(_LOAD, 0, 0, 0), (_EQUAL, 0, len(body), rule.call[column]), *body]
