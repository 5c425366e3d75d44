"""RL training: lease groups, update the policy, publish its weights; the next groups are fetched meanwhile."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from slipstream.buffer.client import GroupReader, new_incarnation
from slipstream.buffer.wire.messages import EvalReport, Group
from slipstream.buffer.wire.weights.protocol import Probe
from slipstream.configs import RunConfig, agreement
from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.runtime.signals import StopRequested
from slipstream.configs.runtime.tracing import span
from slipstream.learner.checkpoint import TrainState, undoes_damaged_steps
from slipstream.learner.data.buffer_feed import Feed, StarvedError, StepData
from slipstream.learner.data.images import ImageReader
from slipstream.learner.metrics.action_trace import ActionTrace
from slipstream.learner.metrics.samples import SampleStore, choose, sources_of
from slipstream.learner.models.optim import DivergedError
from slipstream.learner.models.reproducibility import Surroundings
from slipstream.learner.step_records import StartRecord, StepRecord
from slipstream.learner.throttle import Throttle
from slipstream.learner.trainers.base import Trainer
from slipstream.learner.trainers.rl.evaluation import await_reports, engine_mismatch
from slipstream.learner.trainers.rl.parts import (
    RootServices,
    build_feed,
    build_prober,
    build_train_step,
    open_root_services,
    snapshot_taker,
)
from slipstream.learner.trainers.rl.step import TrainStep
from slipstream.learner.trainers.setup import RankSetup
from slipstream.learner.weights.snapshot import Prober, SnapshotTaker
from slipstream.models.architecture import vocabulary_size
from slipstream.models.device_memory import gpu_id
from slipstream.models.folder import model_fingerprint, model_problems

log = get_log("learner.loop")

NO_MEMBERS_WARNING_S = 60.0
EVALUATION_GROUPS = 4
"""Groups of an evaluation whose answers are candidates for the kept samples."""


@dataclass(frozen=True)
class RLState(TrainState):
    """The state of an RL training."""

    version: int = 0
    """Latest policy version that was published."""
    kl_coefficient: float | None = None
    """Coefficient of an adaptive KL penalty."""
    throttle: dict[str, float] = field(default_factory=dict)
    """State of the throttle (`Throttle.state`)."""


@dataclass(kw_only=True)
class RLTrainer(Trainer[StepData]):
    """One rank of an RL training.

    `run` raises: DeadlineError when buffer or rollout servers exceed a deadline, RefusedError when they refuse,
    DivergedError when training has ruined a model.
    """

    state: RLState = field(default_factory=RLState)
    train_step: TrainStep
    feed: Feed
    read_groups: Callable[[Sequence[str]], list[Group]]
    """Reads an evaluation's answers, by the ids of their groups."""
    snapshots: SnapshotTaker
    prober: Prober
    """Scores a few tokens: a policy with log-probs that are not finite is neither published nor saved, and servers
    verify versions by them."""
    throttle: Throttle | None = field(init=False)
    root: RootServices | None
    """None on all ranks but 0."""
    published_step: int = 0
    """Training steps of the weights that `state.version` names."""
    evaluation_due: bool = False
    undo_steps: bool = False
    """Undo steps that a checkpoint of the run contains, but not the one that was loaded."""
    _no_members: LogInterval = field(default_factory=lambda: LogInterval(NO_MEMBERS_WARNING_S))

    @classmethod
    def problems(cls, config: RunConfig) -> Sequence[str]:
        """Reasons why a run can't be started, found before the ranks have joined."""
        return [*config.rl_problems(), *model_problems(config.model, config.learner)]

    @classmethod
    def rank_settings(cls, config: RunConfig) -> dict[str, str]:
        """Settings that all ranks must share, by name."""
        return agreement.rl_rank_settings(config)

    @classmethod
    def root_waits_s(cls, config: RunConfig) -> float:
        """Longest wait of rank 0 for the buffer, Redis and the last evaluation."""
        return config.redis.outage_deadline_s + config.eval.deadline_s

    @classmethod
    def from_setup(cls, setup: RankSetup) -> Self:
        """The trainer of a rank; a collective.

        Raises: ConfigError when an address is taken, the batch does not divide among the ranks, a model can't be
        trained, or there is no room for the only transport that may be used.
        """
        config, path, world, incarnation = setup.config, setup.initial_model, setup.world, new_incarnation()
        feed = build_feed(config, path, world, incarnation, setup.signals, images=ImageReader.of(path))
        setup.cleanup.callback(feed.close)
        gpus = world.gather(gpu_id(world.device))
        root = open_root_services(setup, incarnation, gpus) if world.is_root else None
        train_step = build_train_step(config, path, world)
        feed.sharing = train_step.sharing
        snapshots = snapshot_taker(
            train_step.model,
            config.weights,
            run=config.run.name,
            dtype=getattr(torch, config.model.dtype_here),
            device=world.device,
            publisher=None if root is None else root.publisher,
        )
        setup.cleanup.callback(snapshots.close)
        return cls(
            config=config,
            initial_model=path,
            world=world,
            reporter=None if root is None else root.reporter,
            signals=setup.signals,
            train_step=train_step,
            feed=feed,
            # Connects only when it is needed.
            read_groups=lambda ids: GroupReader(config.redis, run=config.run.name).read(ids),
            snapshots=snapshots,
            prober=build_prober(config.rollout.engine, train_step.model, world),
            root=root,
            undo_steps=setup.undo_steps,
        )

    def __post_init__(self) -> None:
        throttle, max_staleness = self.config.learner.throttle, self.config.buffer.max_staleness
        self.throttle = None if throttle is None else Throttle(throttle, max_staleness)

    @property
    def models(self) -> TrainStep:
        """Policy and critic."""
        return self.train_step

    def start(self, *, resumed: bool) -> None:
        """Announces the learner to the buffer, publishes the weights of a resumed run and fetches the first groups."""
        if resumed:
            self._restore_controllers()
            if self.root is not None:
                self.root.reporter.continued(self.state.step, self.state.version)
        latest = self._latest_version()
        self._record_start()
        if self.throttle is not None:
            self._apply_throttle(self.throttle)
        elif self.root is not None:  # an earlier start of the run may have had one
            self.root.buffer.throttle(self.config.buffer.max_staleness)
        if not resumed and latest == 0:
            if self.root is not None:
                self.root.buffer.published(0, evaluate=self.evaluates_after(0))
        else:
            self._publish_resumed(latest)
        if self.state.step < self.config.learner.steps:
            self.feed.prefetch(self.state.step, consuming_version=self.state.version)

    def next_batch(self) -> StepData:
        """The groups of the next step.

        Raises: StarvedError when there are none, and a checkpoint frees no room for them; StopRequested.
        """
        try:
            return self.feed.take(self._while_waiting)
        except StarvedError as error:
            if not self.save_unsaved_steps():
                raise
            # Redis keeps groups until a checkpoint has their step: if it was full of these, it has room now.
            log.warning("waiting once more: a checkpoint may have made room in Redis", reason=str(error))
        self.feed.prefetch(self.state.step, consuming_version=self.state.version)
        return self.feed.take(self._while_waiting)

    def update(self, batch: StepData) -> dict[str, float]:
        """Trains on the groups, while those of the next step are fetched."""
        done = self.state.step + 1
        if done < self.config.learner.steps:
            self.feed.prefetch(done, consuming_version=self.state.version + self._publishes_after(done))
        unpublished_steps = self.state.step - self.published_step
        kl_coefficient = None if self.train_step.kl is None else self.train_step.kl.value
        if self.root is None:
            metrics = self.train_step.run(batch, unpublished_steps=unpublished_steps)
        else:
            chosen = choose(batch.trajectories, seed=done)
            traced = ActionTrace({row: batch.trajectories[row] for row in chosen.values()})
            try:
                metrics = self.train_step.run(batch, unpublished_steps=unpublished_steps, traced=traced)
            finally:  # also when the step shows that training diverged
                self.root.samples.keep(
                    "step", done, batch.trajectories, batch.sources, chosen=chosen, actions=traced.columns()
                )
        checksum = self.train_step.checksum()
        if self.root is not None and batch.lease is not None:
            record = StepRecord(
                step=done,
                groups=batch.lease.ids,
                importance_weights=batch.lease.importance_weights,
                oldest_version=batch.lease.oldest_version,
                staleness=batch.lease.staleness,
                consuming_version=batch.consuming_version,
                unpublished_steps=unpublished_steps,
                lr_scale=self.train_step.lr_scale,
                kl_coefficient=kl_coefficient,
                checksum=checksum,
            )
            self.root.records.append(record)
        return metrics

    def after_update(self, metrics: Mapping[str, float]) -> Mapping[str, float | int]:
        """Counts the groups as trained, moves the throttle and publishes the weights."""
        started = time.perf_counter()
        with span("report", of=("step", self.state.step)):
            further = self._report_step(metrics)
        step = self.state.step
        self.evaluation_due |= self.evaluates_after(step)
        if self._publishes_after(step):
            with span("publish", version=self.state.version + 1):
                self._publish(evaluate=self.evaluation_due)
            self.evaluation_due = False
        if self.root is not None:
            further |= self.root.reporter.sync_metrics()
        return {**further, "policy_version": self.state.version, "publish_s": time.perf_counter() - started}

    def require_sound_model(self) -> None:
        """Raises: DivergedError, on all ranks, when the policy's log-probs are not finite."""
        if self.state.step > self.published_step:  # otherwise they were probed then
            self._probe()

    def state_to_save(self) -> RLState:
        """The state, with that of KL controller and throttle."""
        return replace(
            self.state,
            kl_coefficient=None if self.train_step.kl is None else self.train_step.kl.value,
            throttle={} if self.throttle is None else self.throttle.state(),
        )

    def checkpoint_saved(self, step: int) -> None:
        """Marks the groups up to this step as durable."""
        if self.root is not None:
            self.root.buffer.checkpointed(step)

    def finish(self) -> None:
        """Waits for the last publication and evaluation, ends the run in the buffer and writes the summary."""
        if self.root is not None:
            self.root.publisher.wait()
        if self.config.eval.tasks:
            self._last_evaluation()
        if self.root is not None:
            ledger = self.root.buffer.finish()
            self.root.reporter.finish(
                ledger,
                self.config.paths,
                step=self.state.step,
                version=self.state.version,
                uploads=None if self.uploads is None else dict(self.uploads.counts),
            )

    def evaluates_after(self, step: int) -> bool:
        """True if the weights after `step` steps are evaluated: at both ends and at the interval."""
        every = self.config.eval.every_steps
        if not self.config.eval.tasks:
            return False
        return step == 0 or step >= self.config.learner.steps or (every > 0 and step % every == 0)

    def _publishes_after(self, step: int) -> bool:
        # Counted from the last publication: also after a restart versions are equally many steps apart.
        every = self.config.weights.publish_every_steps
        return step == self.config.learner.steps or step - self.published_step >= every

    def _while_waiting(self) -> None:
        """Repeats what Redis may have lost and warns if weights reach no server: the groups may wait for these."""
        if self.root is None:
            return
        try:
            self.root.buffer.repeat_reports()
            state = self.root.buffer.state()
        except DeadlineError:
            if not self.signals.number:
                raise
            return
        self.root.reporter.observe(state, step=self.state.step)
        publisher, weights, servers = self.root.publisher, self.config.weights, len(state.servers)
        if servers and not publisher.metrics.members and not publisher.without_engine and self._no_members.due():
            log.warning(
                "NO ROLLOUT SERVER GETS WEIGHTS: some are connected to the buffer, none has joined this learner",
                servers=servers,
                remedy=f"let them reach weights.host:weights.control_port ({weights.host}:{weights.control_port})",
            )

    def _report_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Counts the step's groups as trained in the ledger, and reports; returns metrics of throttle and buffer.

        Raises: StopRequested, on all ranks, on a stop signal while the buffer is away. The buffer counts the step when
        a learner starts from the checkpoint that has it.
        """
        further, stop, step = dict[str, float](), 0, self.state.step
        try:
            if self.throttle is not None:
                further |= self._observe(self.throttle, metrics)
            if self.root is not None:
                ledger, reporter = self.root.buffer.trained(step - 1), self.root.reporter
                further |= reporter.rollout_metrics(ledger, step=step)
                reporter.check_step(step, metrics)
                reports = self.root.buffer.take_evals()
                reporter.evaluated(step, reports)
                self._keep_answers(self.root.samples, reports)
        except DeadlineError:
            if not self.signals.number:
                raise
            stop = self.signals.number
        stop = self.world.from_root(stop)
        if stop:
            raise StopRequested(stop)
        return further

    def _observe(self, throttle: Throttle, metrics: Mapping[str, float]) -> dict[str, float]:
        """Passes a step's metrics to the throttle, applies its action, and returns its state as metrics."""
        action = throttle.observe(metrics)
        if action is not None:
            log.warning(
                "throttle moves",
                event_kind="throttle",
                step=self.state.step,
                direction=action.direction,
                cause=action.cause,
                max_staleness=action.max_staleness,
                lr_scale=action.lr_scale,
            )
            self._apply_throttle(throttle)
        return {"throttle/max_staleness": throttle.max_staleness, "throttle/lr_scale": throttle.lr_scale}

    def _apply_throttle(self, throttle: Throttle) -> None:
        self.train_step.lr_scale = throttle.lr_scale
        if self.root is not None:
            self.root.buffer.throttle(throttle.max_staleness)

    def _publish(self, *, evaluate: bool) -> None:
        probe = self._probe()
        version = self.state.version + 1
        self.state = replace(self.state, version=version)
        self.published_step = self.state.step
        if self.root is not None:
            self.root.publisher.reclaim()
            # The buffer first: a server may report the version as soon as it is sent.
            self.root.buffer.published(version, evaluate=evaluate)
        verified_by = probe if self.config.weights.verify else None
        snapshot = self.snapshots.take(version, evaluate=evaluate, keep=self.world.is_root, probe=verified_by)
        if self.root is not None and snapshot is not None:
            self.root.publisher.publish(snapshot)

    def _publish_resumed(self, latest: int) -> None:
        """Publishes the weights of a checkpoint as a version newer than `latest`, the buffer's newest.

        Weights of that version exist nowhere else: whatever the servers hold came from steps that are undone.
        """
        self.state = replace(self.state, version=max(latest, self.state.version))
        log.info("continuing", step=self.state.step, policy_version=self.state.version + 1)
        if self.state.step > self.config.learner.steps:
            log.warning(
                "the checkpoint has more steps than learner.steps: the run ends with it",
                step=self.state.step,
                steps=self.config.learner.steps,
            )
        # Only the final evaluation is waited for; interrupted earlier ones are not repeated.
        last = self.state.step >= self.config.learner.steps
        self._publish(evaluate=last and self.evaluates_after(self.state.step))

    def _probe(self) -> Probe:
        """The policy's log-probs of a few tokens. Raises: DivergedError, on all ranks, when they are not finite."""
        probe = self.prober.score()
        if torch.tensor(probe.logprobs).isfinite().all():
            return probe
        step, folder = self.state.step, self.config.paths.checkpoints
        saved = checkpoint_steps(folder)
        if step in saved:  # by an earlier start
            remedy = f"move its checkpoint in {folder} away, and start again with --undo-steps"
        else:
            before = f"the checkpoint of step {saved[-1]}" if saved else "its beginning"
            remedy = f"start again: the run goes on from {before}"
        raise DivergedError(
            f"after step {step} the policy's own log-probs are not finite ({self.train_step.skipped.count} updates "
            f"were skipped since the learner's start): lower learner.optimizer.lr, and {remedy}"
        )

    def _restore_controllers(self) -> None:
        if self.train_step.kl is not None and self.state.kl_coefficient is not None:
            self.train_step.kl.restore(self.state.kl_coefficient)
        if self.throttle is not None and self.state.throttle:
            self.throttle.restore(self.state.throttle)

    def _record_start(self) -> None:
        """Records settings and surroundings of the steps that follow; a collective."""
        start = StartRecord(
            time_s=time.time(),
            step=self.state.step,
            checksum=self.train_step.checksum(),
            config=self.config.model_dump(mode="json"),
            surroundings=Surroundings.here(ranks=self.world.size, device=self.world.device),
        )
        if self.root is not None:
            self.root.records.append(start)

    def _latest_version(self) -> int:
        """The buffer's latest policy version, on all ranks; announces this learner."""
        if self.root is not None:
            model = model_fingerprint(self.initial_model)
            tokens = vocabulary_size(self.initial_model)
            undo = self.undo_steps or undoes_damaged_steps(self.config.paths.checkpoints, self.state.step)
            state = self.root.buffer.hello(
                self.state.step, version=self.state.version, model=model, vocab_size=tokens, undo=undo
            )
            self.world.store.set("version", str(state.version))
        return int(self.world.store.get("version"))

    @property
    def _evaluation_temperature(self) -> float:
        """Engines report log-probs of greedy answers under the unscaled distribution."""
        return self.train_step.sampling.temperature if self.config.eval.samples > 1 else 1.0

    def _keep_answers(self, samples: SampleStore, reports: Sequence[EvalReport]) -> None:
        """Keeps a few answers of each evaluation."""
        for report in reports:
            try:
                groups = self.read_groups(report.group_ids[:EVALUATION_GROUPS])
            except SlipstreamError as error:
                log.warning("answers of an evaluation not kept", policy_version=report.version, reason=str(error))
            else:
                trajectories = [trajectory for group in groups for trajectory in group.trajectories]
                sources = [each for group in groups for each in sources_of(group, samples=self.config.eval.samples)]
                samples.keep("eval", report.version, trajectories, sources)

    def _last_evaluation(self) -> None:
        """Waits for it; these weights generated its answers, so they show the mismatch of engine and learner."""
        version = self.state.version
        reports: list[EvalReport] = []
        if self.root is not None:
            reports = await_reports(self.root.buffer, version, deadline_s=self.config.eval.deadline_s)
        last = [report for report in reports if report.version == version]
        ids = self.world.from_root([group_id for report in last for group_id in report.group_ids])
        metrics = {}
        if ids:
            metrics = engine_mismatch(
                self.train_step.model,
                self.read_groups(ids),
                version=version,
                token_budget=self.config.learner.token_budget,
                temperature=self._evaluation_temperature,
                device=self.world.device,
                images=self.feed.images,
            )
        if self.root is not None:
            earlier = [report for report in reports if report.version != version]
            self.root.reporter.evaluated(self.state.step, earlier)
            self.root.reporter.evaluated(self.state.step, last, metrics)
            self._keep_answers(self.root.samples, reports)
