"""Runs, spread over processes; when the user asks for the end, all of them end."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import get_context

from pebble import ProcessExpired, ProcessPool

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.configs.runtime.network import use_loopback_interface
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.bench.processes import heed
from slipstream.tools.bench.staleness.curves import Curves
from slipstream.tools.bench.staleness.studies import Run

POLL_S = 0.2


@dataclass(frozen=True)
class Outcome:
    """A run and what came of it."""

    run: Run
    curves: Curves


def train_all(runs: Sequence[Run], *, jobs: int) -> Iterator[Outcome]:
    """Trains as many runs at once as there are jobs; yields each as it ends. To be called in the main thread.

    Raises: SlipstreamError when the user asks for the end, or a worker has died; then no worker is left either.
    """
    # Not forked: torch's threads would not survive that.
    pool = ProcessPool(max_workers=min(jobs, len(runs)), initializer=_prepare, context=get_context("spawn"))
    with StopSignals() as signals:
        try:
            pending: dict[Future[Curves], Run] = {pool.schedule(_train, args=(run.config,)): run for run in runs}
            while pending:
                heed(signals)
                for future in [future for future in pending if future.done()]:
                    yield Outcome(pending.pop(future), _result(future))
                signals.wait(POLL_S)
        finally:
            pool.stop()  # type: ignore[no-untyped-call]  # pebble annotates all but this one
            pool.join()


def _result(future: "Future[Curves]") -> Curves:
    try:
        return future.result()
    except ProcessExpired as error:
        raise SlipstreamError(f"a worker ended with exit code {error.exitcode}") from None


def _prepare() -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)  # there is a worker for each core already
    disable_progress_bar()


def _train(config: RunConfig) -> Curves:
    # Imported here: the parent process needs no torch.
    from slipstream.tools.bench.staleness.run import train

    use_loopback_interface(config.weights.bind)
    return train(config)
