"""The run's folder: what lies where under `runs/<name>/`."""

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.files import write_whole
from slipstream.configs.schema import RunConfig


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @classmethod
    def of(cls, config: RunConfig) -> "RunFolder":
        """The folder that `config` names."""
        return cls(config.folder)

    @property
    def name(self) -> str:
        """What the folder is called, also where that is `.`."""
        return self.root.absolute().name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def logs(self) -> Path:
        """One `<process>.jsonl` (structured) and one `<process>.console` (all it printed) per process."""
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON record per line: steps, evaluations, the end of the run."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The run in figures."""
        return self.root / "summary.json"

    @property
    def curves(self) -> Path:
        """The run as a picture."""
        return self.root / "curves.png"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.root / "model"

    @property
    def initial_model(self) -> Path:
        """A model that was built for this run."""
        return self.root / "initial_model"

    @property
    def weights(self) -> Path:
        """Versions of the transport `file`, where `weights.folder` names no other place."""
        return self.root / "weights"

    @property
    def redis(self) -> Path:
        """Data of the embedded Redis-protocol server."""
        return self.root / "redis"

    def create(self, config: RunConfig) -> None:
        """Makes the folder and writes the resolved configuration into it, unless it stands there already.

        Raises: ConfigError when that can't be done there.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            text = dump_config(config).encode()
            if not self.config.exists() or self.config.read_bytes() != text:
                write_whole(self.config, [text])
        except OSError as error:
            raise unwritable(config, error) from None


def checkpoints(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    matches = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def unwritable(config: RunConfig, error: OSError) -> ConfigError:
    """What to say of a run whose folder can't be made or written to."""
    file = error.filename or RunFolder.of(config).config
    return ConfigError(
        f"run.dir={config.run.dir}: can't write {file}: {error.strerror}; name a folder for runs that this process may "
        "write to and whose disk has room"
    )


def model_problems(config: RunConfig) -> list[str]:
    """Why models are not to be had that the learner needs: the initial one, the reference, the critic's."""
    learner = config.learner
    return [
        *_model_problems("model.path", config.model.path),
        *_model_problems("learner.kl.reference", None if learner.kl is None else learner.kl.reference),
        *_model_problems("learner.critic.path", None if learner.critic is None else learner.critic.path),
    ]


def _model_problems(key: str, path: Path | None) -> list[str]:
    try:
        if path is None or (path / "config.json").is_file():
            return []
    except OSError as error:  # a folder of another user's
        return [f"{key}={path} can't be read: {error.strerror}"]
    problem = f"{key}={path} holds no config.json: name a Hugging Face model folder"
    if not path.exists() and len(path.parts) == 2 and not path.is_absolute():
        problem += f"; names on the hub are not resolved: `hf download {path} --local-dir FOLDER`, then {key}=FOLDER"
    return [problem]


def initial_model(config: RunConfig) -> Path:
    """The folder that engine and learner load the initial weights and the tokenizer from.

    A model that is to be built is built here, unless it is there: each process of a run asks, on whatever host, and all
    of them build the same bytes from the run's seed.

    Raises: ConfigError when there is no model in `model.path`.
    """
    problems = _model_problems("model.path", config.model.path)
    if problems:
        raise ConfigError(problems)
    if config.model.path is not None:
        return config.model.path
    # Imported here: a process that needs no model need not load the tokenizer's library.
    from slipstream.configs.models import build_digits_model

    folder = RunFolder.of(config).initial_model
    build_digits_model(folder, seed=config.run.seed)
    return folder


UP: Final = "`slipstream up`"
LEARNER: Final = "learner"


@contextmanager
def claimed(config: RunConfig, *, by: str) -> Iterator[None]:
    """Keeps others of the kind `by` off the run's folder while the block lasts; however the process ends, the kernel
    lets go.

    Raises: ConfigError when one is at it, or there can't be a lock.
    """
    path = _lock_path(RunFolder.of(config), by)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+b", buffering=0)
    except OSError as error:
        raise unwritable(config, error) from None
    with lock:
        if not _locked(lock.fileno(), fcntl.LOCK_EX):
            raise _in_use(RunFolder.of(config), by)
        with suppress(OSError):  # a full disk has no room for the words, but for the lock
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def require_free(folder: RunFolder) -> None:
    """Leaves no trace. Raises: ConfigError when somebody of this host has claimed the folder."""
    for by in (UP, LEARNER):
        if _is_claimed(folder, by):
            raise _in_use(folder, by)


def is_claimed(folder: RunFolder) -> bool:
    """Whether somebody of this host is at the folder."""
    return any(_is_claimed(folder, by) for by in (UP, LEARNER))


def _is_claimed(folder: RunFolder, by: str) -> bool:
    try:
        with _lock_path(folder, by).open("rb") as lock:
            return not _locked(lock.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _lock_path(folder: RunFolder, by: str) -> Path:
    if by == UP:  # beside the folder, because --fresh renames that
        root = folder.root if folder.root.name else folder.root.absolute()  # `.` has no name
        return root.with_name(f".{root.name}.lock")
    # Of this host: on another one a learner may be cut off for good, and the network's file system still hold its lock.
    return folder.root / f".learner-{socket.gethostname()}.lock"


def _locked(file: int, kind: int) -> bool:
    # Other errors: some network file systems have no locks; that is no reason not to run there.
    with suppress(OSError):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _in_use(folder: RunFolder, by: str) -> ConfigError:
    holder = _lock_path(folder, by).read_text(encoding="utf-8")
    return ConfigError(f"{folder.root} is in use by another {by} ({holder}): stop that, or choose another run.name")
