"""Spill files: bytes of trained groups in the run folder, so that Redis holds those of the pipeline only.

A file is on disk, its folder's entry included, before a script replaces the bytes in Redis by their location. Groups of
undone steps are read back when they are leased again. A file without a group that refers to it is removed if this
ledger had it written, and otherwise moved aside: Redis may have been flushed, restored from older data, or be another.
"""

import asyncio
import contextlib
import re
import secrets
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.buffer.store.redis import Scripts, portions, set_all
from slipstream.buffer.store.types import SPILL_BYTES
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.files import DISK_FULL_ERRNOS, PARTIAL, fsync_path, write_atomically
from slipstream.configs.runtime.logging import get_log

log = get_log("buffer.spill")

FILE_BYTES = 64 << 20
"""Size of a file, which is in the service's memory while it is written; a single group may be larger."""
TRANSFER_BYTES = 8 << 20
"""Bytes that are read from Redis or stored at once, because both block it."""
MOST_GROUPS = 1000
"""Groups of a file, and of a transfer: scripts block Redis."""
UNREFERENCED_S = 60.0
"""Age at which an unreferenced file is removed or moved: a Redis that loses its latest seconds refers to it again."""
ASIDE = ".aside"
"""Suffix of the folder beside the spill files, of which nothing is removed."""
RETRY_S = 60.0
"""Pause after a file that could not be written."""
LOCATION = re.compile(r"([\w-]+):(\d+):(\d+):([0-9a-f]+)", re.ASCII)


class SpillError(SlipstreamError):
    """A group's bytes can't be read from its spill file."""


@dataclass(frozen=True)
class Location:
    """The place of a group's bytes."""

    file: str
    offset: int
    size: int
    checksum: int
    """CRC-32."""

    def __str__(self) -> str:
        """The form in Redis."""
        return f"{self.file}:{self.offset}:{self.size}:{self.checksum:x}"

    @classmethod
    def parse(cls, text: str) -> "Location":
        """Parses the form in Redis. Raises: SpillError."""
        match = LOCATION.fullmatch(text)
        if match is None:
            raise SpillError(f"{text!r} is no location in a spill file")
        return cls(match[1], int(match[2]), int(match[3]), int(match[4], 16))


class SpillFolder:
    """The spill files of one run.

    Attributes:
        aside: folder for files that the ledger does not know.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.aside = root.with_name(root.name + ASIDE)

    def write(self, name: str, blobs: Mapping[str, bytes]) -> dict[str, Location]:
        """Writes a new file that survives a power failure; returns the location of each group. Raises: OSError."""
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            fsync_path(self.root.parent)
        offset, locations = 0, {}
        for group_id, blob in blobs.items():
            locations[group_id] = Location(name, offset, len(blob), zlib.crc32(blob))
            offset += len(blob)
        write_atomically(self.root / name, blobs.values())
        return locations

    def read(self, location: Location) -> bytes:
        """A group's bytes. Raises: SpillError when its file is missing or damaged."""
        path = self.root / location.file
        try:
            with path.open("rb") as file:
                file.seek(location.offset)
                blob = file.read(location.size)
        except OSError as error:
            raise SpillError(f"{path} can't be read: {error.strerror}") from error
        if len(blob) != location.size or zlib.crc32(blob) != location.checksum:
            raise SpillError(f"{path} is damaged: the {location.size} bytes from {location.offset} are others")
        return blob

    def remove(self, name: str) -> None:
        """Removes a file. Raises: OSError."""
        (self.root / name).unlink(missing_ok=True)

    def move_aside(self, name: str) -> int:
        """Moves a file aside; returns its size. Raises: OSError."""
        self.aside.mkdir(exist_ok=True)
        return (self.root / name).rename(self.aside / name).stat().st_size

    def files(self) -> set[str]:
        """Names of all files, incomplete ones included; none where the folder can't be read."""
        try:
            return {path.name for path in self.root.iterdir()}
        except OSError:
            return set()


