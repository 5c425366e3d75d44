"""The training loop: take groups, train, publish, checkpoint; the next groups are fetched meanwhile."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from slipstream.buffer.client.groups import GroupReader
from slipstream.buffer.client.learner import BufferClient
from slipstream.buffer.wire.messages import EvalReport
from slipstream.buffer.wire.weights.protocol import Probe
from slipstream.configs import RunConfig
from slipstream.configs.paths import checkpoint_steps
from slipstream.configs.runtime.errors import DeadlineError, SlipstreamError
from slipstream.configs.runtime.logging import LogInterval, get_log
from slipstream.configs.runtime.signals import GracefulStop, StopRequested
from slipstream.learner.checkpoint import Progress, export_model, load_checkpoint, save_checkpoint
from slipstream.learner.data.buffer_feed import Feed, StarvedError, StepData
from slipstream.learner.metrics.reporter import Reporter
from slipstream.learner.models.identity import model_fingerprint
from slipstream.learner.optim import DivergedError
from slipstream.learner.parallel.mesh import World
from slipstream.learner.throttle import Throttle
from slipstream.learner.trainers.evaluation import await_reports, engine_mismatch
from slipstream.learner.trainers.step import Trainer
from slipstream.learner.weights.probe import Prober
from slipstream.learner.weights.publisher import WeightPublisher
from slipstream.learner.weights.snapshot import SnapshotTaker

log = get_log("learner.loop")

UNREACHED_EVERY_S = 60.0


@dataclass
class Root:
    """What only rank 0 has: the buffer's ear, the rollout servers', and the trackers."""

    buffer: BufferClient
    publisher: WeightPublisher
    reporter: Reporter


@dataclass
class Loop:
    """One learner rank."""

    config: RunConfig
    world: World
    trainer: Trainer
    feed: Feed
    snapshots: SnapshotTaker
    initial_model: Path
    """Where the initial weights came from; the exported model takes its tokenizer from there."""
    root: Root | None
    """None on all ranks but 0."""
    prober: Prober
    """Scores a few tokens: a policy that can't is neither published nor saved, and servers verify versions with it."""
    throttle: Throttle | None = None
    signals: GracefulStop = field(default_factory=GracefulStop)
    progress: Progress = field(default_factory=Progress)
    weights_published: bool = True
    """Whether the present weights are those of `progress.version`."""
    saved_step: int = 0
    """Of the latest checkpoint."""
    checkpoint_due: bool = False
    evaluation_due: bool = False
    unreached: LogInterval = field(default_factory=lambda: LogInterval(UNREACHED_EVERY_S))
    """When it is to be said that weights reach no server."""

    def run(self) -> None:
        """Trains from the latest checkpoint to the last step.

        Raises: DeadlineError when buffer or rollout servers keep it waiting too long, RefusedError when they refuse,
        DivergedError when training has ruined a model.

        Exits: 128 + the signal's number, when it is told to end.
        """
        self._resume()
        steps = self.config.learner.steps
        if self.progress.step < steps:
            self.feed.prefetch(self.progress.step, consuming_version=self.progress.version)
        try:
            self._train()
        except SystemExit:
            undone = self.progress.step - self.saved_step
            if self.root is not None and undone:
                log.info("a later start does the steps since the last checkpoint again", steps=undone)
            raise
        self._finish()

    def _train(self) -> None:
        try:
            with self.signals.deferred():
                while self.progress.step < self.config.learner.steps:
                    self._step()
        except StopRequested as end:
            self._save_what_is_done()
            sys.exit(128 + end.number)
        if self.signals.number:  # in the last step, which is saved
            sys.exit(128 + self.signals.number)

    def _step(self) -> None:
        started = time.perf_counter()
        data = self._take()
        told = max(self.world.gather(self.signals.number))  # a signal reaches each rank at another time
        if told:
            raise StopRequested(told)
        if self.root is not None:
            self.root.reporter.step_started()
        waited = time.perf_counter()
        done = self.progress.step + 1
        last = done == self.config.learner.steps
        publishes = last or done % self.config.weights.publish_every_steps == 0
        if not last:
            self.feed.prefetch(done, consuming_version=self.progress.version + publishes)
        figures = self.trainer.step(data, own_version=self.progress.version if self.weights_published else None)
        self.weights_published = False
        trained = time.perf_counter()
        self._account(data, figures)
        self.evaluation_due |= self._evaluates(done)
        if publishes:
            self._publish(evaluate=self.evaluation_due)
            self.evaluation_due = False
        published = time.perf_counter()
        self.checkpoint_due |= last or done % self.config.learner.checkpoint.every_steps == 0
        # Otherwise it waits, if there is more to come: these may be models that no update can change any more.
        if self.checkpoint_due and (last or self.trainer.updated):
            self._checkpoint()
        if self.root is not None:
            self.root.reporter.step_timed(
                policy_version=self.progress.version,
                wait_s=waited - started,
                train_s=trained - waited,
                publish_s=published - trained,
                step_s=time.perf_counter() - started,
            )

    def _take(self) -> StepData:
        """The next groups.

        Raises: StarvedError when there are none, and nothing can be done about it; StopRequested.
        """
        try:
            return self.feed.take(self._while_waiting)
        except StarvedError as error:
            if not self._save_what_is_done():
                raise
            # A Redis that was full of groups whose checkpoint was not due may forget them now, and take new ones.
            log.warning("waiting once more: what was trained is saved, which may make room in Redis", why=str(error))
        self.feed.prefetch(self.progress.step, consuming_version=self.progress.version)
        return self.feed.take(self._while_waiting)

    def _while_waiting(self) -> None:
        """The groups may wait for what Redis has lost, or for weights that reach nobody."""
        if self.root is None:
            return
        try:
            self.root.buffer.say_again()
            servers, weights = len(self.root.buffer.state().servers), self.config.weights
        except DeadlineError:
            if not self.signals.number:
                raise
            return
        publisher = self.root.publisher
        if servers and not publisher.figures.members and not publisher.without_engine and self.unreached.due():
            log.warning(
                "NO ROLLOUT SERVER GETS WEIGHTS: the buffer hears from some, and none has joined this learner",
                servers=servers,
                remedy=f"let them reach weights.host:weights.control_port ({weights.host}:{weights.control_port})",
            )

    def _account(self, data: StepData, figures: dict[str, float]) -> None:
        """Tells the ledger, and reports.

        Raises: StopRequested when the learner is told to end and the buffer is away. It hears of the step when a
        learner starts from the checkpoint that has it.
        """
        done = self.progress.step + 1
        self.progress = replace(self.progress, step=done)
        unheard = 0
        try:
            if self.throttle is not None:
                figures |= self._throttle(self.throttle, figures)
            if self.root is not None:
                state = self.root.buffer.trained(data.step)
                self.root.reporter.step_trained(done, figures, state)
                self.root.reporter.evaluated(done, self.root.buffer.take_evals())
        except DeadlineError:
            if not self.signals.number:
                raise
            unheard = self.signals.number
        unheard = self.world.from_root(unheard)
        if unheard:
            raise StopRequested(unheard)

    def _throttle(self, throttle: Throttle, figures: Mapping[str, float]) -> dict[str, float]:
        """Lets the throttle see a step's figures, does what it says, and returns where it stands."""
        action = throttle.observe(figures)
        if action is not None:
            log.warning(
                "throttle moves",
                step=self.progress.step,
                direction=action.direction,
                cause=action.cause,
                max_staleness=action.max_staleness,
                lr_scale=action.lr_scale,
            )
            self._apply_throttle(throttle)
        return {"throttle/max_staleness": throttle.max_staleness, "throttle/lr_scale": throttle.lr_scale}

    def _apply_throttle(self, throttle: Throttle) -> None:
        self.trainer.lr_scale = throttle.lr_scale
        if self.root is not None:
            self.root.buffer.throttle(throttle.max_staleness)

    def _publish(self, *, evaluate: bool) -> None:
        probe = self._sound()
        version = self.progress.version + 1
        self.progress = replace(self.progress, version=version)
        self.weights_published = True
        if self.root is not None:
            # The buffer hears of the version first: a server may report it as soon as it is sent.
            self.root.buffer.published(version, evaluate=evaluate)
        verified_by = probe if self.config.weights.verify else None
        snapshot = self.snapshots.take(version, evaluate=evaluate, keep=self.world.is_root, probe=verified_by)
        if self.root is not None and snapshot is not None:
            self.root.publisher.publish(snapshot)

    def _sound(self) -> Probe:
        """What the policy thinks of a few tokens. Raises: DivergedError, on all ranks, when it can't."""
        probe = self.prober.score()
        if torch.tensor(probe.logprobs).isfinite().all():
            return probe
        step, folder = self.progress.step, self.config.paths.checkpoints
        saved = checkpoint_steps(folder)
        if step in saved:  # by an earlier start
            remedy = f"move its checkpoint in {folder} away, and start again"
        else:
            before = f"the checkpoint of step {saved[-1]}" if saved else "its beginning"
            remedy = f"start again: the run goes on from {before}"
        raise DivergedError(
            f"after step {step} the policy's own log-probs are not finite ({self.trainer.skipped_updates} updates were "
            f"skipped since the learner's start): lower learner.optimizer.lr, and {remedy}"
        )

    def _checkpoint(self) -> None:
        if not self.weights_published:
            self._sound()
        self.checkpoint_due = False
        self.progress = replace(
            self.progress,
            kl_coefficient=None if self.trainer.kl is None else self.trainer.kl.value,
            throttle={} if self.throttle is None else self.throttle.state(),
        )
        save_checkpoint(
            self.config.paths.checkpoints,
            self.trainer.trained,
            self.progress,
            self.world,
            keep=self.config.learner.checkpoint.keep,
        )
        self.saved_step = self.progress.step
        if self.root is not None:
            self.root.buffer.checkpointed(self.progress.step)
            log.info("checkpoint saved", step=self.progress.step)

    def _save_what_is_done(self) -> bool:
        """Nothing is wrong with the models: who starts again need not do the steps since the last checkpoint again.

        Returns: whether there was something to save, and it is saved.
        """
        if self.progress.step == self.saved_step or not self.trainer.updated:
            return False
        try:
            self._checkpoint()
        except SlipstreamError as error:
            log.warning("the checkpoint is not saved, or the buffer does not know of it", error=str(error))
            return False
        return True

    def _resume(self) -> None:
        found = load_checkpoint(self.config.paths.checkpoints, self.trainer.trained, self.world)
        if found is not None:
            self.progress, self.saved_step = found, found.step
            self._restore_controllers(found)
        latest = self._shared_version()
        if self.throttle is not None:
            self._apply_throttle(self.throttle)
        elif self.root is not None:  # an earlier start of the run may have had one
            self.root.buffer.throttle(self.config.buffer.max_staleness)
        if found is None and latest == 0:
            if self.root is not None:
                self.root.buffer.published(0, evaluate=self._evaluates(0))
            return
        # Weights of this version exist nowhere else: whatever the servers hold came from steps that are undone.
        self.progress = replace(self.progress, version=max(latest, self.progress.version))
        log.info("continuing", step=self.progress.step, policy_version=self.progress.version + 1)
        if self.progress.step > self.config.learner.steps:
            log.warning(
                "the checkpoint has more steps than learner.steps: the run ends with it",
                step=self.progress.step,
                steps=self.config.learner.steps,
            )
        # The last step's evaluation is awaited; earlier ones that were cut off are not made up for.
        last = self.progress.step >= self.config.learner.steps
        self._publish(evaluate=last and self._evaluates(self.progress.step))

    def _restore_controllers(self, found: Progress) -> None:
        if self.trainer.kl is not None and found.kl_coefficient is not None:
            self.trainer.kl.restore(found.kl_coefficient)
        if self.throttle is not None and found.throttle:
            self.throttle.restore(found.throttle)

    def _shared_version(self) -> int:
        """The latest policy version that the buffer knows, on all ranks."""
        if self.root is not None:
            state = self.root.buffer.hello(self.progress.step, model=model_fingerprint(self.initial_model))
            self.world.store.set("version", str(state.version))
        return int(self.world.store.get("version"))

    def _evaluates(self, done: int) -> bool:
        """Whether the version after `done` steps is evaluated: at the start, at the end, and every so many steps."""
        every = self.config.eval.every_steps
        if not self.config.eval.tasks:
            return False
        return done == 0 or done >= self.config.learner.steps or (every > 0 and done % every == 0)

    def _finish(self) -> None:
        folder = self.config.paths
        dtype: torch.dtype = getattr(torch, self.config.model.dtype)
        export_model(self.initial_model, folder.export, self.trainer.model, self.world, dtype=dtype)
        if self.root is not None:
            self.root.publisher.wait()
        if self.config.eval.tasks:
            self._last_evaluation()
        if self.root is not None:
            state = self.root.buffer.finish()
            self.root.reporter.finish(self.progress, state, folder)
            log.info("run finished", step=self.progress.step, model=str(folder.export))

    def _last_evaluation(self) -> None:
        """Waits for it; its answers come from exactly these weights, so they show whether engine and learner agree."""
        version = self.progress.version
        reports: list[EvalReport] = []
        if self.root is not None:
            reports = await_reports(self.root.buffer, version, deadline_s=self.config.eval.deadline_s)
        last = [report for report in reports if report.version == version]
        ids = self.world.from_root([group_id for report in last for group_id in report.group_ids])
        figures = {}
        if ids:
            figures = engine_mismatch(
                self.trainer.model,
                GroupReader(self.config).read(ids),
                version=version,
                token_budget=self.config.learner.token_budget,
                device=self.world.device,
            )
        if self.root is not None:
            earlier = [report for report in reports if report.version != version]
            self.root.reporter.evaluated(self.progress.step, earlier)
            self.root.reporter.evaluated(self.progress.step, last, figures)
