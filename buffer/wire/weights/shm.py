"""Files in shared memory, which processes of one host map to pass large bytes without a copy."""

import fcntl
import os
import secrets
import socket
from pathlib import Path

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.logging import get_log

log = get_log("wire.segments")

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "slipstream"


class SegmentError(SlipstreamError):
    """There is no shared memory, or not enough."""


class Segment:
    """A file of `size_bytes` in shared memory, removed by `close`, or once its owner is dead by the next that is made.

    Its owner holds a lock on it, which ends with the process, however that ends.
    """

    def __init__(self, run: str, size_bytes: int, *, folder: Path = SHARED_MEMORY) -> None:
        """Frees what the dead have left, too. Raises: SegmentError when the memory can't be had."""
        sweep(folder)
        # Not by the process's number alone: containers that share the memory may count alike.
        self.path = folder / f"{_PREFIX}-{run}-{os.getpid()}-{secrets.token_hex(4)}"
        unnamed = self.path.with_name(f".{self.path.name}")
        try:
            # Named once it is locked: another's sweep would take it for a dead one's.
            self._file = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self.path)
        except OSError as error:
            raise SegmentError(f"no shared memory at {folder}: {error.strerror}") from None
        try:
            # Reserved at once: a page that can't be had later would end the process with SIGBUS.
            os.posix_fallocate(self._file, 0, max(1, size_bytes))
        except OSError as error:
            self.close()
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            raise SegmentError(
                f"{folder} on {socket.gethostname()} can't hold {size_bytes / 1e6:.0f} MB of weights "
                f"({free / 1e6:.0f} MB are free: {error.strerror}); enlarge it (Docker: shm_size)"
            ) from None

    def close(self) -> None:
        """Removes the file; who has mapped it keeps its memory."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def sweep(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Removes the segments whose owners are dead, of whatever run, and returns them."""
    removed = []
    for path in folder.glob(f"{_PREFIX}-*"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(file)
    if removed:
        log.info("shared memory of a dead process freed", segments=[path.name for path in removed])
    return removed


def host_identity() -> str:
    """Identity of the host: equal for two processes that share memory (one machine, no container between them)."""
    if not SHARED_MEMORY.is_dir():
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{SHARED_MEMORY.stat().st_dev}"
