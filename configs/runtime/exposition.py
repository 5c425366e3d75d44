"""Metrics of a process for Prometheus: `/metrics` on a port of its own, and the file by which Prometheus finds it."""

import atexit
import errno
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log

log = get_log("runtime.exposition")

PREFIX: Final = "slipstream_"
PORTS_TRIED: Final = 1000
ANY_HOST: Final = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Reading:
    """A metric with its present value, or its values by a label."""

    name: str
    """Without the prefix; of a counter without `_total`."""
    meaning: str
    value: float | Mapping[str, float]
    label: str = ""
    """Name of the label by which there are several values."""
    counts: bool = False
    """It is a counter, which only grows until the process ends."""


def serve_metrics(
    address: str | None, folder: Path, *, run: str, process: str, read: Callable[[], Iterable[Reading]], **labels: str
) -> None:
    """Serves the readings until the process ends, if there is an address.

    Prometheus discovers the process by the file `<process>.json` in the folder (`file_sd_configs`).

    Args:
        address: `HOST:PORT`; where the port is taken, the first free one after it serves.
        run: name of the run, a label of all series.
        process: name of this process's log.
        read: called for each scrape, in a thread.
        labels: further ones of all series.

    Raises: ConfigError when the address can't be used, or the file can't be written.
    """
    if address is None:
        return
    host, _, base = address.rpartition(":")
    host = host.strip("[]")
    registry = _registry(read, labels)
    port = _listen(host, int(base), registry)
    named = f"[{host}]" if ":" in host else host
    target = f"{socket.gethostname() if host in ANY_HOST else named}:{port}"
    file = folder / f"{process}.json"
    found = [{"targets": [target], "labels": {"job": "slipstream", "run": run, "process": process}}]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, [json.dumps(found).encode(), b"\n"])
    except OSError as error:
        raise ConfigError(f"tracking.prometheus: can't write {file}: {error.strerror}") from None
    atexit.register(file.unlink, missing_ok=True)
    log.info("metrics for Prometheus", address=f"http://{target}/metrics")


def _registry(read: Callable[[], Iterable[Reading]], labels: Mapping[str, str]) -> Any:
    """A registry of prometheus_client. Imported here: most runs have no metrics of this kind."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Readings:
        def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
            for reading in read():
                names = [*labels, *([reading.label] if reading.label else [])]
                kind = CounterMetricFamily if reading.counts else GaugeMetricFamily
                family = kind(PREFIX + reading.name, reading.meaning, labels=names)
                values = reading.value if isinstance(reading.value, Mapping) else {"": reading.value}
                for value_of, value in values.items():
                    family.add_metric([*labels.values(), *([value_of] if reading.label else [])], value)
                yield family

    registry = CollectorRegistry()
    registry.register(Readings())
    ProcessCollector(registry=registry)
    return registry


def _listen(host: str, base: int, registry: Any) -> int:
    """Starts the server; returns its port. Raises: ConfigError."""
    from prometheus_client import start_http_server

    for port in range(base, min(base + PORTS_TRIED, 65536)):
        try:
            start_http_server(port, host, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or str(error)
                raise ConfigError(f"tracking.prometheus: can't listen on {host}:{port}: {reason}") from None
        else:
            return port
    raise ConfigError(f"tracking.prometheus: no free port on {host} from {base} on; choose another one")
