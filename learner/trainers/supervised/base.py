"""The base of trainers that read rows from files: order, packing, loss over all ranks, validation, metrics, summary.

A subclass says how a row becomes examples, and what their loss is (see `sft`).
"""

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from slipstream.configs import RunConfig
from slipstream.configs.paths import RunPaths
from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.configs.runtime.tracing import span
from slipstream.configs.schema.learner import LearnerConfig
from slipstream.configs.schema.trainers import DataConfig, FileTrainer
from slipstream.learner.checkpoint import TrainState
from slipstream.learner.data.balance import SequenceCost, Work, balance_groups
from slipstream.learner.data.examples import Example, Packed, UnusableRow, pack_examples
from slipstream.learner.data.packing import aligned
from slipstream.learner.data.row_order import RowOrder, RowRef, Source, open_rows
from slipstream.learner.metrics.file_reporter import FileReporter
from slipstream.learner.models.flops import ModelFlops
from slipstream.learner.models.identity import token_difference
from slipstream.learner.parallel.fsdp import reshard
from slipstream.learner.parallel.mesh import World
from slipstream.learner.trainers.base import Trainer
from slipstream.learner.trainers.setup import RankSetup, SingleModel, build_efficiency
from slipstream.models.device_memory import gpu_id
from slipstream.models.row_sources import Row

log = get_log("learner.rows")

E = TypeVar("E", bound=Example)

TRIED_ROWS = 32
"""Rows of each source that are tried at the start: if none can be used, the run does not begin."""
LOGGED_ROWS = 20
"""Rows that are left out and named in the log, of each rank; further ones are only counted."""


@dataclass(frozen=True)
class LossSums:
    """Sums over the terms of a micro-batch's loss."""

    loss: Tensor
    """A scalar with the model's graph, also where there is no term: every rank runs the backward pass."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars without graph, by the names of the metrics that their means are."""


@dataclass(frozen=True)
class RowBatch(Generic[E]):
    """This rank's part of some rows, packed; on the learner's device."""

    packed: Sequence[Packed[E]]
    """As many micro-batches as on every rank, the last of which may be empty."""
    rows: int
    """Rows that are used, of all ranks."""
    dropped: Mapping[str, int]
    """Rows that are left out, by reason, of all ranks."""


@dataclass(frozen=True)
class FileState(TrainState):
    """The state of a training on rows of files."""

    rows: int = 0
    """Training rows, in an order that depends on their number."""


