"""Destinations of metrics besides `metrics.jsonl`: SwanLab, Weights & Biases, MLflow, TensorBoard and Trackio.

Each is used by one thread alone (`trackers.BackgroundTracker`) and may block there, or raise what its package raises.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.files import write_atomically
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.tracking import (
    MlflowConfig,
    SwanlabConfig,
    TensorboardConfig,
    TrackioConfig,
    WandbConfig,
)

log = get_log("learner.tracking")

Row = Mapping[str, str | float]
"""One sample: its columns are those of every other one."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers know it."""

    name: str
    project: str
    paths: RunPaths
    recorded: Mapping[str, Any]
    """The configuration that they keep."""


class Destination(Protocol):
    """A place to which metrics and samples of a run go."""

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Stores or sends numbers, which belong to a step; steps may come twice or out of order."""

    def add_rows(self, table: str, rows: Sequence[Row], *, step: int) -> None:
        """Adds rows to a table, whose earlier rows stay."""

    def close(self) -> None:
        """Sends what is left."""


class Swanlab:
    """SwanLab; its files lie in `<run folder>/swanlab`."""

    def __init__(self, settings: SwanlabConfig, run: TrackedRun) -> None:
        self._swanlab: Any = import_module("swanlab")
        folder = run.paths.root / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        kinds = self._swanlab.Settings
        self._swanlab.init(
            project=run.project,
            name=run.name,
            mode=_mode_for_swanlab(settings.mode),
            log_dir=str(folder),
            config=run.recorded,
            # stdout and stderr belong to the supervisor's console file. `runtime` has command line and environment.
            settings=kinds(terminal=kinds.Terminal(proxy_type="none"), probe=kinds.Probe(runtime=False)),
        )

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Stores or sends numbers."""
        self._swanlab.log(dict(numbers), step=step)

    def add_rows(self, table: str, rows: Sequence[Row], *, step: int) -> None:
        """A table of its own for each step."""
        chart = self._swanlab.echarts.Table()
        chart.add(list(rows[0]), [list(row.values()) for row in rows])
        self._swanlab.log({table: chart}, step=step)

    def close(self) -> None:
        """Ends the SwanLab run."""
        self._swanlab.finish()


class Wandb:
    """Weights & Biases; its files lie in `<run folder>/wandb`."""

    def __init__(self, settings: WandbConfig, run: TrackedRun) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.init(
            project=run.project,
            entity=settings.entity,
            name=run.name,
            id=run_id(run.paths, "wandb") or store_run_id(run.paths, "wandb", uuid.uuid4().hex[:8]),
            resume="allow",
            mode=settings.mode,
            dir=str(run.paths.root),
            config=dict(run.recorded),
            settings=wandb.Settings(console="off", x_disable_meta=True, silent=True),
        )
        # Steps of their own: numbers of an earlier step, such as an evaluation's, would be dropped.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._table = wandb.Table
        self._tables: dict[str, Any] = {}

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Stores or sends numbers."""
        self._run.log({**numbers, "step": step})

    def add_rows(self, table: str, rows: Sequence[Row], *, step: int) -> None:
        """Adds rows to one growing table."""
        if table not in self._tables:
            self._tables[table] = self._table(columns=list(rows[0]), log_mode="INCREMENTAL")
        for row in rows:
            self._tables[table].add_data(*row.values())
        self._run.log({table: self._tables[table], "step": step})

    def close(self) -> None:
        """Ends the W&B run."""
        self._run.finish()


class Mlflow:
    """MLflow, on a server or in `<run folder>/mlflow.db`."""

    def __init__(self, settings: MlflowConfig, run: TrackedRun) -> None:
        mlflow: Any = import_module("mlflow")
        self._entities: Any = import_module("mlflow.entities")
        uri = settings.uri or f"sqlite:///{run.paths.root.absolute()}/mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run = run_id(run.paths, "mlflow") or store_run_id(
            run.paths, "mlflow", self._create_run(settings.uri, run)
        )
        self._client.log_dict(self._run, dict(run.recorded), "config.json")

    def _create_run(self, uri: str | None, run: TrackedRun) -> str:
        """A new run in the experiment; returns its id."""
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            artifacts = None if uri else (run.paths.root.absolute() / "mlflow").as_uri()
            number = self._client.create_experiment(run.project, artifacts)
        else:
            number = experiment.experiment_id
        created: str = self._client.create_run(number, run_name=run.name).info.run_id
        return created

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Stores or sends numbers."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def add_rows(self, table: str, rows: Sequence[Row], *, step: int) -> None:
        """Adds rows to a JSON file of the run's artifacts."""
        columns = {"step": [step] * len(rows), **{name: [row[name] for row in rows] for name in rows[0]}}
        self._client.log_table(self._run, columns, f"{table}.json")

    def close(self) -> None:
        """Ends the MLflow run."""
        self._client.set_terminated(self._run)


