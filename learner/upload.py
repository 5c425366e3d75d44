"""Copies of checkpoints and of the trained model in an object store, through fsspec; on rank 0.

They lie below `<learner.checkpoint.upload>/<run.name>`. A copy is complete with its last file, MANIFEST.
"""

import contextlib
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from slipstream.configs.paths import RunPaths, checkpoint_name, checkpoint_steps
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.files import file_checksum, fsync_path
from slipstream.configs.runtime.logging import get_log

log = get_log("learner.upload")

MANIFEST: Final = "manifest.json"
CHECKPOINTS: Final = "checkpoints"
MODEL: Final = "model"
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
LINKS: Final = ".upload"
"""Folder of hard links to the files of the checkpoint that is uploaded, which may be removed meanwhile."""


class StoreError(SlipstreamError):
    """An object store can't be read."""


class DamagedError(SlipstreamError):
    """A copy in the store is not what its manifest says."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a copy."""

    size: int
    checksum: str
    """xxh3 (64 bits)."""


Manifest = dict[str, StoredFile]
"""Files of a copy, by their path in it."""


class RunStore:
    """The copies of one run. Methods raise what the store's client raises, which differs from store to store."""

    def __init__(self, url: str, *, run: str) -> None:
        """Raises: ConfigError when there is no client for such a URL."""
        try:
            # Listings would be cached: another process may have written.
            self._files, root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            extra = "; slipstream's extra `s3` has it" if url.startswith("s3:") else ""
            raise ConfigError(f"learner.checkpoint.upload={url}: {error}{extra}") from None
        if isinstance(self._files, LocalFileSystem):
            self._files.auto_mkdir = True
        self._root = f"{root.rstrip('/')}/{run}"
        self.url = f"{url.rstrip('/')}/{run}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        folder = f"{self._root}/{CHECKPOINTS}"
        manifests = self._files.glob(f"{folder}/step-*/{MANIFEST}")
        numbers = [path.split("/")[-2].removeprefix("step-") for path in manifests]
        return sorted(int(number) for number in numbers if number.isdecimal())

    def put(self, folder: Path, name: str, *, done: set[str]) -> None:
        """Copies a folder to `name`, unless that is complete and the same.

        Args:
            done: files that an earlier try has copied; those of this one are added.

        Raises: also OSError, when sizes in the store differ.
        """
        target, files = f"{self._root}/{name}", _manifest_of(folder)
        if self.manifest(name) == files:
            return
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{target}/{MANIFEST}")
        for file in sorted(files.keys() - done):
            self._files.put_file(str(folder / file), f"{target}/{file}")
            done.add(file)
        for file, stored in files.items():
            size = self._files.info(f"{target}/{file}")["size"]
            if size != stored.size:
                done.clear()
                raise OSError(f"{target}/{file} has {size} bytes in the store, and {stored.size} here")
        self._files.pipe_file(f"{target}/{MANIFEST}", msgspec.json.encode(files))

    def manifest(self, name: str) -> Manifest | None:
        """Files of a copy; None if it is not complete."""
        try:
            return msgspec.json.decode(self._files.cat_file(f"{self._root}/{name}/{MANIFEST}"), type=Manifest)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def fetch(self, name: str, folder: Path) -> None:
        """Copies a complete copy into a new folder. Raises: also DamagedError."""
        files = self.manifest(name)
        if not files:
            raise DamagedError(f"{self.url}/{name}/{MANIFEST} can't be read")
        for file, stored in files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._files.get_file(f"{self._root}/{name}/{file}", str(path))
            except FileNotFoundError:
                raise DamagedError(f"{self.url}/{name}/{file} is missing") from None
            if path.stat().st_size != stored.size or file_checksum(path) != stored.checksum:
                raise DamagedError(f"{self.url}/{name}/{file} has another size or checksum than in {MANIFEST}")
            fsync_path(path)

    def prune(self, *, keep: int, step: int) -> None:
        """Removes complete checkpoints of up to `step` steps, but for the latest `keep` of them.

        Later ones may be of steps that were undone, and lie there until the run has come so far again.
        """
        for old in [stored for stored in self.steps() if stored <= step][:-keep]:
            folder = f"{self._root}/{CHECKPOINTS}/{checkpoint_name(old)}"
            self._files.rm_file(f"{folder}/{MANIFEST}")  # first: without it the rest is no checkpoint
            self._files.rm(folder, recursive=True)


def stored_steps(store: RunStore) -> list[int]:
    """Steps of the complete checkpoints in the store, ascending. Raises: StoreError when it can't be read."""
    with _reading(store):
        return store.steps()


def fetch_checkpoint(store: RunStore, paths: RunPaths) -> int | None:
    """Fetches the latest sound checkpoint of the store into a run folder that has none; returns its step.

    Raises: StoreError when the store can't be read, or has none that is sound.
    """
    if checkpoint_steps(paths.checkpoints):
        return None
    steps = stored_steps(store)
    for step in reversed(steps):
        target = paths.checkpoints / checkpoint_name(step)
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with _reading(store):
                store.fetch(f"{CHECKPOINTS}/{target.name}", partial)
        except DamagedError as error:
            log.error("checkpoint in the store not used", step=step, reason=str(error))
            shutil.rmtree(partial, ignore_errors=True)
            continue
        partial.rename(target)
        fsync_path(paths.checkpoints)
        log.info("checkpoint fetched", step=step, source=store.url)
        return step
    if steps:
        raise StoreError(f"{store.url}: none of the checkpoints of steps {steps} can be used; see the log")
    return None


