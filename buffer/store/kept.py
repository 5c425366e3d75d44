"""Groups of trained steps in the run folder, compressed files that replays read without Redis."""

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, takewhile
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from slipstream.buffer.store.reader import LedgerReader
from slipstream.buffer.store.redis import Scripts, portions
from slipstream.buffer.store.spill import FILE_BYTES, MOST_GROUPS, RETRY_S, TRANSFER_BYTES, SpillFolder
from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.files import DISK_FULL_ERRNOS, PARTIAL
from slipstream.configs.runtime.logging import get_log

log = get_log("buffer.kept")

COMPRESSION_LEVEL = 3
"""Of zstd. Large groups are compressed already (`wire.codec`), which costs little to find out."""
AUTO_BYTES = 1 << 30
"""With `buffer.keep_trained: auto`, nothing is kept where the groups between two checkpoints would take more."""


class KeptGroupsError(SlipstreamError):
    """The kept groups of a step can't be read."""


class KeptGroups:
    """The folder of kept groups: for each step one file or, of many bytes, several.

    Steps are counted from 1, as in `metrics.jsonl`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def steps(self) -> list[int]:
        """Steps that are kept, ascending; none where the folder can't be read."""
        names = (re.fullmatch(r"step-(\d+)-\d+\.zst", path.name) for path in self.root.glob("step-*.zst"))
        return sorted({int(name[1]) for name in names if name})

    def write(self, step: int, part: int, blobs: Mapping[str, bytes], *, last: bool = True) -> int:
        """Writes a part of a step's groups, in place of an earlier one; returns its size in bytes. Raises: OSError.

        Args:
            last: further parts, of an earlier writing, are removed.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        packed = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True).compress(
            msgspec.msgpack.encode(blobs)
        )
        path = self._part(step, part)
        incomplete = path.with_name(f"{PARTIAL}{path.name}")
        try:
            # Without fsync, which would take longer than the rest: a power failure may cost the latest steps' groups,
            # and their files have checksums.
            incomplete.write_bytes(packed)
            incomplete.rename(path)
        finally:
            incomplete.unlink(missing_ok=True)
        if last:
            self.remove(step, from_part=part + 1)
        return len(packed)

    def read(self, step: int) -> dict[str, bytes]:
        """The bytes of a step's groups by id; none if it is not kept. Raises: KeptGroupsError for a damaged file."""
        blobs: dict[str, bytes] = {}
        for path in self._parts(step):
            try:
                packed = zstandard.ZstdDecompressor().decompress(path.read_bytes())
                blobs |= msgspec.msgpack.decode(packed, type=dict[str, bytes])
            except OSError as error:
                raise KeptGroupsError(f"{path} can't be read: {error.strerror}") from error
            except (zstandard.ZstdError, msgspec.DecodeError) as error:
                raise KeptGroupsError(f"{path} is damaged: {error}") from error
        return blobs

    def remove(self, step: int, *, from_part: int = 0) -> None:
        """Removes the files of a step, from a part on. Raises: OSError."""
        for path in reversed([*self._parts(step, from_part)]):
            path.unlink()

    def _part(self, step: int, part: int) -> Path:
        return self.root / f"step-{step:09d}-{part:04d}.zst"

    def _parts(self, step: int, start: int = 0) -> Iterator[Path]:
        """The files of a step. Not by listing the folder, which may hold those of very many steps."""
        return takewhile(Path.exists, (self._part(step, part) for part in count(start)))


