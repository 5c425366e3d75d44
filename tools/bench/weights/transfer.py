"""How fast each transport brings a version into another process, against the same bytes with nothing around it."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from slipstream.buffer.wire.weights.protocol import Announce, Form
from slipstream.configs import RunConfig
from slipstream.learner.weights.snapshot import Snapshot, SnapshotTaker
from slipstream.learner.weights.transports.base import Broadcast
from slipstream.learner.weights.transports.registry import build_transports
from slipstream.tools.bench.figures import Figure, Goal
from slipstream.tools.bench.weights import orders
from slipstream.tools.bench.weights.baselines import BareGloo, MemoryCopy, checksum
from slipstream.tools.bench.weights.crew import Crew, Worker, alternately
from slipstream.tools.bench.weights.policy import build_policy, change, shape_of
from slipstream.tools.bench.weights.settings import DEADLINE_S, settings

WHOLE = ("gloo", "shm", "file", "stream")
DELTAS = ("file", "stream")
CHANGED = (0.01, 0.1)
NEVER = 1_000_000
COPY, HASH, GLOO, SEAL, TAKE = "memory copy", "checksum", "bare gloo", "seal", "take"

Times = dict[str, list[float]]


class Way:
    """A transport from this process to the receiving one."""

    def __init__(self, name: str, config: RunConfig, worker: Worker) -> None:
        self.name = name
        self._worker = worker
        self._transports = build_transports(config)
        self._deadline_s = config.weights.deadline_s
        self._staged = -1
        self._fetched = self._transports.fetched.get(name)
        self._broadcast = self._transports.broadcast
        if self._broadcast is not None:
            self._form(config, self._broadcast)

    def bring(self, snapshot: Snapshot, times: Times, label: str) -> None:
        """Brings a version over, and notes what it took."""
        started = time.perf_counter()
        source = None
        if self._fetched is not None:
            self._fetched.prepare(snapshot)
            source = self._fetched.source(snapshot, self._staged)
        prepared = time.perf_counter()
        self._worker.tell(
            Announce(
                transfer=0,
                transport=self.name,
                manifest=snapshot.manifest,
                deadline_s=self._deadline_s,
                epoch=None if source else 1,
                source=source,
            )
        )
        if self._broadcast is not None:
            self._broadcast.send(snapshot)
        received = self._worker.answer(orders.Received)
        times[label].append(time.perf_counter() - started)
        times[f"{label}: prepare"].append(prepared - started)
        times[f"{label}: move"].append(received.receive_s - received.check_s)
        times[f"{label}: check"].append(received.check_s)
        times[f"{label}: cpu"].append(received.cpu_s)
        self._staged = snapshot.manifest.version
        if source is not None:
            times[f"{label}: bytes"].append(sum(part.size_bytes for part in source.parts))

    def close(self) -> None:
        """Frees ports and files."""
        self._transports.close()

    def _form(self, config: RunConfig, broadcast: Broadcast) -> None:
        weights = config.weights
        self._worker.tell(
            Form(
                transfer=0,
                epoch=1,
                transport=self.name,
                host=weights.host,
                port=weights.store_port,
                rank=1,
                world=2,
                deadline_s=DEADLINE_S,
            )
        )
        broadcast.form(1, 2)
        self._worker.answer(orders.Here)


class Transfers:
    """A policy, its versions, and the process that they are brought to."""

    def __init__(self, crew: Crew, *, size_bytes: int) -> None:
        self._crew = crew
        self._config = settings(crew.folder, f"transfer-{crew.folder.name}")
        self._model = build_policy(shape_of(size_bytes // 2))
        self._generator = torch.Generator().manual_seed(0)
        self._taker = SnapshotTaker(
            self._model,
            dtype=torch.bfloat16,
            bucket_bytes=self._config.weights.bucket_bytes,
            device=torch.device("cpu"),
            segments=self._config.run.name,
        )
        self._version = 0
        self.times: Times = defaultdict(list)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[Worker]:
        """The receiving process."""
        with self._crew.worker("receiver", "receiver", self._config.model_dump_json()) as worker:
            worker.answer(orders.Here)
            try:
                yield worker
            finally:
                self._taker.close()

    def whole(self, worker: Worker, rounds: int) -> int:
        """Notes every transport's time and the baselines'; returns a version's size in bytes."""
        bare = settings(self._crew.folder, "bare")
        snapshot = self._next(0.1)
        size = snapshot.data.numel()
        order = orders.Broadcast(config=bare.model_dump_json(), size_bytes=size)
        worker.tell(order)
        gloo = BareGloo(bare, 0, snapshot.data.clone())
        gloo.run(size)
        worker.answer(orders.Here)
        copy = MemoryCopy(snapshot.data)
        with self._ways(WHOLE, worker, full_every=1) as ways:
            for warm_up in (True, *[False] * rounds):
                times: Times = defaultdict(list) if warm_up else self.times
                snapshot = self._next(0.1, times)
                with _timed(times, COPY):
                    copy.run()
                with _timed(times, HASH):
                    checksum(snapshot.data)
                worker.tell(order)
                with _timed(times, GLOO):
                    gloo.run(size)
                    worker.answer(orders.Here)
                for way in ways:
                    way.bring(snapshot, times, way.name)
        return size

    def deltas(self, worker: Worker, rounds: int) -> None:
        """Notes the times of versions in which only some numbers changed."""
        for name in DELTAS:
            with self._ways((name,), worker, full_every=NEVER) as (way,):
                way.bring(self._next(0.1), defaultdict(list), name)
                for share in alternately(rounds, [str(share) for share in CHANGED]):
                    way.bring(self._next(float(share)), self.times, f"{name} {share}")

    @contextlib.contextmanager
    def _ways(self, names: Sequence[str], worker: Worker, *, full_every: int) -> Iterator[list[Way]]:
        with contextlib.ExitStack() as stack:
            ways = []
            for name in names:
                sections = {"transport": name, "full_every": full_every}
                config = settings(self._crew.folder, f"{name}-{full_every}", weights=sections)
                ways.append(Way(name, config, worker))
                stack.callback(ways[-1].close)
            yield ways

    def _next(self, share: float, times: Times | None = None) -> Snapshot:
        times = defaultdict(list) if times is None else times
        change(self._model, share, self._generator)
        self._version += 1
        with _timed(times, TAKE):
            taken = self._taker.take(self._version, evaluate=False, keep=True)
        assert taken is not None, "kept"
        with _timed(times, SEAL):
            return taken.sealed()


