"""`slipstream up`: starts a run's processes on this machine, shows how it goes, and stops every one."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from slipstream.configs import RunConfig
from slipstream.configs.arguments import read_run_arguments, run_parser
from slipstream.configs.paths import UP, RunFolder, checkpoints, claimed, initial_model, model_problems, require_free
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.tools.arguments import lasting_stdout
from slipstream.tools.follow import JsonLinesFollower
from slipstream.tools.launch.opening import finished_problems, open_folder
from slipstream.tools.launch.ports import port_problems
from slipstream.tools.launch.progress import Progress, heard, observe
from slipstream.tools.launch.screen import Screen, make_screen
from slipstream.tools.launch.supervise import GRACE_S, Child, Supervisor
from slipstream.tools.report import report

MODULES = {
    "buffer": "slipstream.buffer.cli",
    "rollout": "slipstream.rollout_servers.cli",
    "learner": "slipstream.learner.cli",
}
THREADS = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
"""The processes share the machine's cores: if each took all, their thread pools would wait for each other."""
REDIS_DEADLINE_S = 120.0
"""A server with a large append-only file takes its time to load it."""
LINES_OF_THE_DEAD = 25
A_PAGE_BYTES = 4096
"""With less than that a disk has room for nothing."""
TICK_S = 0.25


class ChildDied(SlipstreamError):
    """A child ended that should not have, or not like this."""

    def __init__(self, child: Child) -> None:
        lines = child.last_lines(LINES_OF_THE_DEAD) or [_why_nothing(child.console.parent)]
        said = "\n".join(f"  | {line}" for line in lines)
        super().__init__(
            f"{child.name} ended with {child.ending}{_why(child)}; the last lines of {child.console}:\n{said}"
        )


def _why(child: Child) -> str:
    """In words, what a child that was killed can't say itself."""
    if child.exit_code != -signal.SIGKILL:
        return ""
    return (
        " (if nobody killed it, the kernel did for want of memory: see `dmesg`; the same command, without --fresh, "
        "continues the run)"
    )


def _why_nothing(folder: Path) -> str:
    """In words, what a child without last words leaves to guess."""
    full = shutil.disk_usage(folder).free < A_PAGE_BYTES
    return f"(it printed nothing; the disk of {folder} is full)" if full else "(it printed nothing)"


class Stopped(SlipstreamError):
    """The user asked for the end."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream up`; returns 0, 1 when a child died, or 128 + the number of the signal that ended it.

    Raises: ConfigError when a port is busy, there is no model, keys are missing, or the folder can't be used, in use,
    holds a finished run or one that was begun with other settings; nothing was started then.
    """
    started = time.monotonic()
    parser = run_parser("Run everything on this machine and watch it learn.", prog="slipstream up")
    parser.add_argument("--fresh", action="store_true", help="move an old run folder aside and start over")
    parser.add_argument("--plain", action="store_true", help="print lines instead of a live table")
    arguments, config = read_run_arguments(parser, argv)
    folder = RunFolder.of(config)
    require_free(folder)  # of its ports and its files anything might be said
    problems = [
        *finished_problems(config, fresh=arguments.fresh),
        *model_problems(config),
        *_key_problems(config),
        *port_problems(config),
    ]
    if problems:
        raise ConfigError(problems)
    with claimed(config, by=UP), redirect_stdout(lasting_stdout()):
        if arguments.fresh and config.redis.url is not None:
            _forget(config)  # before its folder is moved: a new one must never stand over the ledger of the old run
        print(f"{open_folder(config, fresh=arguments.fresh)}; logs in {folder.logs}", flush=True)
        code = _watch_over(config, make_screen(plain=arguments.plain), started)
        if code == 0:
            report(folder)
    return code


def _key_problems(config: RunConfig) -> Sequence[str]:
    from slipstream.buffer.wire.auth import client_keys, service_keys

    try:
        service_keys(config.security)
        client_keys(config.security)
    except ConfigError as error:
        return error.problems
    return []


def _watch_over(config: RunConfig, screen: Screen, started: float) -> int:
    """Starts the run and sees it to its end; returns the exit code."""
    folder = RunFolder.of(config)
    with StopSignals() as signals, Supervisor(folder.logs, signals) as supervisor:
        job = Job(config, supervisor, signals, screen, started)
        try:
            job.run()
        except Stopped:
            print("stopping: learner (it saves its step), rollout, buffer, redis (once more to kill them)", flush=True)
            supervisor.stop_all()
            print(f"stopped; the same command (without --fresh) continues the run{job.undone()}")
            return 128 + signals.received[0]
        except (SlipstreamError, OSError) as error:
            remedy = f"; see that {folder.root} has room and may be written to" if isinstance(error, OSError) else ""
            print(f"error: {error}{remedy}", file=sys.stderr, flush=True)
            supervisor.stop_all()
            return 1
    return 0