class Spiller:
    """Moves bytes of trained groups from Redis into spill files, and back.

    One task may call `restore`, and one the other methods.

    Attributes:
        errors: number of files that could not be written, and of groups that could not be read.
    """

    def __init__(self, scripts: Scripts, folder: SpillFolder, *, spill_bytes: int = SPILL_BYTES) -> None:
        """Args:
        spill_bytes: as in the ledger's rules.
        """
        self.errors = 0
        self._scripts = scripts
        self._redis = scripts.redis
        self._folder = folder
        self._spill_bytes = spill_bytes
        self._retry_at = float("-inf")
        self._failing = False
        self._unreferenced_since: dict[str, float] = {}
        self._missing: set[str] = set()

    async def spill(self) -> None:
        """Moves the bytes of all groups that were trained since into files; if one can't be written, they stay."""
        if time.monotonic() < self._retry_at:
            return
        flat = await self._scripts.call("to_spill")
        sizes = {group_id.decode(): size for group_id, size in zip(flat[::2], flat[1::2], strict=True)}
        for ids in portions(sorted(sizes, key=int), sizes.__getitem__, most=MOST_GROUPS, most_bytes=FILE_BYTES):
            blobs: dict[str, bytes] = {}
            for some in portions(ids, sizes.__getitem__, most=MOST_GROUPS, most_bytes=TRANSFER_BYTES):
                found: list[Any] = await self._redis.mget([self._group_key(group_id) for group_id in some])
                blobs |= {group_id: blob for group_id, blob in zip(some, found, strict=True) if blob is not None}
            # Random: after a loss of Redis's latest seconds, an old location must not fit a new file.
            name = secrets.token_hex(8)
            await self._scripts.call("spill_file", file=name)
            try:
                locations = await asyncio.to_thread(self._folder.write, name, blobs)
            except OSError as error:
                self._write_failed(error)
                return
            self._failing = False
            await self._scripts.call("spill", locations={group_id: str(at) for group_id, at in locations.items()})

    async def restore(self, ids: Sequence[str]) -> bool:
        """Reads bytes back into Redis; groups whose file is missing or damaged expire (bytes_lost). Returns True.

        Raises: OutOfMemoryError when Redis has no room for them; those that are restored stay so.
        """
        found: list[Any] = await self._redis.hmget(f"{self._scripts.prefix}:spilled", list(ids))
        locations = {group_id: at.decode() for group_id, at in zip(ids, found, strict=True) if at is not None}
        for portion in portions(
            locations, lambda group_id: _size(locations[group_id]), most=MOST_GROUPS, most_bytes=TRANSFER_BYTES
        ):
            blobs, errors = await asyncio.to_thread(self._read, {group_id: locations[group_id] for group_id in portion})
            await set_all(self._redis, {self._group_key(group_id): blob for group_id, blob in blobs.items()})
            await self._scripts.call("restored", ids=list(blobs))
            if errors:
                self.errors += len(errors)
                log.error(
                    "spilled groups are lost and expire: their files are missing or damaged",
                    groups=len(errors),
                    first=next(iter(errors)),
                    reason=next(iter(errors.values())),
                )
                await self._scripts.call("bytes_lost", ids=list(errors), spill_bytes=self._spill_bytes)
        return True

    async def remove_unreferenced(self) -> int:
        """Removes files that no group has referred to for UNREFERENCED_S, and logs missing ones.

        Files that the ledger does not know are moved aside. Returns: the number of removed files.
        """
        files = await asyncio.to_thread(self._folder.files)
        locations = self._redis.hscan_iter(f"{self._scripts.prefix}:spilled", count=1000)
        referenced = {location.decode().partition(":")[0] async for _, location in locations}
        missing = referenced - files
        if missing - self._missing:
            log.error(
                "spill files are missing: groups of theirs expire if their steps are undone",
                files=len(missing),
                folder=str(self._folder.root),
                remedy=f"move them back from {self._folder.aside} if they are there",
            )
        self._missing = missing
        now = time.monotonic()
        self._unreferenced_since = {name: self._unreferenced_since.get(name, now) for name in files - referenced}
        return await self._clear({name for name, at in self._unreferenced_since.items() if now - at >= UNREFERENCED_S})

    async def _clear(self, names: Collection[str]) -> int:
        """Removes or moves files without a group; returns the number of removed ones."""
        registered = f"{self._scripts.prefix}:spill_files"
        removed, moved_bytes = list[str](), list[int]()
        for name in names:
            own = name.startswith(PARTIAL) or await self._redis.sismember(registered, name)
            with contextlib.suppress(OSError):  # tried again next time
                if own:
                    await asyncio.to_thread(self._folder.remove, name)
                    removed.append(name)
                else:
                    moved_bytes.append(await asyncio.to_thread(self._folder.move_aside, name))
        if removed:
            await self._redis.srem(registered, *removed)
        if moved_bytes:
            log.error(
                "SPILL FILES MOVED ASIDE, which the ledger does not know: Redis was flushed, restored from older data, "
                "or is another one",
                files=len(moved_bytes),
                size_bytes=sum(moved_bytes),
                folder=str(self._folder.aside),
                remedy="if their groups are still needed, restore the Redis data that refers to them and move them "
                f"back to {self._folder.root}; otherwise remove the folder: nothing else does",
            )
        return len(removed)

    def _group_key(self, group_id: str) -> str:
        return f"{self._scripts.prefix}:group:{group_id}"

    def _read(self, locations: Mapping[str, str]) -> tuple[dict[str, bytes], dict[str, str]]:
        """The groups' bytes, and the errors of the others."""
        blobs, errors = {}, {}
        for group_id, location in locations.items():
            try:
                blobs[group_id] = self._folder.read(Location.parse(location))
            except SpillError as error:
                errors[group_id] = str(error)
        return blobs, errors

    def _write_failed(self, error: OSError) -> None:
        self.errors += 1
        self._retry_at = time.monotonic() + RETRY_S
        if not self._failing:
            full = error.errno in DISK_FULL_ERRNOS
            log.warning(
                "bytes of trained groups stay in Redis: they can't be written into the run folder",
                folder=str(self._folder.root),
                reason=str(error),
                remedy="make room on its disk" if full else "make it writable for this process",
            )
        self._failing = True


def _size(location: str) -> int:
    match = LOCATION.fullmatch(location)
    return int(match[3]) if match else 0