class Keeper:
    """Writes the groups of each trained step into the folder, before the ledger forgets them.

    A step of which a group was forgotten before is left out.

    Attributes:
        errors: number of times that a file could not be written, and of steps that were left out.
    """

    def __init__(self, scripts: Scripts, config: RunConfig) -> None:
        buffer, checkpoint = config.buffer, config.learner.checkpoint
        self.errors = 0
        self.folder = KeptGroups(config.paths.kept_groups)
        self._redis = scripts.redis
        self._prefix = scripts.prefix
        self._reader = LedgerReader(scripts.redis, config.run.name, SpillFolder(config.paths.spill))
        self._several_uses = buffer.limiter.max_uses > 1
        self._most_steps = _most_steps(config)
        self._most_step_bytes = AUTO_BYTES / checkpoint.every_steps if buffer.keep_trained == "auto" else float("inf")
        # The latest is written once more: the service may have ended between two of its files.
        self._next = max([step - 1 for step in self.folder.steps()[-1:]], default=0)
        self._retry_at = float("-inf")
        self._failing = False
        self._lock = asyncio.Lock()

    async def undo(self, step: int) -> None:
        """A learner starts after `step` steps: later ones are written again."""
        async with self._lock:  # what is written now counts as kept afterwards
            self._next = min(self._next, step)

    async def keep(self) -> None:
        """Writes the steps that were trained since, and removes those beyond the limit.

        If a file can't be written, it is tried again later.
        """
        async with self._lock:
            if self._most_steps and time.monotonic() >= self._retry_at:
                await self._keep()

    async def _keep(self) -> None:
        known: list[Any] = await self._redis.hmget(f"{self._prefix}:meta", ["next_step", "forgotten_step"])
        done, forgotten = int(known[0] or 0), int(-1 if known[1] is None else known[1])
        self._next = min(self._next, done)  # Redis was flushed, or has lost its latest seconds
        first = int(max(self._next, forgotten + 1, done - self._most_steps))
        if first >= done:
            return
        groups = await self._groups(first, done)
        sizes = await self._sizes([group_id for ids in groups.values() for group_id in ids])

        def size_of(step: int) -> int:
            return sum(sizes[group_id] for group_id in groups[step])

        # Small steps together: each has its price for Redis, and for a thread.
        for steps in portions(range(first, done), size_of, most=MOST_GROUPS, most_bytes=TRANSFER_BYTES):
            if not self._most_steps:
                return
            try:
                await self._write({step + 1: groups[step] for step in steps if groups[step]}, sizes)
            except OSError as error:
                self._write_failed(error)
                return
            self._next = steps[-1] + 1
        if isfinite(self._most_steps):
            await asyncio.to_thread(self._remove_before, done - int(self._most_steps) + 1)

    async def _groups(self, first: int, end: int) -> dict[int, list[str]]:
        """Ids of the groups that the steps from `first` (0-based) to before `end` were trained on, by step."""
        found: dict[bytes, list[int]] = {}
        for state in ("used", "trained", "durable"):
            members: list[Any] = await self._redis.zrangebyscore(
                f"{self._prefix}:{state}", first, "+inf", withscores=True
            )
            found |= {group_id: [int(step)] for group_id, step in members}
        if self._several_uses:
            pipeline = self._redis.pipeline(transaction=False)
            for group_id in found:
                pipeline.lrange(f"{self._prefix}:steps:{group_id.decode()}", 0, -1)
            uses: list[Any] = await pipeline.execute()
            found = {group_id: [*map(int, steps)] for group_id, steps in zip(found, uses, strict=True)}
        groups = defaultdict[int, list[str]](list)
        for group_id, steps in found.items():
            for step in steps:
                if first <= step < end:
                    groups[step].append(group_id.decode())
        return groups

    async def _sizes(self, ids: Sequence[str]) -> dict[str, int]:
        """Bytes of groups. Those in spill files count as large, so that few of them are in memory at once."""
        pipeline = self._redis.pipeline(transaction=False)
        for group_id in ids:
            pipeline.strlen(self._key(group_id))
        sizes: list[Any] = await pipeline.execute()
        return {group_id: size or TRANSFER_BYTES for group_id, size in zip(ids, sizes, strict=True)}

    async def _write(self, steps: Mapping[int, Sequence[str]], sizes: Mapping[str, int]) -> None:
        """Writes the groups of small steps, or of one, but not those of steps of which a group was forgotten.

        Raises: OSError.
        """
        ids = [*dict.fromkeys(chain.from_iterable(steps.values()))]
        parts = [*portions(ids, sizes.__getitem__, most=len(ids), most_bytes=FILE_BYTES)]
        written = Counter[int]()
        for number, some in enumerate(parts):
            blobs = await self._blobs(some, sizes)
            forgotten = set(some) - blobs.keys()
            for step in [step for step, groups in steps.items() if not forgotten.isdisjoint(groups)]:
                await asyncio.to_thread(self.folder.remove, step)
                self.errors += 1
                log.warning(
                    "groups of a step are not kept: some were forgotten before", step=step, groups=len(steps[step])
                )
                steps = {other: groups for other, groups in steps.items() if other != step}
            part = {step: {key: blobs[key] for key in groups if key in blobs} for step, groups in steps.items()}
            written += await asyncio.to_thread(self._write_files, part, number, last=some is parts[-1])
        self._failing = False
        largest = max(written.values(), default=0)
        if largest > self._most_step_bytes:
            for step in steps:
                await asyncio.to_thread(self.folder.remove, step)
            self._most_steps = 0
            log.info(
                "groups of trained steps are not kept: those between two checkpoints would take too much room",
                step_mb=round(largest / 1e6),
                remedy="to replay steps, set buffer.keep_trained to a number of steps, or to all",
            )

    def _write_files(self, steps: Mapping[int, Mapping[str, bytes]], part: int, *, last: bool) -> Counter[int]:
        """Writes a part of each step's groups; returns their sizes. Raises: OSError."""
        return Counter({step: self.folder.write(step, part, blobs, last=last) for step, blobs in steps.items()})

    async def _blobs(self, ids: Sequence[str], sizes: Mapping[str, int]) -> dict[str, bytes]:
        """Bytes of groups, from Redis or spill files; without those that were forgotten."""
        blobs: dict[str, bytes] = {}
        for some in portions(ids, sizes.__getitem__, most=MOST_GROUPS, most_bytes=TRANSFER_BYTES):
            found: list[Any] = await self._redis.mget([self._key(group_id) for group_id in some])
            blobs |= {group_id: blob for group_id, blob in zip(some, found, strict=True) if blob is not None}
        if elsewhere := [group_id for group_id in ids if group_id not in blobs]:
            found = await self._reader.groups(elsewhere)
            blobs |= {record.id: record.blob for record in found if record is not None and record.blob is not None}
        return blobs

    def _remove_before(self, step: int) -> None:
        """Removes the files of steps before this one."""
        for old in self.folder.steps():
            if old < step:
                with suppress(OSError):  # tried again after the next step
                    self.folder.remove(old)

    def _write_failed(self, error: OSError) -> None:
        self.errors += 1
        self._retry_at = time.monotonic() + RETRY_S
        if not self._failing:
            log.warning(
                "groups of trained steps are not kept for now: they can't be written into the run folder",
                folder=str(self.folder.root),
                reason=str(error),
                remedy="make room on its disk, or lower buffer.keep_trained"
                if error.errno in DISK_FULL_ERRNOS
                else "make it writable for this process",
            )
        self._failing = True

    def _key(self, group_id: str) -> str:
        return f"{self._prefix}:group:{group_id}"


def _most_steps(config: RunConfig) -> float:
    """Number of latest steps whose groups are kept."""
    keep, checkpoint = config.buffer.keep_trained, config.learner.checkpoint
    if keep == "auto":  # from the oldest checkpoint on
        return checkpoint.keep * checkpoint.every_steps
    return float("inf") if keep == "all" else keep
