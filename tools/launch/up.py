"""`slipstream up`: checks the configuration, starts a run's processes on this machine, watches and stops them."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace

from slipstream.configs import RunConfig
from slipstream.configs.arguments import add_undo_steps, read_run_arguments, run_parser
from slipstream.configs.load import create_run_folder, load_config
from slipstream.configs.paths import UP, hold_run_lock, require_unlocked
from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.configs.runtime.signals import StopSignals
from slipstream.configs.runtime.temporary import remove_leftovers
from slipstream.configs.schema.buffer import RedisConfig
from slipstream.models.folder import initial_model
from slipstream.tools.follow import JsonLinesFollower
from slipstream.tools.launch.disk import disk_problems, is_full
from slipstream.tools.launch.machine import this_machine
from slipstream.tools.launch.placement import Placement, divide_memory, place
from slipstream.tools.launch.ports import choose_port_base, is_confined, needed_ports, port_problems
from slipstream.tools.launch.preflight import finished_problems, prepare_folder, stored_problems
from slipstream.tools.launch.processes import RunProcesses, latest_checkpoint, start_ahead
from slipstream.tools.launch.progress import Plan, Progress, apply_log, apply_metrics
from slipstream.tools.launch.screens import Screen, make_screen, unbreakable_stdout
from slipstream.tools.launch.secrets import withheld, withheld_from
from slipstream.tools.launch.supervise import Supervisor
from slipstream.tools.summary import extend_summary, read_summary, report

REDIS_DEADLINE_S = 120.0
"""A server loads a large append-only file before it answers."""
FULL_DISK_S = 10.0
"""Time for which a run goes on although the disk of its folder is full: the removal of a checkpoint may make room."""
TICK_S = 0.25


class DiskFull(SlipstreamError):
    """Nothing can be written into the run's folder any more."""


class Stopped(SlipstreamError):
    """A signal ended the run."""


def command(argv: Sequence[str]) -> int:
    """Runs `slipstream up`; returns 0, 1 when a child failed, or 128 + the number of the signal that ended it.

    Raises: ConfigError, before anything is started, when a port is busy, cores, GPUs
    or their memory don't suffice, a model, a key or a plug-in is missing, or the folder can't be used, is in use, holds
    a finished run or one that began with incompatible settings.
    """
    started_at = time.monotonic()
    parser = run_parser("Run all processes on this machine and show the progress.", prog="slipstream up")
    parser.add_argument("--fresh", action="store_true", help="move an old run folder aside and start over")
    parser.add_argument("--plain", action="store_true", help="print lines instead of a live table")
    parser.add_argument(
        "--dashboard", action="store_true", help="serve a page over the run until its end, and print the address"
    )
    add_undo_steps(parser)
    arguments, config = read_run_arguments(parser, argv)
    folder = config.paths
    require_unlocked(folder)  # first: of a run in use, the ports are busy and the folder is half written
    ports = list[str]()
    if config.uses_buffer and config.run.port_base is None and is_confined(config.buffer, config.weights):
        ports.append(f"run.port_base={choose_port_base(folder)}")
        config = load_config(arguments.config, [*arguments.overrides, *ports])
    problems = [
        *(stored_problems(config) if arguments.fresh else finished_problems(folder, config.model)),
        *(port_problems(needed_ports(config)) if config.uses_buffer else ()),
    ]
    if problems:
        raise ConfigError(problems)
    placement = place(this_machine(), config, read_summary(folder))
    with ExitStack() as closing:
        standbys = start_ahead(config, placement, closing)
        _check(config)
        placement = _divide_memory(config, placement)
        if placement.sharing is not None:
            shares = [f"{key}={value}" for key, value in placement.sharing.settings.items()]
            config = load_config(arguments.config, [*arguments.overrides, *ports, *shares])
        if problems := disk_problems(config):
            raise ConfigError(problems)
        remove_leftovers()
        closing.enter_context(hold_run_lock(folder, by=UP))
        closing.enter_context(redirect_stdout(unbreakable_stdout()))
        if arguments.fresh and config.uses_buffer and config.redis.url is not None:
            # Before its folder is moved: a new folder must never have the old run's ledger.
            _forget_old_run(config.redis, config.run.name, silent_s=config.buffer.server_deadline_s)
        print(f"{prepare_folder(config, fresh=arguments.fresh)}; logs in {folder.logs}", flush=True)
        print(placement.text, flush=True)
        if config.tracking.prometheus is not None:
            print(f"addresses for Prometheus in {folder.prometheus}/*.json", flush=True)
        with StopSignals() as signals, Supervisor(folder.logs, signals) as supervisor:
            processes = RunProcesses(config, placement, supervisor, started_at=started_at, standbys=standbys)
            if arguments.dashboard:
                print(f"dashboard at {processes.start_dashboard()}", flush=True)
            screen = make_screen(plain=arguments.plain)
            launch = Launch(config, processes, supervisor, signals, screen, started_at)
            code = launch.run(undo_steps=arguments.undo_steps)
        if code == 0 and read_summary(folder) is not None:  # trainers of the user's own may write none
            report(folder)
    return code