class Tensorboard:
    """TensorBoard's event files, in `<run folder>/tensorboard`."""

    def __init__(self, settings: TensorboardConfig, run: TrackedRun) -> None:
        del settings  # it has none
        writer: Any = import_module("tensorboardX")
        self._writer = writer.SummaryWriter(str(run.paths.root / "tensorboard"), flush_secs=5)
        self._writer.add_text(
            "config", f"{run.name}\n\n```json\n{json.dumps(run.recorded, indent=2, default=str)}\n```"
        )

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Stores numbers."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def add_rows(self, table: str, rows: Sequence[Row], *, step: int) -> None:
        """A Markdown table for each step."""
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(_cell, row.values()) for row in rows)]
        self._writer.add_text(table, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class Trackio:
    """Trackio, which keeps a database for each project below `TRACKIO_DIR`."""

    def __init__(self, settings: TrackioConfig, run: TrackedRun) -> None:
        trackio: Any = import_module("trackio")
        self._table = trackio.Table
        self._run = trackio.init(
            project=run.project,
            name=run_id(run.paths, "trackio")
            or store_run_id(run.paths, "trackio", f"{run.name}-{uuid.uuid4().hex[:6]}"),
            config=dict(run.recorded),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Stores numbers."""
        self._run.log(dict(numbers), step=step)

    def add_rows(self, table: str, rows: Sequence[Row], *, step: int) -> None:
        """A table for each step."""
        columns = list(rows[0])
        self._run.log({table: self._table(columns=columns, data=[list(row.values()) for row in rows])}, step=step)

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()


# --- identity ---------------------------------------------------------------------------------------------------------


def run_id(paths: RunPaths, tracker: str) -> str | None:
    """The id under which a tracker knows this run, which a continued run goes on with; None: a new run."""
    found = _ids(paths).get(tracker)
    return found if isinstance(found, str) else None


def store_run_id(paths: RunPaths, tracker: str, name: str) -> str:
    """Keeps the id in the run folder; returns it."""
    write_atomically(_ids_file(paths), [json.dumps({**_ids(paths), tracker: name}).encode()])
    return name


def _ids(paths: RunPaths) -> dict[str, Any]:
    with suppress(FileNotFoundError, json.JSONDecodeError):
        found = json.loads(_ids_file(paths).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _ids_file(paths: RunPaths) -> Path:
    return paths.root / "trackers.json"


def _mode_for_swanlab(mode: str) -> str:
    """SwanLab's mode for a configured mode."""
    if mode == "local" and find_spec("swanboard") is None:
        # SwanLab's own `local` feeds that package's dashboard, and reports an error without it.
        # `offline` writes the same run into the same folder.
        log.info("swanlab writes files without a dashboard", missing="swanboard", upload_with="swanlab sync")
        return "offline"
    return "online" if mode == "cloud" else mode


def _cell(value: str | float) -> str:
    """Text of a cell of a Markdown table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", "<br>")
