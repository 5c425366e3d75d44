"""The processes of a run on this machine: started by their placement, watched, and started again when they fail."""

import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.errors import CERTAIN, ConfigError, SlipstreamError
from slipstream.learner.metrics.starts import COMMAND_VARIABLE
from slipstream.rollout_servers.cli import PROCESS_VARIABLE
from slipstream.tools.launch.disk import is_full
from slipstream.tools.launch.placement import Placement, Role, Share
from slipstream.tools.launch.ports import choose_ports
from slipstream.tools.launch.restarts import MOST_ALIKE, Failure, learner_may_restart, restart_delay_s
from slipstream.tools.launch.secrets import withheld_from
from slipstream.tools.launch.standby import Standby
from slipstream.tools.launch.supervise import GRACE_S, Child, Supervisor, child_environment

MODULES: dict[Role, str] = {
    "buffer": "slipstream.buffer.cli",
    "rollout": "slipstream.rollout_servers.cli",
    "learner": "slipstream.learner.cli",
}
DASHBOARD = "dashboard"
QUOTED_LINES = 25
SOUND_S = 60.0
"""Redis and the buffer start in a second: those that lived for so long did their work."""
RANKS_GRACE_S = 5.0
"""Time for the other ranks to end when one has failed: without it they can't save their step."""


class ChildDied(SlipstreamError):
    """A child ended unexpectedly."""

    def __init__(self, child: Child, *, note: str = "") -> None:
        lines = child.last_lines(QUOTED_LINES) or [_no_output(child.console.parent)]
        quoted = "\n".join(f"  | {line}" for line in lines)
        super().__init__(
            f"{child.name} ended with {child.ending}{_kill_hint(child)}{note}; the last lines of {child.console}:\n"
            f"{quoted}"
        )


