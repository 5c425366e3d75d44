"""Temporary files of servers and of torchrun, removed once the process that they belong to has ended.

vLLM and SGLang leave files in the folder for temporary files when they are killed, and torchrun leaves its folder in
any case. Their names do not tell to which process they belong.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from slipstream.configs.runtime.errors import SlipstreamError

_PREFIX: Final = "slipstream-server-"
_TORCHRUN_PREFIX: Final = "torchelastic_"
"""Prefix of the folders that torchrun makes for the logs of its ranks."""
_OWNER: Final = "slipstream-owner"
"""File in torchrun's folder that identifies torchrun's process."""


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """Context in which this process and those that it starts put temporary files into a folder of their own.

    This process holds a lock on the folder, which ends with the process: `remove_leftovers` takes the folders of
    killed ones.

    Raises: SlipstreamError when there is no room for it.
    """
    try:
        common = Path(tempfile.gettempdir())
        unnamed = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    except OSError as error:
        raise SlipstreamError(f"no temporary folder: {error}; TMPDIR names another place") from None
    # torch keeps what it has compiled there, for later processes too.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(common / f"torchinductor_{os.geteuid()}"))
    lock = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Named once it is locked: another process would take it for a dead one's.
        folder = unnamed.rename(common / unnamed.name.removeprefix("."))
        folder.chmod(0o711)  # programs that run as another user have folders in it
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        try:
            yield folder
        finally:
            os.environ["TMPDIR"] = tempfile.tempdir = str(common)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def mark_torchrun_folder() -> None:
    """In a rank under torchrun: records torchrun's process in its folder, which `remove_leftovers` then takes later."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    # <folder>/<run>/attempt_<attempt>/<rank>/error.json; another name is that of --log-dir, the user's own.
    folder = next((parent for parent in Path(file).parents if parent.name.startswith(_TORCHRUN_PREFIX)), None)
    identity = _identity(os.getppid())
    if folder is not None and identity is not None:
        with suppress(OSError):  # a full disk; the folder stays then
            (folder / _OWNER).write_text(identity)


def remove_leftovers() -> list[Path]:
    """Removes this user's folders whose processes have ended, and returns them."""
    removed: list[Path] = []
    with suppress(OSError):  # there is none that can be used
        common = Path(tempfile.gettempdir())
        for prefix, remove in ((_PREFIX, _remove_unlocked), (_TORCHRUN_PREFIX, _remove_torchrun)):
            for folder in common.glob(f"{prefix}*"):
                with suppress(OSError):  # gone meanwhile, not readable, or not marked
                    if folder.lstat().st_uid == os.geteuid() and remove(folder):
                        removed.append(folder)
    return removed


def _remove_unlocked(folder: Path) -> bool:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
        return True
    except BlockingIOError:  # its process runs
        return False
    finally:
        os.close(lock)


def _remove_torchrun(folder: Path) -> bool:
    owner = (folder / _OWNER).read_text()
    match owner.split():
        # A process of another namespace, such as another container's, can't be looked up.
        case [process, _, namespace] if namespace == _namespace() and _identity(int(process)) != owner:
            shutil.rmtree(folder)
            return True
    return False  # it runs, is unknown, or the disk was full when it was recorded


def _identity(process: int) -> str | None:
    """A process's id, start time and namespace of ids; None if it has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name comes before and may hold spaces: "pid (name) state parent …"; the start is the 22nd field.
    return f"{process} {stat.rpartition(')')[2].split()[19]} {_namespace()}"


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