@dataclass(kw_only=True)
class SupervisedTrainer(Trainer[RowBatch[E]]):
    """One rank of a training of one model on rows of files."""

    state: FileState = field(default_factory=FileState)
    policy: SingleModel
    options: FileTrainer
    encode: Callable[[Row, DataConfig], Sequence[E]]
    """Makes the examples of a row, which may be on different ranks; raises UnusableRow. See `encoder`."""
    order: RowOrder
    held_out: Sequence[RowRef]
    """Validation rows."""
    cost: SequenceCost
    flops: ModelFlops = field(init=False)
    file_reporter: FileReporter | None
    """The reporter, of this kind; None on all ranks but 0."""
    _left_out: set[str] = field(default_factory=set, init=False)
    """Rows that were left out and named in the log."""

    @classmethod
    def from_setup(cls, setup: RankSetup) -> Self:
        """The trainer of a rank; a collective.

        Raises: ConfigError when the model can't be trained, rows can't be read, or none of a source can be used.
        """
        options = setup.config.learner.trainer
        assert isinstance(options, FileTrainer), "the section of a trainer of this kind"
        order, held_out = setup.world.on_all_ranks(
            lambda: open_trainer_rows(options, setup.initial_model, setup.config.run.seed)
        )
        encode = setup.world.on_all_ranks(lambda: cls.encoder(setup.config, setup.initial_model))
        setup.world.on_all_ranks(lambda: require_usable_rows(setup.config, order.sources, encode))
        reporter = _reporter(setup, setup.world.gather(gpu_id(setup.world.device)))
        policy = cls.load_model(setup)
        return cls(
            config=setup.config,
            initial_model=setup.initial_model,
            world=setup.world,
            signals=setup.signals,
            reporter=reporter,
            file_reporter=reporter,
            policy=policy,
            options=options,
            encode=encode,
            order=order,
            held_out=held_out,
            cost=SequenceCost.of_model(setup.initial_model),
            **cls.parts(setup, policy),
        )

    def __post_init__(self) -> None:
        self.flops = ModelFlops.of_model(self.policy.model)

    @classmethod
    def load_model(cls, setup: RankSetup) -> SingleModel:
        """The model with its initial weights; a collective. Raises: ConfigError when it can't be trained."""
        return SingleModel.load(setup.config, setup.initial_model, setup.world)

    @classmethod
    def parts(cls, setup: RankSetup, policy: SingleModel) -> dict[str, Any]:
        """Values of the fields that a subclass adds; a collective. Raises: ConfigError when they can't be made."""
        return {}

    @classmethod
    @abstractmethod
    def encoder(cls, config: RunConfig, model: Path) -> Callable[[Row, DataConfig], Sequence[E]]:
        """The function that makes the examples of a row of a source, and raises UnusableRow.

        It needs the model's folder, not its weights: `slipstream check` calls it too. Raises: ConfigError.
        """

    @abstractmethod
    def loss(self, packed: Packed[E]) -> LossSums:
        """The loss of a micro-batch, summed over its terms; a collective."""

    def terms(self, packed: Packed[E]) -> float:
        """Number of the terms over all of which, on all ranks, the loss is a mean: here the tokens in the loss."""
        return packed.batch.actions

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics made of the means, over all terms, of what `loss` has summed."""
        return means

    def validated(self, metrics: Mapping[str, float]) -> None:
        """Called after a measurement on the validation rows, on all ranks."""

    @property
    def models(self) -> SingleModel:
        """The model and its optimizer."""
        return self.policy

    def start(self, *, resumed: bool) -> None:
        """Measures the initial model on the validation rows."""
        if self.file_reporter is not None and resumed:
            self.file_reporter.continued(self.state.step)
            if self.state.rows != self.order.rows:
                log.warning(
                    "the number of training rows has changed: from here on they come in another order, some again",
                    before=self.state.rows,
                    now=self.order.rows,
                )
        if self.state.step == 0:
            self._validate()

    def next_batch(self) -> RowBatch[E]:
        """The rows of the next step."""
        return self.prepare(self.order.step(self.state.step, rows=self.options.rows_per_step))

    def update(self, batch: RowBatch[E]) -> dict[str, float]:
        """One optimizer update on the mean loss of the rows."""
        total = self._total_terms(batch)
        sums = _Sums(self.world)
        with span("update policy", micro_batches=len(batch.packed)):
            for packed in batch.packed:
                found = self.loss(packed)
                # FSDP averages gradients over the ranks, but the loss is a mean over the terms of all ranks.
                torch.autograd.backward(found.loss * (self.world.data_size / max(total, 1.0)))
                lengths = [length for example in packed.examples for length in _input_lengths(example)]
                flops = self.flops(lengths, actions=packed.batch.actions)
                sums.add({"loss": found.loss, **found.metrics, "tokens": sum(lengths), "flops": flops})
        totals = {"tokens": 0.0, "flops": 0.0, **sums.totals()}
        counts = {"tokens": totals.pop("tokens"), "flops": totals.pop("flops"), "rows": float(batch.rows)}
        counts |= {f"rows_dropped/{reason}": float(rows) for reason, rows in batch.dropped.items()}
        epoch = {"epoch": (self.state.step + 1) * self.options.rows_per_step / self.order.rows}
        if not total:  # momentum alone would move the weights
            log.warning("no row of the step can be used: the model is not updated", step=self.state.step + 1)
            self.policy.optimizer.zero_grad(set_to_none=True)
            return counts | epoch
        means = self.metrics({name: value / total for name, value in totals.items()})
        return {**means, "terms": total, **counts, **epoch, **self.policy.update(self.state.step)}

    def after_update(self, metrics: Mapping[str, float]) -> Mapping[str, float | int]:
        """Measures the loss on the validation rows, if it is due."""
        validation, step = self.options.validation, self.state.step
        if validation is None or (step % validation.every_steps and step != self.config.learner.steps):
            return {}
        started = time.perf_counter()
        self._validate()
        return {"validation_s": time.perf_counter() - started}

    def state_to_save(self) -> FileState:
        """The state, with the number of training rows."""
        return replace(self.state, rows=self.order.rows)

    def finish(self) -> None:
        """Writes the summary, which marks the run as finished."""
        if self.file_reporter is not None:
            self.file_reporter.finish(self.config.paths, trainer=self.options.name, step=self.state.step)

    def prepare(self, refs: Sequence[RowRef]) -> RowBatch[E]:
        """This rank's part of rows, with equal costs on all ranks; a collective.

        Each rank encodes some of the rows for their lengths, and then those of its part.
        """
        ranks, rank = self.world.data_size, self.world.data_rank
        encoded = {index: self._encode(ref, count=True) for index, ref in list(enumerate(refs))[rank::ranks]}
        works = {
            str(index): [example.work for example in made]
            for index, made in encoded.items()
            if not isinstance(made, UnusableRow)
        }
        dropped = Counter(made.reason for made in encoded.values() if isinstance(made, UnusableRow))
        found: dict[str, Any] = {"works": works, "dropped": dict(dropped)}
        gathered = self.world.gather(found)
        # Ranks that share rows have found the same.
        parts = [gathered[number * self.world.size // ranks] for number in range(ranks)]
        works_of = {int(index): found for part in parts for index, found in part["works"].items()}
        places = [(index, number) for index in sorted(works_of) for number in range(len(works_of[index]))]
        budget = self.config.learner.token_budget
        shares, plan = balance_groups(
            [[Work(*works_of[index][number])] for index, number in places], ranks, budget=budget, cost=self.cost
        )
        own = list[E]()
        for index, number in (places[place] for place in shares[rank]):
            if index not in encoded:
                encoded[index] = self._encode(refs[index], count=False)
            examples = encoded[index]
            assert not isinstance(examples, UnusableRow), "the rank that counted its tokens could use the row"
            own.append(examples[number])
        micro_batches = pack_examples(own, token_budget=budget, plan=plan) if own else []
        batches = aligned([packed.batch for packed in micro_batches], self.world)
        examples_of = [packed.examples for packed in micro_batches] + [()] * (len(batches) - len(micro_batches))
        total = sum((Counter(part["dropped"]) for part in parts), Counter[str]())
        return RowBatch(list(map(Packed, batches, examples_of)), rows=len(refs) - sum(total.values()), dropped=total)

    def _encode(self, ref: RowRef, *, count: bool) -> Sequence[E] | UnusableRow:
        """As `try_row`; with `count`, logs a row that is left out."""
        found = try_row(ref, self.encode, self.config.learner)
        is_new = len(self._left_out) < LOGGED_ROWS and ref.place not in self._left_out
        if count and is_new and isinstance(found, UnusableRow):
            self._left_out.add(ref.place)
            last = {"further_ones": "only counted"} if len(self._left_out) == LOGGED_ROWS else {}
            log.warning("row left out", row=ref.place, reason=found.reason, detail=str(found), **last)
        return found

    def _validate(self) -> None:
        """Measures the mean loss on the validation rows; a collective."""
        if not self.held_out:
            return
        started, sums, rows = time.perf_counter(), _Sums(self.world), 0
        with span("validate"), torch.no_grad():
            for batch in self._validation_batches():
                rows += batch.rows
                for packed in batch.packed:
                    found = self.loss(packed)
                    sums.add({"loss": found.loss, **found.metrics, "terms": self.terms(packed)})
            reshard(self.policy.model)
        totals = sums.totals()
        terms = totals.pop("terms", 0.0)
        if not terms:
            log.warning("no validation row can be used", step=self.state.step)
            return
        means = self.metrics({name: value / terms for name, value in totals.items()})
        metrics = {**means, "terms": terms, "rows": float(rows), "eval_s": time.perf_counter() - started}
        if self.file_reporter is not None:
            self.file_reporter.validated(self.state.step, metrics)
        self.validated(metrics)

    def _validation_batches(self) -> Iterator[RowBatch[E]]:
        size = self.options.rows_per_step
        for first in range(0, len(self.held_out), size):
            yield self.prepare(self.held_out[first : first + size])

    def _total_terms(self, batch: RowBatch[E]) -> float:
        own = sum(self.terms(packed) for packed in batch.packed)
        return float(self.world.sum(torch.tensor(own, dtype=torch.float64)))


class _Sums:
    """Sums over micro-batches, on the device: nothing is copied to the host before `totals`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Adds values to the sums of these names, the same on all ranks."""
        for name, value in values.items():
            added = torch.as_tensor(value, device=self._world.device).detach().double()
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def totals(self) -> dict[str, float]:
        """The sums of all ranks; a collective."""
        if not self._sums:
            return {}
        totals = self._world.sum(torch.stack(list(self._sums.values())))
        return dict(zip(self._sums, totals.tolist(), strict=True))


def _reporter(setup: RankSetup, gpus: Sequence[str]) -> FileReporter | None:
    """Rank 0's reporter; `gpus` are the identities of the ranks' GPUs."""
    if not setup.world.is_root:
        return None
    assert setup.events is not None, "rank 0 has no event log"
    return FileReporter(
        setup.build_trackers(),
        steps=setup.config.learner.steps,
        started=setup.started,
        use=build_efficiency(setup.config, setup.world, gpus),
        events=setup.events,
    )


def try_row(
    ref: RowRef, encode: Callable[[Row, DataConfig], Sequence[E]], learner: LearnerConfig
) -> Sequence[E] | UnusableRow:
    """The examples of a row, or why it can't be used."""
    options = learner.trainer
    assert isinstance(options, FileTrainer), "the section of a trainer of this kind"
    most, key = learner.token_budget, "learner.token_budget"
    if options.max_tokens is not None:
        most, key = options.max_tokens, "learner.trainer.max_tokens"
    try:
        examples = encode(_read(ref), ref.source.config)
        longest = max(example.longest for example in examples)
        if longest > most:
            raise UnusableRow("too_long", f"it has {longest} tokens, and {key} is {most}")
    except UnusableRow as error:
        return error
    return examples