def python(module: str, *arguments: object) -> list[str]:
    """The command line that runs a module.

    -P: a plug-in is found on PYTHONPATH as it is named, though the folder that one stands in has an `env` too, as the
    root of a checkout has.
    """
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def _patient(silent: str | None) -> str:
    """In words, for how long and why a Redis of the user's own is waited for."""
    return f", waiting up to {REDIS_DEADLINE_S:.0f} s for it: {silent}" if silent else ""


def _forget(config: RunConfig) -> None:
    from slipstream.tools.launch.redis import forget_run, wait_until_ready, why_silent

    silent = why_silent(config.redis)
    print(f"forgetting the old run in Redis at {config.redis.address}" + _patient(silent), flush=True)
    wait_until_ready(config.redis, REDIS_DEADLINE_S)
    forget_run(config.redis, config.run.name, silent_s=config.buffer.server_deadline_s)


class Job:
    """The processes of one run, from the first to the learner's end."""

    def __init__(
        self, config: RunConfig, supervisor: Supervisor, signals: StopSignals, screen: Screen, started: float
    ) -> None:
        self.config = config
        self.folder = RunFolder.of(config)
        self.supervisor = supervisor
        self.signals = signals
        self.screen = screen
        self.started = started
        self.progress = Progress.of(config)
        self.metrics = JsonLinesFollower(self.folder.metrics)
        self.logs = {name: JsonLinesFollower(self.folder.logs / f"{name}.jsonl") for name in MODULES}

    def run(self) -> None:
        """Returns once the learner is done and all are stopped.

        Raises: ChildDied; Stopped; DeadlineError when Redis doesn't answer. Then children may still run.
        """
        with self.screen:
            url = self.config.redis.url
            self._enter(f"building the model and {'starting Redis' if url is None else f'waiting for Redis at {url}'}")
            self._start_redis()
            initial_model(self.config)
            self._wait_for_redis()
            for name, module in MODULES.items():
                environment = {"SLIPSTREAM_RUN_STARTED": repr(self.started), **THREADS}
                # A learner saves its step first, and nobody knows how long that takes: who asks once more kills it.
                grace_s = self.config.learner.wait_deadline_s if name == "learner" else GRACE_S
                self.supervisor.start(name, python(module, self.folder.config), environment, grace_s=grace_s)
            self._enter("starting the engine and the learner")
            learner = self.supervisor.children["learner"]
            while learner.exit_code is None:
                self._watch(TICK_S)
            self._watch(0.0)
        self.supervisor.stop_all()

    def undone(self) -> str:
        """In words, what a later start has to do again; to be asked when all have ended."""
        self._hear()
        steps = self.progress.steps_done - max(checkpoints(self.folder.checkpoints), default=0)
        return f"; it does the {steps} steps since its last checkpoint again" if steps > 0 else ""

    def _start_redis(self) -> None:
        from slipstream.tools.launch.redis import redis_command

        if self.config.redis.url is None:
            self.supervisor.start("redis", redis_command(self.config))

    def _wait_for_redis(self) -> None:
        from slipstream.tools.launch.redis import wait_until_ready, why_silent

        url = self.config.redis.url
        if url is not None and (silent := why_silent(self.config.redis)):
            self._enter(f"no answer from Redis at {url}{_patient(silent)}")
        wait_until_ready(self.config.redis, REDIS_DEADLINE_S, pause=self._watch)

    def _enter(self, stage: str) -> None:
        self.progress = replace(self.progress, stage=stage)
        self._observe()

    def _watch(self, timeout_s: float) -> None:
        """Waits a little and shows the news.

        Raises: Stopped if the user asks for it, ChildDied if one ended and it isn't the learner at its end, ConfigError
        when there is no folder for the run any more.
        """
        self.signals.wait(timeout_s)
        self._require_folder()
        self._observe()
        learner = self.supervisor.children.get("learner")
        if learner is not None and learner.exit_code == 0:
            return
        if self.signals.received:
            raise Stopped(f"{self.signals.received[0].name} received")
        for child in self.supervisor.ended():
            # When several are gone, the one that started first is the likelier cause.
            raise ChildDied(child)

    def _require_folder(self) -> None:
        """Somebody may have moved or deleted it: then it is made anew, and that is said."""
        if self.folder.config.exists():
            return
        self.folder.create(self.config)
        initial_model(self.config)  # the trained model takes its tokenizer from there
        print(
            f"warning: {self.folder.root} was moved or deleted. The run goes on in a new folder, without the old one's "
            "checkpoints, metrics and logs, and where redis.url is not set without the ledger's file: let it come to "
            "its end before you stop it",
            file=sys.stderr,
            flush=True,
        )

    def _observe(self) -> None:
        self._hear()
        self.screen.show(self.progress)

    def _hear(self) -> None:
        progress = replace(self.progress, elapsed_s=time.monotonic() - self.started)
        for name, log in self.logs.items():
            for record in log.new_records():
                progress = heard(progress, name, record)
        for record in self.metrics.new_records():
            progress = observe(progress, record)
        self.progress = progress