class RunProcesses:
    """Starts the processes of a run and keeps them running.

    A failure ends the run before the first step, when nothing has shown yet that it can work, or if it is certain to
    come again. Later a rollout server, the buffer and Redis are started again with growing delays. A rollout server
    that fails in the same way again and again stays down while another one lives. The learner is started again once
    for each checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        supervisor: Supervisor,
        *,
        started_at: float,
        standbys: Mapping[str, Standby] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            started_at: start of the run by the monotonic clock.
            standbys: processes that import already, by the names of those that they become.
        """
        self.placement = placement
        self._standbys = dict(standbys)
        self._config = config
        self._supervisor = supervisor
        self._started_at = started_at
        self._ranks = [share.name for share in placement.of("learner")]
        self._servers = {share.name for share in placement.of("rollout")}
        self._failures: dict[str, list[Failure]] = {}
        self._errors: dict[str, str] = {}
        """The last error that a process logged since its start."""
        self._due: dict[str, float] = {}
        """Time of the next start of each process that is down for now."""
        self._down: set[str] = set()
        """Rollout servers that stay down."""
        self.restarts: Counter[str] = Counter()
        """Number of further starts of each process."""

    @property
    def is_done(self) -> bool:
        """True once the learner's first rank, which writes what the run leaves, succeeded and the others ended."""
        children = [self._supervisor.children.get(name) for name in self._ranks]
        ended = all(rank is not None and rank.exit_code is not None for rank in children)
        return ended and self._has_succeeded

    @property
    def _has_succeeded(self) -> bool:
        root = self._supervisor.children.get(self._ranks[0])
        return root is not None and root.exit_code == 0

    def start_redis(self) -> None:
        """Starts the embedded server, if there is to be one."""
        for share in self.placement.of("redis"):
            self._start(share)

    def start_others(self, *, undo_steps: bool = False) -> None:
        """Starts the buffer and the rollout servers, if there are to be any, and the learner."""
        for role in ("buffer", "rollout"):
            for share in self.placement.of(role):
                self._start(share)
        self._start_learner(["--undo-steps"] if undo_steps else [])

    def start_dashboard(self) -> str:
        """Starts the dashboard over the run's folder; returns its address. Its end never ends the run."""
        from slipstream.tools.dashboard.command import PORT, listening

        try:
            listener = listening(PORT)
        except ConfigError:  # another dashboard serves there
            listener = listening(0)
        port = listener.getsockname()[1]
        listener.close()
        command = python("slipstream.tools.cli", "dashboard", self._config.paths.root, "--port", port)
        # As the buffer, it may need the password of Redis, and nothing else.
        self._supervisor.start(DASHBOARD, command, withheld=withheld_from("buffer", self._config))
        return f"http://127.0.0.1:{port}"

    def record(self, name: str, record: Mapping[str, Any]) -> None:
        """Takes note of a process's log record."""
        if record.get("level") in ("error", "critical"):
            self._errors[name] = str(record.get("error") or record.get("event"))

    def keep_running(self, *, step: int, now: float) -> list[str]:
        """Starts again what has failed; returns messages about it.

        Args:
            step: the latest that was reported since the processes were started; 0 before the first.
            now: by the monotonic clock.

        Raises: ChildDied when the run can't go on.
        """
        messages = []
        # If several ended, the one that started first is the likelier cause.
        for child in self._supervisor.ended():
            if child.name == DASHBOARD:
                self._supervisor.stop_together([DASHBOARD])  # what it has started
                messages.append(f"the dashboard ended with {child.ending} ({child.console}); the run goes on")
                continue
            is_replaced = self._supervisor.children.get(child.name) is not child
            is_done = child.name in self._ranks and (child.exit_code == 0 or self._has_succeeded)
            if not is_replaced and not is_done:
                messages.append(self._handle(child, step=step, now=now))
        for share in self.placement.shares:
            if share.name in self._due and self._due[share.name] <= now:
                del self._due[share.name]
                self.restarts[share.name] += 1
                self._start(share)
        return messages

    def _handle(self, child: Child, *, step: int, now: float) -> str:
        """Decides what follows from the end of a process; returns a message. Raises: ChildDied."""
        error = re.sub(r"\d+", "#", f"{child.ending}: {self._errors.get(child.name, '')}")
        failure = Failure(error, now - child.started_at, step, latest_checkpoint(self._config.paths.checkpoints))
        self._failures.setdefault(child.team, []).append(failure)
        failures = self._failures[child.team]
        if child.exit_code == CERTAIN or not step:
            raise ChildDied(child)
        if child.name in self._ranks:
            if not learner_may_restart(failures):
                raise ChildDied(child, note=" again, no further than before")
            return self._restart_learner(child, failure)
        sound_s = self._config.rollout.engine.start_deadline_s if child.name in self._servers else SOUND_S
        delay_s = restart_delay_s(failures, sound_s=sound_s)
        self._supervisor.stop_together([child.name])  # what it has started
        if delay_s is not None:
            self._due[child.name] = now + delay_s
            return f"{child.name} ended with {child.ending}; it is started again in {delay_s:g} s ({child.console})"
        self._down.add(child.name)
        if child.name not in self._servers or self._servers <= self._down:
            raise ChildDied(child, note=f", the {MOST_ALIKE}th time in a row")
        return (
            f"{child.name} stays down: it ended with {child.ending} {MOST_ALIKE} times in a row ({child.console}); the "
            "run goes on with the other rollout servers, and the same command starts all again"
        )

    def _restart_learner(self, child: Child, failure: Failure) -> str:
        self._supervisor.stop_together(self._ranks, grace_s=RANKS_GRACE_S)
        self.restarts["learner"] += 1
        self._start_learner([])
        return (
            f"{child.name} ended with {child.ending} after step {failure.step}; the learner continues from the "
            f"checkpoint of step {failure.checkpoint} ({child.console})"
        )

    def _start_learner(self, options: list[str]) -> None:
        port = choose_ports(1) if len(self._ranks) > 1 else None
        for share in self.placement.of("learner"):
            self._start(share, *options, rendezvous_port=port)

    def _start(self, share: Share, *options: str, rendezvous_port: int | None = None) -> None:
        from slipstream.tools.launch.redis import redis_command

        config, is_rank = self._config, share.role == "learner"
        if share.role == "redis":  # it has the password in a file
            command = redis_command(config.redis, config.paths.redis)
        else:
            command = python(MODULES[share.role], config.paths.config, *options)
        self._errors.pop(share.name, None)
        self._supervisor.start(
            share.name,
            command,
            {
                **self.placement.environment(share, rendezvous_port=rendezvous_port),
                "SLIPSTREAM_RUN_STARTED": repr(self._started_at),
                COMMAND_VARIABLE: shlex.join(sys.orig_argv),
                PROCESS_VARIABLE: share.name,
            },
            withheld=_withheld(share, config),
            # The learner first saves its step, for an unknown time: a second Ctrl-C kills it.
            grace_s=config.learner.wait_deadline_s if is_rank else GRACE_S,
            team=share.role if is_rank else None,
            cores=share.cores,
            ahead=self._standbys.pop(share.name, None),
        )


def start_ahead(config: RunConfig, placement: Placement, closing: ExitStack) -> dict[str, Standby]:
    """Lets the processes with slow imports import them; returns these by name. `closing` ends those never started."""
    return {
        share.name: closing.enter_context(
            Standby(
                MODULES[share.role],
                config,
                child_environment(
                    share.name,
                    {**placement.environment(share), PROCESS_VARIABLE: share.name},
                    withheld=_withheld(share, config),
                ),
            )
        )
        for share in (*placement.of("rollout"), *placement.of("learner"))
    }


def _withheld(share: Share, config: RunConfig) -> set[str]:
    return withheld_from(share.role, config, rank=share.index if share.role == "learner" else 0)


def python(module: str, *arguments: object) -> list[str]:
    """The command line that runs a module.

    -P: keeps the current folder off the module path. It may hold an `env` too, as the root of a checkout does, which
    would hide a plug-in on PYTHONPATH.
    """
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def latest_checkpoint(folder: Path) -> int:
    """Step of the latest complete checkpoint; 0 without."""
    return max(checkpoint_steps(folder), default=0)


def _kill_hint(child: Child) -> str:
    """The likely reason and the remedy for a child that SIGKILL ended."""
    if child.exit_code != -signal.SIGKILL:
        return ""
    return (
        " (probably killed by the kernel for lack of memory: see `dmesg`; the same command, without --fresh, "
        "continues the run)"
    )


def _no_output(folder: Path) -> str:
    """The line in place of the last lines of a child that printed nothing."""
    return f"(it printed nothing; the disk of {folder} is full)" if is_full(folder) else "(it printed nothing)"
