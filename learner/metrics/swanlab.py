"""Metrics to SwanLab (extra `trackers`)."""

from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.schema.run import SwanlabConfig
from slipstream.learner.metrics.trackers import Record

log = get_log("learner.tracking")

NOT_METRICS = {"kind", "step", "steps", "time_s"}


class SwanlabTracker:
    """Logs the numbers of step and evaluation records; its files lie in `<run folder>/swanlab`."""

    def __init__(self, settings: SwanlabConfig, paths: RunPaths, *, run: str, recorded: Mapping[str, Any]) -> None:
        """Args:
        run: name of the run.
        recorded: the configuration that SwanLab records.

        Raises: ConfigError when SwanLab is not installed or can't start in the configured mode.
        """
        self._swanlab = _import_swanlab()
        folder = paths.root / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._swanlab.init(
                project=settings.project,
                name=run,
                mode=_mode_for_swanlab(settings.mode),
                log_dir=str(folder),
                config=recorded,
                settings=self._swanlab.Settings(
                    # stdout and stderr belong to the supervisor's console file.
                    terminal=self._swanlab.Settings.Terminal(proxy_type="none"),
                    # It would record the command line and the environment, which is where passwords are.
                    probe=self._swanlab.Settings.Probe(runtime=False),
                ),
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(
                f"tracking.swanlab.mode={settings.mode}: SwanLab does not start: {error}; log in with "
                "`swanlab login`, or use mode local"
            ) from error
        self._step = 0

    def log(self, record: Record) -> None:
        """Logs the numbers of a record of kind `step` or `eval`; ignores other kinds."""
        kind = record.get("kind")
        if kind == "step":
            self._step = int(record["step"])
            prefix = ""
        elif kind == "eval":
            prefix = "eval/"
        else:
            return
        numbers = {
            f"{prefix}{key}": value
            for key, value in record.items()
            if isinstance(value, int | float) and key not in NOT_METRICS
        }
        self._swanlab.log(numbers, step=self._step)

    def close(self) -> None:
        """Ends the SwanLab run."""
        self._swanlab.finish()


def _mode_for_swanlab(mode: str) -> str:
    """SwanLab's mode for a configured mode."""
    if mode == "local" and find_spec("swanboard") is None:
        # SwanLab's own `local` feeds that package's dashboard, and reports an error without it.
        # `offline` writes the same run into the same folder.
        log.info("swanlab writes files without a dashboard", missing="swanboard", upload_with="swanlab sync")
        return "offline"
    return "online" if mode == "cloud" else mode


def _import_swanlab() -> ModuleType:
    try:
        import swanlab
    except ImportError:
        raise ConfigError(
            "tracking.swanlab: the package swanlab is not installed; pip install 'slipstream[trackers]', "
            "or leave tracking.swanlab out"
        ) from None
    module: ModuleType = swanlab
    return module
