"""Speed of each transport from the learner into another process, compared with bare copies of the same bytes."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import xxhash

from slipstream.buffer.wire.weights.protocol import Announce, Form
from slipstream.configs import RunConfig
from slipstream.learner.weights.snapshot import Snapshot, SnapshotTaker
from slipstream.learner.weights.transports.registry import build_transports
from slipstream.tools.bench.figures import Figure, Goal, interleave
from slipstream.tools.bench.weights_learner import build_policy, perturb, shape_of, take, weights_config
from slipstream.tools.bench.weights_worker import MODULE, BareGloo, Broadcast, Ready, Received
from slipstream.tools.bench.workers import Worker, Workers

WHOLE = ("gloo", "shm", "file", "stream")
DELTAS = ("file", "stream")
CHANGED = (0.01, 0.1)
COPY, CHECKSUM, GLOO, SEAL, TAKE = "memory copy", "checksum", "bare gloo", "seal", "take"

Times = dict[str, list[float]]
"""Seconds by label."""


def transfers(workers: Workers, *, size_bytes: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Speed of each transport, its ratio to bare copies of the same bytes; and all times."""
    bench = _TransferBench(workers, size_bytes)
    with bench.receiver() as worker:
        bench.whole_versions(worker, rounds)
        bench.deltas(worker, rounds)
    return _transfer_figures(bench.size_bytes, bench.times), {"size": bench.size_bytes, **bench.times}