def _check(config: RunConfig) -> None:
    """Prints what `slipstream check` warns of. Raises: ConfigError with the problems that it finds."""
    # Imported here: --help and mistakes in the configuration are answered without it.
    from slipstream.tools.check import check_apart

    if sys.stdout.isatty():  # some seconds, which a log need not account for
        what = "env, prompts and rewards" if config.uses_buffer else "rows"
        print(f"checking model and {what}", flush=True)
    with withheld(withheld_from("rollout", config)):
        report = check_apart(config)
    if report.problems:
        raise ConfigError(report.problems)
    for warning in report.warnings:
        print(f"warning: {warning}", flush=True)


def _divide_memory(config: RunConfig, placement: Placement) -> Placement:
    """As `divide_memory`. Raises: ConfigError when learner or engine don't fit into the memory of their GPUs."""
    gpus = placement.gpus("learner") + placement.gpus("rollout")
    if not gpus or not config.uses_buffer:
        return placement
    from slipstream.tools.fit import fit_apart

    memory = min(placement.machine.gpus[gpu].memory_bytes for gpu in gpus)
    report = fit_apart(config, gpus=len(placement.of("learner")), gpu_bytes=memory)
    return divide_memory(placement, config, report)


def _forget_old_run(redis: RedisConfig, run: str, *, silent_s: float) -> None:
    from slipstream.tools.launch.redis import forget_run, ping_problem, wait_until_ready

    waiting = _waiting_for_redis(ping_problem(redis))
    print(f"forgetting the old run in Redis at {redis.address}{waiting}", flush=True)
    wait_until_ready(redis, REDIS_DEADLINE_S)
    forget_run(redis, run, silent_s=silent_s)