def require_usable_rows(
    config: RunConfig, sources: Sequence[Source], encode: Callable[[Row, DataConfig], Sequence[E]]
) -> None:
    """Raises: ConfigError when none of the first rows of a source can be used."""
    problems = []
    for number, source in enumerate(sources):
        refs = [RowRef(source, index) for index in range(min(TRIED_ROWS, len(source)))]
        tried = [try_row(ref, encode, config.learner) for ref in refs]
        unusable = [found for found in tried if isinstance(found, UnusableRow)]
        if len(unusable) == len(tried):
            problems.append(
                f"learner.trainer.data.{number}: none of the first {len(tried)} rows can be used, such as "
                f"{source.place(0)} ({unusable[0].reason}): {unusable[0]}"
            )
    if problems:
        raise ConfigError(problems)


def open_trainer_rows(options: FileTrainer, model: Path, seed: int) -> tuple[RowOrder, list[RowRef]]:
    """The training rows of a trainer in their order, and the validation rows.

    Raises: ConfigError when they can't be read, or are of a run whose tokens are not those of the model.
    """
    validation = options.validation
    others = () if validation is None else validation.data
    problems = [problem for source in (*options.data, *others) if (problem := _token_problem(source, model))]
    if problems:
        raise ConfigError(problems)
    return open_rows(
        options.data,
        validation=others,
        held_out=0 if validation is None else validation.rows,
        seed=seed,
        pairs=options.pairs,
    )


def _token_problem(source: DataConfig, model: Path) -> str | None:
    """The reason why a run's answers, which are token ids, mean something else to the model; None if it is not known.

    The tokenizer is that of the model which the run has exported or built.
    """
    if source.run is None:
        return None
    folders = (RunPaths(source.run).export, RunPaths(source.run).initial_model)
    found = (difference for folder in folders if (difference := token_difference(folder, model)))
    difference = next(found, None)
    if difference is None:
        return None
    return f"learner.trainer: run={source.run}: {difference}; train a model with the run's tokenizer"


def _read(ref: RowRef) -> Row:
    try:
        return ref.read()
    except ValueError as error:
        raise UnusableRow("malformed", str(error)) from None


def _input_lengths(example: Example) -> list[int]:
    return [len(sequence.token_ids) - 1 for sequence in example.sequences]
