"""A run in the actors of a Ray cluster: placed, watched, and placed again when processes or nodes fail."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from slipstream.configs import RunConfig
from slipstream.configs.runtime.errors import CERTAIN, ConfigError, DeadlineError, SlipstreamError
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.configs.runtime.signals import StopSignals
from slipstream.rollout_servers.cli import PROCESS_VARIABLE
from slipstream.tools.clusters import ray_holder
from slipstream.tools.clusters.roles import RENDEZVOUS, Role, cluster_settings, rank_environment
from slipstream.tools.follow import JsonLinesFollower
from slipstream.tools.launch.ports import FIRST, LAST
from slipstream.tools.launch.preflight import keys_folder
from slipstream.tools.launch.processes import QUOTED_LINES, RANKS_GRACE_S, SOUND_S, latest_checkpoint
from slipstream.tools.launch.progress import Plan, Progress, apply_metrics
from slipstream.tools.launch.restarts import MOST_ALIKE, Failure, learner_may_restart, restart_delay_s
from slipstream.tools.launch.screens import Screen

PLACE_S: Final = 600.0
"""Time for the cluster to have room for the learner."""
ANSWER_S: Final = 60.0
POLL_S: Final = 0.5
PASSED: Final = ("PYTHONPATH", "HF_HOME", "HF_TOKEN")
"""Variables that the processes get from the command's environment, besides secrets; all others are the nodes'."""
Codes = Mapping[str, int | None]


class RunFailed(SlipstreamError):
    """The run can't go on."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class NodeLost(SlipstreamError):
    """A node on which all depend was lost: that of Redis and buffer, or one of the learner."""


@dataclass
class Seat:
    """An actor and the processes that it holds."""

    name: str
    role: Role
    actor: Any
    processes: tuple[str, ...]
    starts: list[Any] = field(default_factory=list)
    """Calls that start processes, without an answer: of an actor for which there is no room yet, too."""
    poll: Any = None
    """Call that asks for the exit codes."""
    codes: Codes = field(default_factory=dict)
    """Latest exit codes of its processes."""
    is_lost: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def has_ended(self) -> bool:
        """True if no process runs in it any more."""
        return self.is_lost or all(self.codes.get(name) is not None for name in self.processes)


def _resources(role: Role, processes: int) -> dict[str, float]:
    """Resources of a bundle with so many of a role's processes."""
    gpus = {"GPU": role.gpus * processes} if role.gpus else {}
    return {"CPU": role.cpus * processes, **gpus}