class _TransferBench:
    """A policy, its versions, and the process that receives them."""

    def __init__(self, workers: Workers, size_bytes: int) -> None:
        self._workers = workers
        self._config = weights_config(workers.folder, f"transfer-{workers.folder.name}")
        self._bare_config = weights_config(workers.folder, "bare").weights
        self._policy = build_policy(shape_of(size_bytes // 2))
        self._generator = torch.Generator().manual_seed(0)
        self._taker = SnapshotTaker(
            self._policy,
            dtype=torch.bfloat16,
            bucket_bytes=self._config.weights.bucket_bytes,
            device=torch.device("cpu"),
            segments=self._config.run.name,
        )
        self._version = 0
        self.size_bytes = 0
        """Of a version."""
        self.times: Times = defaultdict(list)

    @contextlib.contextmanager
    def receiver(self) -> Iterator[Worker]:
        """The receiving process."""
        configs = [self._config.model_dump_json(), self._bare_config.model_dump_json()]
        with self._workers.worker("receiver", MODULE, "receive", *configs) as worker:
            worker.receive(Ready)
            try:
                yield worker
            finally:
                self._taker.close()

    def whole_versions(self, worker: Worker, rounds: int) -> None:
        """Times of whole versions through every transport, and of the baselines; the first round is a warm-up."""
        source = self._next_version(0.1, defaultdict(list)).data
        self.size_bytes = source.numel()
        target = np.ones_like(source.numpy())
        request = Broadcast(size_bytes=self.size_bytes)
        worker.send(request)
        gloo = BareGloo(self._bare_config, 0, source.clone())
        gloo.run(self.size_bytes)
        worker.receive(Ready)
        with self._senders(WHOLE, worker, full_every=1) as senders:
            for warm_up in (True, *[False] * rounds):
                times: Times = defaultdict(list) if warm_up else self.times
                snapshot = self._next_version(0.1, times)
                with _timed(times, COPY):
                    np.copyto(target, snapshot.data.numpy())
                with _timed(times, CHECKSUM):
                    xxhash.xxh3_64_intdigest(snapshot.data.numpy().data)
                with _timed(times, GLOO):
                    worker.send(request)
                    gloo.run(self.size_bytes)
                    worker.receive(Ready)
                for sender in senders:
                    sender.send(snapshot, times, sender.name)

    def deltas(self, worker: Worker, rounds: int) -> None:
        """Times of versions in which only some numbers changed."""
        for name in DELTAS:
            with self._senders((name,), worker, full_every=1_000_000) as (sender,):
                sender.send(self._next_version(0.1, defaultdict(list)), defaultdict(list), name)
                for share in interleave(rounds, CHANGED):
                    sender.send(self._next_version(share, self.times), self.times, f"{name} {share}")

    @contextlib.contextmanager
    def _senders(self, names: Sequence[str], worker: Worker, *, full_every: int) -> Iterator[list["_Sender"]]:
        with contextlib.ExitStack() as stack:
            senders = []
            for name in names:
                weights = {"transport": name, "full_every": full_every}
                config = weights_config(self._workers.folder, f"{name}-{full_every}", weights=weights)
                senders.append(_Sender(name, config, worker))
                stack.callback(senders[-1].close)
            yield senders

    def _next_version(self, share: float, times: Times) -> Snapshot:
        perturb(self._policy, share, self._generator)
        self._version += 1
        with _timed(times, TAKE):
            snapshot = take(self._taker, self._version)
        with _timed(times, SEAL):
            return snapshot.sealed()


class _Sender:
    """A transport from this process to the receiver."""

    def __init__(self, name: str, config: RunConfig, worker: Worker) -> None:
        self.name = name
        self._worker = worker
        self._deadline_s = config.weights.deadline_s
        self._transports = build_transports(config)
        self._fetched = self._transports.fetched.get(name)
        self._broadcast = self._transports.broadcast
        self._staged = -1
        """The version that the receiver holds."""
        if self._broadcast is not None:
            weights = config.weights
            form = Form(
                transfer=0, epoch=1, transport=name, host=weights.host, port=weights.store_port, rank=1, world=2,
                deadline_s=weights.deadline_s,
            )  # fmt: skip
            worker.send(form)
            self._broadcast.form(1, 2)
            worker.receive(Ready)

    def send(self, snapshot: Snapshot, times: Times, label: str) -> None:
        """Sends a version; adds its times, and the bytes that were sent, to `times`."""
        started = time.perf_counter()
        source = None
        if self._fetched is not None:
            self._fetched.prepare(snapshot)
            source = self._fetched.source(snapshot, self._staged)
            times[f"{label}: prepare"].append(time.perf_counter() - started)
            times[f"{label}: bytes"].append(sum(part.size_bytes for part in source.parts) if source else 0)
        announce = Announce(
            transfer=0, transport=self.name, manifest=snapshot.manifest, deadline_s=self._deadline_s,
            epoch=None if source else 1, source=source,
        )  # fmt: skip
        self._worker.send(announce)
        if self._broadcast is not None:
            self._broadcast.send(snapshot)
        received = self._worker.receive(Received)
        times[label].append(time.perf_counter() - started)
        times[f"{label}: receive"].append(received.seconds)
        self._staged = snapshot.manifest.version

    def close(self) -> None:
        """Frees ports and files."""
        self._transports.close()


def _transfer_figures(size: int, times: Times) -> list[Figure]:
    took = {label: median(each) for label, each in times.items()}

    def speed(name: str, label: str) -> Figure:
        return Figure(name, size / took[label] / 1e9, "GB/s")

    def ratio(label: str, base: str) -> float:
        return median(b / a for a, b in zip(times[label], times[base], strict=True))

    def parts(label: str) -> list[Figure]:
        names = {"prepare": "  learner's part", "receive": "  receiver's part, with the check"}
        return [Figure(names[p], 1000 * took[f"{label}: {p}"], "ms") for p in names if f"{label}: {p}" in took]

    figures = [
        Figure("a version", size / 1e6, "MB"),
        speed("memory copy, one thread", COPY),
        speed("checksum, one thread", CHECKSUM),
        speed("bare gloo", GLOO),
        speed("learner: copy of the fp32 weights as bf16", TAKE),
        speed("learner: checksums", SEAL),
    ]
    for name in WHOLE:
        figures += [speed(f"{name}, whole version", name), *parts(name)]
    figures += [
        Figure("shm / memory copy", ratio("shm", COPY), "", Goal(">=", 0.5)),
        Figure("gloo / bare gloo", ratio("gloo", GLOO), "", Goal(">=", 0.9)),
    ]
    for name in DELTAS:
        for share in CHANGED:
            label = f"{name} {share}"
            sent = Figure("  bytes sent", took[f"{label}: bytes"] / size, "of whole")
            figures += [speed(f"{name}, {share:.0%} changed", label), sent, *parts(label)]
    return figures


@contextlib.contextmanager
def _timed(times: Times, label: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times[label].append(time.perf_counter() - started)
