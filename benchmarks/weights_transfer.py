"""Speed of each transport from the learner into another process, compared with bare copies of the same bytes."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure, Figures, Goal, interleave
from benchmarks.weights_learner import build_policy, perturb, shape_of, take, weights_config
from benchmarks.weights_worker import MODULE, BareGloo
from benchmarks.workers import Worker, Workers, free_port
from slipstream.buffer.wire.codec import encode
from slipstream.buffer.wire.weights.protocol import Announce, Form
from slipstream.configs.schema.weights import WeightsConfig
from slipstream.learner.weights.snapshot import Snapshot, SnapshotTaker
from slipstream.learner.weights.transports import Transports, build_transports

WHOLE = ("gloo", "shm", "file", "stream")
DELTAS = ("file", "stream")
CHANGED = (0.01, 0.1)
COPY, GLOO = "memory copy", "bare gloo"

Times = dict[str, list[float]]
"""Seconds by label."""


def transfers(workers: Workers, figures: Figures, *, size_bytes: int, rounds: int) -> dict[str, Any]:
    """Shows the speed of each transport and its ratio to bare copies of the same bytes. Returns times in seconds."""
    config = weights_config(workers.folder, f"transfer-{workers.folder.name}")
    port, bucket_bytes = free_port(), config.weights.bucket_bytes
    times: Times = defaultdict(list)
    with (
        closing(_Versions(config.run.name, size_bytes, bucket_bytes=bucket_bytes)) as versions,
        workers.worker("receiver", MODULE, "receive", config.model_dump_json(), str(port)) as worker,
    ):
        worker.receive()
        data = versions.next(0.1).data
        worker.send("broadcast", data.numel())
        bare = BareGloo(port, 0, data.clone(), bucket_bytes=bucket_bytes)
        bare.run()
        worker.receive()
        with _senders(workers, WHOLE, worker, full_every=1) as senders:
            warm_up: Times = defaultdict(list)
            for found in (warm_up, *[times] * rounds):
                _send_whole(versions.next(0.1), senders, worker, bare, found)
        for name in DELTAS:
            with _senders(workers, (name,), worker, full_every=1_000_000) as (sender,):
                sender.send(versions.next(0.1), defaultdict(list), name)
                for share in interleave(rounds, CHANGED):
                    sender.send(versions.next(share), times, f"{name} {share}")
    figures.show(*figures_of(data.numel(), times))
    return {"size": data.numel(), **times}


class _Versions:
    """Versions of a random policy."""

    def __init__(self, run: str, size_bytes: int, *, bucket_bytes: int) -> None:
        self._policy = build_policy(shape_of(size_bytes // 2))
        self._generator = torch.Generator().manual_seed(0)
        self._taker = SnapshotTaker(
            self._policy,
            dtype=torch.bfloat16,
            bucket_bytes=bucket_bytes,
            device=torch.device("cpu"),
            segments=run,
        )
        self._version = 0
        self.close = self._taker.close

    def next(self, share: float) -> Snapshot:
        """The next version, in which about this share of the numbers has changed."""
        perturb(self._policy, share, self._generator)
        self._version += 1
        return take(self._taker, self._version).sealed()


def _send_whole(snapshot: Snapshot, senders: Sequence["_Sender"], worker: Worker, bare: BareGloo, times: Times) -> None:
    """Times of a whole version through every transport, and of the baselines."""
    data = snapshot.data.numpy()
    target = np.ones_like(data)
    started = time.perf_counter()
    np.copyto(target, data)
    times[COPY].append(time.perf_counter() - started)
    started = time.perf_counter()
    worker.send("broadcast", data.size)
    bare.run()
    worker.receive()
    times[GLOO].append(time.perf_counter() - started)
    for sender in senders:
        sender.send(snapshot, times, sender.name)


@contextmanager
def _senders(workers: Workers, names: Sequence[str], worker: Worker, *, full_every: int) -> Iterator[list["_Sender"]]:
    with ExitStack() as stack:
        senders = []
        for name in names:
            weights = {"transport": name, "full_every": full_every}
            config = weights_config(workers.folder, f"{name}-{full_every}", weights=weights)
            transports = build_transports(config)
            stack.callback(transports.close)
            senders.append(_Sender(name, config.weights, transports, worker))
        yield senders


class _Sender:
    """A transport from this process to the receiver."""

    def __init__(self, name: str, config: WeightsConfig, transports: Transports, worker: Worker) -> None:
        self.name = name
        self._worker = worker
        self._deadline_s = config.deadline_s
        self._fetched = transports.fetched.get(name)
        self._broadcast = transports.broadcast
        self._staged = -1
        """The version that the receiver holds."""
        if self._broadcast is not None:
            form = Form(
                transfer=0, epoch=1, transport=name, host=config.host, port=config.store_port, rank=1, world=2,
                deadline_s=config.deadline_s,
            )  # fmt: skip
            worker.send("enter", encode(form))
            self._broadcast.form(1, 2)
            worker.receive()

    def send(self, snapshot: Snapshot, times: Times, label: str) -> None:
        """Sends a version; adds the time that it took, and the bytes that were sent, to `times`."""
        started = time.perf_counter()
        source = None
        if self._fetched is not None:
            self._fetched.prepare(snapshot)
            source = self._fetched.source(snapshot, self._staged)
            times[f"{label}: bytes"].append(sum(part.size_bytes for part in source.parts) if source else 0)
        announce = Announce(
            transfer=0, transport=self.name, manifest=snapshot.manifest, deadline_s=self._deadline_s,
            epoch=None if source else 1, source=source,
        )  # fmt: skip
        self._worker.send("receive", encode(announce))
        if self._broadcast is not None:
            self._broadcast.send(snapshot)
        self._worker.receive()
        times[label].append(time.perf_counter() - started)
        self._staged = snapshot.manifest.version


def figures_of(size: int, times: Times) -> Iterator[Figure]:
    """Speeds, and the ratios to the bare copies."""
    labels = {"memory copy, one thread": COPY, "bare gloo": GLOO} | {f"{name}, whole version": name for name in WHOLE}
    labels |= {f"{name}, {share:.0%} changed": f"{name} {share}" for name in DELTAS for share in CHANGED}
    yield Figure("a version", size / 1e6, "MB")
    for name, label in labels.items():
        yield Figure(name, size / median(times[label]) / 1e9, "GB/s")
    for label, base, least in (("shm", COPY, 0.5), ("gloo", GLOO, 0.9)):
        ratio = median(b / a for a, b in zip(times[label], times[base], strict=True))
        yield Figure(f"{label} / {base}", ratio, "", Goal(">=", least))