class RayRun:
    """The processes of a run in actors: Redis with the buffer and the learner in a placement group, servers anywhere.

    A rollout server that fails, or whose node is lost, is placed again with growing delays; one that fails in the same
    way again and again stays down while another one lives. Redis and buffer are started again where they are. The
    learner is started again once for each checkpoint, and everything is placed anew when its node or theirs is lost.
    """

    def __init__(
        self,
        ray: Any,
        config: RunConfig,
        roles: Sequence[Role],
        signals: StopSignals,
        screen: Screen,
        *,
        python: str,
    ) -> None:
        self._ray = ray
        self._config = config
        self._roles = {role.name: role for role in roles}
        self._signals = signals
        self._python = python
        self._password = os.environ.get(REDIS_PASSWORD_VARIABLE) or secrets.token_urlsafe()
        self._settings: tuple[str, ...] = ()
        self._seats: dict[str, Seat] = {}
        self._group: Any = None
        self._due: dict[str, float] = {}
        self._failures: dict[str, list[Failure]] = {}
        self._down: set[str] = set()
        self._metrics = JsonLinesFollower(config.paths.metrics)
        plan = Plan(config.run.name, config.learner.steps, config.buffer.max_staleness, config.eval.reward)
        self._progress = Progress(plan, stage="starting the engine and the learner")
        self._screen = screen
        self._started_at = time.monotonic()

    def run(self) -> int:
        """Runs to the end; returns the exit code of the command."""
        try:
            while True:
                placed_at = time.monotonic()
                try:
                    self._place_core()
                    with self._screen:
                        return self._stop_all(self._watch())
                except NodeLost as error:
                    self._record("nodes", str(error), lived_s=time.monotonic() - placed_at)
                    print(f"{error}: all processes are placed again", flush=True)
                    self._stop(list(self._seats.values()), grace_s=RANKS_GRACE_S)
        except RunFailed as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return self._stop_all(error.code)

    # --- start ---

    def _place_core(self) -> None:
        """Places Redis, buffer and learner, then starts everything. Raises: RunFailed; DeadlineError; ConfigError."""
        from ray.util import placement_group, remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        self._seats.clear()
        self._due.clear()
        learner = self._roles["learner"]
        services = [self._roles[name] for name in ("redis", "buffer") if name in self._roles]
        bundles: list[dict[str, float]] = [{"CPU": sum(role.cpus for role in services)}]
        bundles += [_resources(learner, learner.per_node)] * learner.nodes
        self._group = placement_group(bundles, strategy="PACK")
        self._wait_for_room(bundles)
        self._seat("services", services[-1], tuple(role.name for role in services), bundle=0)
        names = ["learner" if rank == 0 else f"learner-{rank}" for rank in range(learner.processes)]
        for node in range(learner.nodes):
            ranks = names[node * learner.per_node : (node + 1) * learner.per_node]
            self._seat(f"learner node {node}", learner, tuple(ranks), bundle=1 + node)
        self._find_addresses()
        for role in services:
            self._launch(self._seats["services"], role, role.name)
        self._launch_learner()
        for index in range(self._roles["rollout"].processes):
            self._launch_server(f"rollout-{index}" if index else "rollout")

    def _wait_for_room(self, bundles: Sequence[Mapping[str, float]]) -> None:
        """Raises: DeadlineError; RunFailed at a signal."""
        ready, deadline = self._group.ready(), time.monotonic() + PLACE_S
        if not self._ray.wait([ready], timeout=ANSWER_S / 10)[0]:
            print(f"waiting up to {PLACE_S:g} s for room in the cluster", flush=True)
        while not self._ray.wait([ready], timeout=POLL_S)[0]:
            if self._signals.received:
                raise RunFailed("stopped while the cluster had no room", 128 + self._signals.received[0])
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the cluster had no room for {' + '.join(map(str, bundles))} within {PLACE_S:g} s; it has "
                    f"{self._ray.available_resources()} free: stop other jobs, add nodes, or lower learner.ranks"
                )

    def _seat(self, name: str, role: Role, processes: tuple[str, ...], *, bundle: int | None = None) -> Seat:
        """An actor, as soon as there is room for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy: Any = "SPREAD"
        cpus, gpus = role.cpus * len(processes), role.gpus * len(processes)
        if bundle is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}
        actor = self._ray.remote(ray_holder.Holder).options(**options).remote()
        self._seats[name] = Seat(name, role, actor, processes)
        return self._seats[name]

    def _find_addresses(self) -> None:
        """Sets the settings with which the processes find each other. Raises: ConfigError; SlipstreamError."""
        services, root = self._seats["services"], self._seats["learner node 0"]
        hosts = [self._call(seat, "node") for seat in (services, root)]
        files = [str(Path.cwd()), str(self._config.paths.config.absolute()), self._python]
        for seat in self._seats.values():
            if missing := self._call(seat, "missing", files):
                raise ConfigError(
                    f"the node of {seat.name} has no {', '.join(missing)}: run.dir, the working directory and --python "
                    "must be at the same place on all nodes"
                )
        ports: dict[str, int] = {}
        for seat, host, names in (
            (services, hosts[0], [name for name in ("redis", "buffer") if name in self._roles]),
            (root, hosts[1], ["learner"]),
        ):
            keys = [key for name in names for key in self._roles[name].ports]  # type: ignore[index]
            ports |= zip(keys, self._free_ports(seat, host, len(keys)), strict=True)
        ports.pop(RENDEZVOUS, None)
        host = {"redis_host": hosts[0], "buffer_host": hosts[0], "learner_host": hosts[1]}
        settings = cluster_settings(self._config, **host, bind=None, ports=ports)
        self._root = hosts[1]
        self._settings = (*settings, f"security.keys={keys_folder(self._config)}")
        print(f"redis and buffer on {hosts[0]}, learner on {hosts[1]}", flush=True)

    def _free_ports(self, seat: Seat, host: str, count: int) -> list[int]:
        """Raises: SlipstreamError when the node has none."""
        ports: list[int] = self._call(seat, "free_ports", host, count, FIRST, LAST)
        if not ports:
            raise SlipstreamError(f"no {count} consecutive free ports on {host} between {FIRST} and {LAST}: free some")
        return ports

    def _launch(self, seat: Seat, role: Role, name: str, variables: Mapping[str, str] | None = None) -> None:
        """Starts a process in a seat, once its actor runs."""
        secret = {**os.environ, REDIS_PASSWORD_VARIABLE: self._password}
        passed = {key: secret[key] for key in (*PASSED, *role.secrets) if key in secret}
        withheld = {key for other in self._roles.values() for key in other.secrets} - set(role.secrets)
        guard = ("-P", "-m", "slipstream.configs.runtime.processes", f"SLIPSTREAM_HELD={name}-{{parent}}", "{parent}")
        own = (self._python, "-P", "-m", role.module, str(self._config.paths.config.absolute()), *self._settings)
        call = seat.actor.start.remote(
            name,
            [self._python, *guard, *own],
            {**passed, **role.environment, PROCESS_VARIABLE: name, **(variables or {})},
            withheld=sorted(withheld),
            folder=str(Path.cwd()),
            console=str(self._console(name)),
        )
        seat.starts.append(call)
        seat.poll = None  # its answer would be from before
        seat.codes = {**seat.codes, name: None}
        seat.began = time.monotonic()

    def _launch_learner(self) -> None:
        learner, port = self._roles["learner"], 0
        if learner.processes > 1:
            port = self._free_ports(self._seats["learner node 0"], self._root, 1)[0]
        for seat in self._of("learner"):
            for name in seat.processes:
                rank = int(name.partition("-")[2] or 0)
                size = {"ranks": learner.processes, "per_node": learner.per_node}
                variables = rank_environment(rank=rank, **size, host=self._root, port=port) if port else {}
                self._launch(seat, learner, name, variables)

    def _launch_server(self, name: str) -> None:
        role = self._roles["rollout"]
        self._launch(self._seat(name, role, (name,)), role, name)

    # --- watch ---

    def _watch(self) -> int:
        """Keeps the processes running until the learner ends or a signal comes; returns the exit code of the command.

        Raises: RunFailed; NodeLost.
        """
        while not self._signals.received:
            self._poll(POLL_S)
            self._show_progress()
            if self._is_done:
                return 0
            core = [*self._of("redis", "buffer"), *self._of("learner")]
            if lost := [seat.name for seat in core if seat.is_lost]:
                raise NodeLost(f"the node of {lost[0]} was lost")
            for seat in core:
                self._mend(seat)
            for seat in self._of("rollout"):
                if seat.has_ended and seat.name not in self._due and seat.name not in self._down:
                    self._replace_server(seat)
            for name in [name for name, due in self._due.items() if due <= time.monotonic()]:
                del self._due[name]
                if name in self._seats and self._seats[name].role.name == "rollout":
                    self._ray.kill(self._seats[name].actor)
                    self._launch_server(name)
                else:
                    self._launch(self._seats["services"], self._roles[name], name)  # type: ignore[index]
        print("stopping: learner (it saves its step), rollout servers, buffer, redis", flush=True)
        return 128 + self._signals.received[0]

    @property
    def _is_done(self) -> bool:
        """True once the learner's first rank succeeded and the others ended."""
        seats = self._of("learner")
        return seats[0].codes.get("learner") == 0 and all(seat.has_ended for seat in seats)

    def _of(self, *roles: str) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.role.name in roles]

    def _mend(self, seat: Seat) -> None:
        """Starts again what failed in a seat of the services or the learner. Raises: RunFailed; NodeLost."""
        failed = {name: code for name, code in seat.codes.items() if code is not None and name not in self._due}
        if seat.role.name != "learner":
            for name, code in failed.items():
                self._restart_later(name, f"exit code {code}", seat, code, sound_s=SOUND_S)
            return
        has_succeeded = self._seats["learner node 0"].codes.get("learner") == 0
        name, code = next(((name, code) for name, code in failed.items() if code), ("", 0))
        if not code or has_succeeded:
            return
        failures, steps = self._failures.setdefault("learner", []), self._progress.steps_done
        saved = latest_checkpoint(self._config.paths.checkpoints)
        failures.append(Failure(f"exit code {code}", time.monotonic() - seat.began, steps, saved))
        if code == CERTAIN or not steps or not learner_may_restart(failures):
            raise RunFailed(self._with_last_lines(name, f"exit code {code}"), max(1, code))
        print(f"{name}: exit code {code}; the learner continues from the checkpoint of step {saved}", flush=True)
        self._stop(self._of("learner"), grace_s=RANKS_GRACE_S)
        self._launch_learner()

    def _replace_server(self, seat: Seat) -> None:
        """Decides when a rollout server that has left, failed or was lost is placed again. Raises: RunFailed."""
        code = None if seat.is_lost else seat.codes.get(seat.name)
        error = "its node was lost" if seat.is_lost else "it left" if code == 0 else f"exit code {code}"
        self._restart_later(seat.name, error, seat, code, sound_s=self._config.rollout.engine.start_deadline_s)

    def _restart_later(self, name: str, error: str, seat: Seat, code: int | None, *, sound_s: float) -> None:
        """Decides when a process is started again, or that it stays down. Raises: RunFailed."""
        delay_s = self._record(name, error, lived_s=time.monotonic() - seat.began, sound_s=sound_s)
        is_certain = code == CERTAIN or (code and not self._progress.steps_done)
        if delay_s is not None and not is_certain:
            self._due[name] = time.monotonic() + delay_s
            print(f"{name}: {error}; it is started again in {delay_s:g} s ({self._console(name)})", flush=True)
            return
        self._down.add(name)
        servers = {server.name for server in self._of("rollout")}
        if name not in servers or servers <= self._down or is_certain:
            raise RunFailed(self._with_last_lines(name, error), max(1, code or 1))
        print(f"{name} stays down: {error}, {MOST_ALIKE} times in a row ({self._console(name)})", flush=True)

    def _record(self, name: str, error: str, *, lived_s: float, sound_s: float = SOUND_S) -> float | None:
        """The delay of the next start after a failure; None: too many alike. Raises: RunFailed for nodes."""
        failures = self._failures.setdefault(name, [])
        failures.append(Failure(error, lived_s, self._progress.steps_done))
        delay_s = restart_delay_s(failures, sound_s=sound_s)
        if delay_s is None and name == "nodes":
            raise RunFailed(f"{error}, {MOST_ALIKE} times in a row")
        return delay_s

    def _poll(self, timeout_s: float) -> None:
        """Asks all actors for the exit codes of their processes; those that don't answer keep their last ones."""
        seats = [seat for seat in self._seats.values() if not seat.is_lost]
        for seat in seats:
            if seat.poll is None:
                seat.poll = seat.actor.exit_codes.remote()
        self._signals.wait(timeout_s)
        calls = [call for seat in seats for call in (*seat.starts, seat.poll)]
        ready = set(self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]) if calls else set()
        for seat in seats:
            try:
                for call in ready.intersection(seat.starts):
                    seat.starts.remove(call)
                    self._ray.get(call)
                if seat.poll in ready:
                    seat.codes, seat.poll = self._ray.get(seat.poll), None
            except self._ray.exceptions.RayActorError:
                seat.is_lost = True
            except self._ray.exceptions.RayTaskError as error:
                raise RunFailed(f"{seat.name} can't be started: {error.cause}") from None

    def _call(self, seat: Seat, method: str, *arguments: object) -> Any:
        """The answer of an actor. Raises: NodeLost when it has ended or gives none in time."""
        try:
            return self._ray.get(getattr(seat.actor, method).remote(*arguments), timeout=ANSWER_S)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            raise NodeLost(f"the actor of {seat.name} gives no answer") from None

    def _show_progress(self) -> None:
        self._progress = replace(self._progress, elapsed_s=time.monotonic() - self._started_at)
        for record in self._metrics.new_records():
            self._progress = apply_metrics(self._progress, record)
        self._screen.show(self._progress)

    def _console(self, name: str) -> Path:
        return self._config.paths.logs.absolute() / f"{name}.console"

    def _with_last_lines(self, name: str, error: str) -> str:
        """The message, with the last lines of the process."""
        file = self._console(name)
        lines = file.read_text(errors="replace").splitlines()[-QUOTED_LINES:] if file.exists() else []
        return "\n".join([f"{name}: {error}; the last lines of {file}:", *(f"  | {line}" for line in lines)])

    # --- end ---

    def _stop_all(self, code: int) -> int:
        """Stops the learner, which saves its step, then the rollout servers, then buffer and Redis; returns `code`."""
        learner, others = self._of("learner"), self._of("rollout")
        if learner:
            self._stop(learner, grace_s=learner[0].role.grace_s)
        self._stop(others, grace_s=self._roles["rollout"].grace_s)
        self._stop(self._of("buffer"), grace_s=self._roles["buffer"].grace_s)
        if code > 128:
            print("stopped; the same command continues the run", flush=True)
        return code

    def _stop(self, seats: Sequence[Seat], *, grace_s: float) -> None:
        """Ends the processes in order; at the deadline, or at another signal, by SIGKILL."""
        stops, deadline = self._signals.stop_count, time.monotonic() + grace_s
        for seat in seats:
            if seat.starts:  # there was no room for it
                self._ray.kill(seat.actor)
                seat.is_lost = True
            elif not seat.is_lost:
                seat.actor.signal.remote(int(signal.SIGTERM))
        while not all(seat.has_ended for seat in seats):
            if time.monotonic() > deadline or self._signals.stop_count > stops:
                for seat in seats:
                    if not seat.is_lost:
                        seat.actor.signal.remote(int(signal.SIGKILL))
                return
            self._poll(POLL_S)