def transfers(crew: Crew, *, size_mb: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Speed of every transport, and its ratio to what it is measured against; and all times in seconds."""
    torch.set_num_threads(1)
    measured = Transfers(crew, size_bytes=size_mb * 1_000_000)
    with measured.receiving() as worker:
        size = measured.whole(worker, rounds)
        measured.deltas(worker, rounds)
    times = measured.times
    return _figures(size, {name: median(each) for name, each in times.items()}, times), {"size": size, **times}


def _figures(size: int, took: dict[str, float], times: Times) -> list[Figure]:
    def speed(name: str, label: str) -> Figure:
        return Figure(name, size / took[label] / 1e9, "GB/s")

    def ratio(label: str, base: str) -> float:
        return median(b / a for a, b in zip(times[label], times[base], strict=True))

    figures = [
        Figure("a version", size / 1e6, "MB"),
        speed("memory copy, one thread", COPY),
        speed("checksum, one thread", HASH),
        speed("bare gloo", GLOO),
        speed("learner: copy of the fp32 weights as bf16", TAKE),
        speed("learner: checksums", SEAL),
    ]
    for name in WHOLE:
        figures += [speed(f"{name}, whole version", name), *_parts(name, took)]
    figures += [
        Figure("shm / memory copy", ratio("shm", COPY), "", Goal(">=", 0.5)),
        Figure("gloo / bare gloo", ratio("gloo", GLOO), "", Goal(">=", 0.9)),
    ]
    for name in DELTAS:
        for share in CHANGED:
            label = f"{name} {share}"
            figures += [
                speed(f"{name}, {share:.0%} changed", label),
                Figure("  bytes sent", took[f"{label}: bytes"] / size, "of whole"),
                *_parts(label, took),
            ]
    return figures


def _parts(label: str, took: dict[str, float]) -> list[Figure]:
    prepared = [Figure("  learner's part", 1000 * took[f"{label}: prepare"], "ms")] if f"{label}: bytes" in took else []
    return [
        *prepared,
        Figure("  moved", 1000 * took[f"{label}: move"], "ms"),
        Figure("  checked", 1000 * took[f"{label}: check"], "ms"),
        Figure("  receiver's CPU time", 1000 * took[f"{label}: cpu"], "ms"),
    ]


@contextlib.contextmanager
def _timed(times: Times, name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times[name].append(time.perf_counter() - started)
