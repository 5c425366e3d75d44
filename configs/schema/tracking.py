"""Trackers of metrics, traces, and the addresses for Prometheus."""

from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from slipstream.configs.schema.base import Section

MAX_PORT: Final = 65535


class SwanlabConfig(Section):
    """SwanLab (extra `swanlab`)."""

    mode: Literal["local", "offline", "cloud", "disabled"] = "local"
    """`local` writes into the run folder and needs no network."""


class WandbConfig(Section):
    """Weights & Biases (extra `wandb`)."""

    entity: str | None = None
    """User or team; unset: the user's default."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run folder; `wandb sync` sends it later."""


class MlflowConfig(Section):
    """MLflow (extra `mlflow`)."""

    uri: str | None = None
    """Tracking server; unset: a database in the run folder, for `mlflow ui --backend-store-uri`."""


class TensorboardConfig(Section):
    """TensorBoard's event files, in the run folder (extra `tensorboard`)."""


class TrackioConfig(Section):
    """Trackio (extra `trackio`), which keeps its database below `TRACKIO_DIR`."""


def _listen_address(value: Any) -> Any:
    """`HOST:PORT` for a port alone. Raises: ValueError for what is neither."""
    if value is None:
        return None
    host, _, port = str(value).rpartition(":")
    if isinstance(value, bool) or not port.isascii() or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"{value!r} is neither a port (1 to {MAX_PORT}) nor HOST:PORT")
    return f"{host or '127.0.0.1'}:{port}"


def _trace_target(value: str | None) -> str | None:
    """Raises: ValueError for what is neither `file` nor an address, and for an address with a password."""
    if value in (None, "file"):
        return value
    address = urlsplit(value)
    if address.username or address.password:  # it would be in logs and in the run folder
        raise ValueError("an address with a user or password; give keys by OTEL_EXPORTER_OTLP_HEADERS instead")
    if address.scheme not in ("http", "https") or not address.hostname or address.port == 0:
        raise ValueError(f"{value!r} is neither `file` nor an address such as http://localhost:4318")
    return value


def _off_is_unset(value: Any) -> Any:
    """Other readers of YAML than ours take `off` for false."""
    return None if value is False or value == "off" else value


class TrackingConfig(Section):
    """Trackers of metrics, besides `metrics.jsonl`, which is always written with the native names; traces."""

    names: Literal["native", "verl", "trl"] = "native"
    """Names of the metrics that trackers get; those without such a name keep their own."""
    samples: bool = True
    """Trackers get samples of the answers, as tables."""
    project: str = "slipstream"
    """Project of the trackers, MLflow's experiment."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of an hour of a GPU, in any currency: then steps and summary have the cost per million trained tokens. The
    GPUs of learner and rollout servers count."""
    swanlab: SwanlabConfig | None = None
    """Also log to SwanLab."""
    wandb: WandbConfig | None = None
    """Also log to Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """Also log to MLflow."""
    tensorboard: TensorboardConfig | None = None
    """Also log to TensorBoard."""
    trackio: TrackioConfig | None = None
    """Also log to Trackio."""
    trace: Annotated[str | None, BeforeValidator(_off_is_unset), AfterValidator(_trace_target)] = None
    """`file`: each process writes spans of its work into the run folder's traces/, for `slipstream trace`. An address,
    such as `http://localhost:4318`: an OTLP collector gets them too. Unset or `off`: no spans."""
    prometheus: Annotated[str | None, BeforeValidator(_listen_address)] = None
    """`HOST:PORT`, or a port of loopback: each process serves `/metrics` for Prometheus there, or at the first free
    port after it, and leaves its address in the run folder's prometheus/."""