@contextlib.contextmanager
def _reading(store: RunStore) -> Iterator[None]:
    """Context that turns the errors of the store's client into StoreError."""
    try:
        yield
    except DamagedError:
        raise
    except Exception as error:  # each store's client has its own errors
        raise StoreError(
            f"learner.checkpoint.upload: {store.url} can't be read ({type(error).__name__}: {error}); see the address, "
            "and the credentials in this process's environment"
        ) from error


@dataclass
class _Upload:
    name: str
    folder: Path
    step: int | None
    """Of a checkpoint; None: the trained model."""
    done: set[str] = field(default_factory=set)


class Uploader:
    """A thread that copies a run's checkpoints and model to a store, the newest checkpoint first.

    A failed copy is tried again after 1, 2, 4 … 60 s, until a newer checkpoint is there: then it is given up. Nothing
    here delays the training, until `finish`.

    Attributes:
        counts: the number of copies by `completed` and `given_up`.
    """

    def __init__(self, store: RunStore, paths: RunPaths, *, keep: int) -> None:
        """`keep`: number of checkpoints that stay in the store."""
        self._store = store
        self._paths = paths
        self._keep = keep
        self._changed = threading.Condition()
        self._checkpoint: _Upload | None = None
        self._model: _Upload | None = None
        self._running: _Upload | None = None
        self._stopping = False
        self.counts: Counter[str] = Counter(completed=0, given_up=0)
        shutil.rmtree(self._links, ignore_errors=True)
        threading.Thread(target=self._run, name="upload", daemon=True).start()

    def checkpoint(self, step: int) -> None:
        """Copies a complete checkpoint, in place of one that still waits."""
        folder = self._paths.checkpoints / checkpoint_name(step)
        with self._changed:
            if self._checkpoint is not None:
                self._give_up(self._checkpoint, "a newer checkpoint was saved before it was its turn")
            self._checkpoint = _Upload(f"{CHECKPOINTS}/{folder.name}", folder, step)
            self._changed.notify_all()

    def model(self) -> None:
        """Copies the trained model."""
        with self._changed:
            self._model = _Upload(MODEL, self._paths.export, None)
            self._changed.notify_all()

    def finish(self, *, deadline_s: float) -> None:
        """Waits until all is copied, at most `deadline_s`, and ends the thread."""
        with self._changed:
            if left := self._left():
                log.info("waiting for uploads", target=self._store.url, names=[upload.name for upload in left])
            self._changed.wait_for(lambda: not self._left(), timeout=deadline_s)
            self._stopping = True
            for upload in self._left():
                self._give_up(upload, f"it was not done {deadline_s:g} s after the last step")
            self._changed.notify_all()
        shutil.rmtree(self._links, ignore_errors=True)

    @property
    def _links(self) -> Path:
        return self._paths.checkpoints / LINKS

    def _left(self) -> list[_Upload]:
        return [upload for upload in (self._running, self._checkpoint, self._model) if upload is not None]

    def _give_up(self, upload: _Upload, reason: str) -> None:
        self.counts["given_up"] += 1
        log.warning("upload given up", target=f"{self._store.url}/{upload.name}", reason=reason)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._checkpoint or self._model)
                if self._stopping:
                    return
                if self._checkpoint is not None:
                    self._running, self._checkpoint = self._checkpoint, None
                else:
                    self._running, self._model = self._model, None
                upload = self._running
            assert upload is not None, "one waits"
            self._copy(upload)

    def _copy(self, upload: _Upload) -> None:
        """Copies until it succeeds, a newer checkpoint waits, or the uploader stops."""
        source = upload.folder if upload.step is None else self._linked(upload.folder)
        pause_s = FIRST_PAUSE_S
        while True:
            started, reason = time.monotonic(), ""
            try:
                self._store.put(source, upload.name, done=upload.done)
                if upload.step is not None:
                    self._store.prune(keep=self._keep, step=upload.step)
            except Exception as error:  # noqa: BLE001  (each store's client has its own errors)
                reason = f"{type(error).__name__}: {error}"
            with self._changed:
                if self._stopping:  # counted by `finish`
                    return
                if not reason:
                    self.counts["completed"] += 1
                    log.info("uploaded", target=f"{self._store.url}/{upload.name}", s=time.monotonic() - started)
                else:
                    log.warning("upload failed", name=upload.name, reason=reason, again_in_s=pause_s)
                    if not self._changed.wait_for(lambda: self._stopping or self._superseded(upload), timeout=pause_s):
                        pause_s = min(MOST_PAUSE_S, 2 * pause_s)
                        continue
                    if not self._superseded(upload):
                        return
                    self._give_up(upload, f"a newer checkpoint was saved; {reason}")
                self._running = None
                self._changed.notify_all()
            shutil.rmtree(self._links, ignore_errors=True)
            return

    def _superseded(self, upload: _Upload) -> bool:
        return not self._stopping and upload.step is not None and self._checkpoint is not None

    def _linked(self, folder: Path) -> Path:
        """A folder with hard links to a checkpoint's files; the checkpoint itself where there can be none."""
        shutil.rmtree(self._links, ignore_errors=True)
        try:
            shutil.copytree(folder, self._links, copy_function=os.link)
        except OSError:
            return folder
        return self._links


def _manifest_of(folder: Path) -> Manifest:
    """The files of a folder. Raises: OSError."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if not files:
        raise FileNotFoundError(f"{folder} has no files any more")
    return {str(path.relative_to(folder)): StoredFile(path.stat().st_size, file_checksum(path)) for path in files}