class Launch:
    """The processes of one run and its progress."""

    def __init__(
        self,
        config: RunConfig,
        processes: RunProcesses,
        supervisor: Supervisor,
        signals: StopSignals,
        screen: Screen,
        started_at: float,
    ) -> None:
        self._config = config
        self._folder = config.paths
        self._processes = processes
        self._supervisor = supervisor
        self._signals = signals
        self._screen = screen
        self._started_at = started_at
        self._progress = Progress(
            Plan(
                config.run.name,
                config.learner.steps,
                config.buffer.max_staleness,
                config.eval.reward,
                is_rl=config.uses_buffer,
            )
        )
        self._metrics = JsonLinesFollower(self._folder.metrics)
        self._room_at = time.monotonic()
        """Last time at which the disk had room."""
        self._logs = {
            share.name: JsonLinesFollower(self._folder.logs / f"{share.name}.jsonl")
            for share in processes.placement.shares
            if share.role != "redis"
        }

    def run(self, *, undo_steps: bool) -> int:
        """Starts, watches and stops the processes; returns the exit code of the command."""
        try:
            with self._screen:
                self.start(undo_steps=undo_steps)
                self.watch()
            placement, restarts = self._processes.placement.as_record(), dict(self._processes.restarts)
            extend_summary(self._folder, placement=placement, restarts=restarts)
            self._supervisor.stop_all()
        except Stopped:
            others = ", rollout, buffer, redis" if self._config.uses_buffer else ""
            print(f"stopping: learner (it saves its step){others} (once more to kill them)", flush=True)
            self._supervisor.stop_all()
            print(f"stopped; the same command (without --fresh) continues the run{self.repeated_steps()}")
            return 128 + self._signals.received[0]
        except (SlipstreamError, OSError) as error:
            root = self._folder.root
            remedy = f"; see that {root} has room and may be written to" if isinstance(error, OSError) else ""
            print(f"error: {error}{remedy}", file=sys.stderr, flush=True)
            self._supervisor.stop_all()
            return 1
        return 0

    def start(self, *, undo_steps: bool = False) -> None:
        """Starts all processes, once Redis answers where there is to be one.

        Raises: ChildDied; Stopped; DeadlineError when Redis doesn't answer. Children may still run then.
        """
        url, uses_buffer = self._config.redis.url, self._config.uses_buffer
        building = ["building the model"] if self._config.model.path is None else []
        redis = ["starting Redis" if url is None else f"waiting for Redis at {url}"] if uses_buffer else []
        self._enter(" and ".join([*building, *redis]) or "starting")
        self._processes.start_redis()
        initial_model(self._config)
        if uses_buffer:
            self._wait_for_redis()
        self._processes.start_others(undo_steps=undo_steps)
        self._enter("starting the engine and the learner" if uses_buffer else "starting the learner")

    def watch(self) -> None:
        """Shows the progress until the learner is done. Raises: ChildDied; Stopped."""
        while not self._processes.is_done:
            self._tick(TICK_S)
        self._tick(0.0)

    def repeated_steps(self) -> str:
        """A note on the steps that a continued run repeats; to be called after all processes have ended."""
        self._read_records()
        steps = self._progress.steps_done - latest_checkpoint(self._folder.checkpoints)
        return f"; it does the {steps} steps since its last checkpoint again" if steps > 0 else ""

    def _wait_for_redis(self) -> None:
        from slipstream.tools.launch.redis import ping_problem, wait_until_ready

        url = self._config.redis.url
        if url is not None and (problem := ping_problem(self._config.redis)):
            self._enter(f"no answer from Redis at {url}{_waiting_for_redis(problem)}")
        wait_until_ready(self._config.redis, REDIS_DEADLINE_S, pause=self._tick)

    def _enter(self, stage: str) -> None:
        self._progress = replace(self._progress, stage=stage)
        self._show_progress()

    def _tick(self, timeout_s: float) -> None:
        """Waits up to `timeout_s`, shows the progress, and checks signals, children and the run folder.

        Raises: Stopped at a signal; ChildDied when a process ended and the run can't go on without it; DiskFull;
        ConfigError when the run folder is gone and can't be made anew.
        """
        self._signals.wait(timeout_s)
        self._restore_folder()
        self._require_room()
        self._show_progress()
        if self._processes.is_done:
            return
        if self._signals.received:
            raise Stopped(f"{self._signals.received[0].name} received")
        for message in self._processes.keep_running(step=self._progress.steps_done, now=time.monotonic()):
            print(f"warning: {message}", file=sys.stderr, flush=True)

    def _restore_folder(self) -> None:
        """Makes the run folder anew if it was moved or deleted, and prints a warning."""
        if self._folder.config.exists():
            return
        create_run_folder(self._folder, self._config)
        initial_model(self._config)  # the export of the trained model takes the tokenizer from there
        print(
            f"warning: {self._folder.root} was moved or deleted. The run continues in a new folder, without the old "
            "one's checkpoints, metrics and logs, and where redis.url is not set without the ledger's file: don't stop "
            "it before its end",
            file=sys.stderr,
            flush=True,
        )

    def _require_room(self) -> None:
        """Raises: DiskFull when there has been no room for FULL_DISK_S."""
        now = time.monotonic()
        if not is_full(self._folder.root):
            self._room_at = now
        elif now - self._room_at > FULL_DISK_S:
            raise DiskFull(
                f"the disk of {self._folder.root} has been full for {FULL_DISK_S:g} s: make room there; the same "
                "command, without --fresh, continues the run"
            )

    def _show_progress(self) -> None:
        self._read_records()
        self._screen.show(self._progress)

    def _read_records(self) -> None:
        progress = replace(self._progress, elapsed_s=time.monotonic() - self._started_at)
        for name, log in self._logs.items():
            for record in log.new_records():
                self._processes.record(name, record)
                progress = apply_log(progress, name, record)
        for record in self._metrics.new_records():
            progress = apply_metrics(progress, record)
        self._progress = progress


def _waiting_for_redis(problem: str | None) -> str:
    if not problem:
        return ""
    return f", waiting up to {REDIS_DEADLINE_S:.0f} s for it: {problem}; start it there, or correct redis.url"
