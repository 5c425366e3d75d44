"""The kinds of training, which `learner.trainer` chooses from."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.registry import Registry
from slipstream.configs.schema.base import NamedSection, PluginSection, Section, UserPath, one_of, registry_of


class RlConfig(NamedSection):
    """Reinforcement learning on groups that rollout servers generate."""

    target: ClassVar[str] = "slipstream.learner.trainers.rl.trainer:RLTrainer"
    name: Literal["rl"] = "rl"


class DataConfig(Section):
    """Rows of files, of a folder that `datasets` saved, of a data set of the Hugging Face hub, or of an earlier run."""

    path: str | tuple[str, ...] | None = None
    """A JSON-lines or parquet file, a pattern of files, a folder, a name on the hub, or a list of these."""
    run: UserPath | None = None
    """Instead of `path`: folder of an RL run, whose groups (`buffer.keep_trained`) are the rows of `dpo`,
    `reward_model` (the best answer of a group against its worst; groups without spread are left out) and
    `value_model`."""
    split: str | None = None
    """Split of a folder with splits or of a data set of the hub; unset: `train`, for validation `test`."""
    subset: str | None = None
    """Configuration of a data set of the hub, such as `main` for `openai/gsm8k`."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the training rows, relative to the others: smaller sources recur more often. Unset: by the number of
    rows, each once in an epoch. For all of `data` or for none."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns that have other names, such as `{prompt: question, completion: answer}`; dots lead into nested rows."""
    chat: bool = False
    """Make a chat of a prompt that is a text: a message of the user, answered by the assistant."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.run is None):
            raise ValueError("give either path or run")
        return self

    @property
    def paths(self) -> Sequence[str]:
        """The files, folders and names; empty for a run."""
        if self.path is None:
            return ()
        return [self.path] if isinstance(self.path, str) else self.path


class ValidationConfig(Section):
    """Rows on which the loss is measured but not trained."""

    data: tuple[DataConfig, ...] = ()
    """Rows of their own; their weights are ignored."""
    rows: int = Field(default=0, ge=0)
    """Instead: hold out so many rows at the ends of the sources of training rows, by their sizes."""
    every_steps: int = Field(default=100, ge=1)
    """Steps between two measurements; the first is before the first step, the last after the last."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if bool(self.data) == bool(self.rows):
            raise ValueError("give either data or rows")
        return self


class FileTrainer(NamedSection):
    """A training on rows of files, which needs neither buffer nor rollout servers."""

    pairs: ClassVar[bool] = False
    """True if rows are pairs of a better and a worse answer."""

    data: tuple[DataConfig, ...] = Field(min_length=1)
    """Sources of the training rows. One path alone stands for its source."""
    rows_per_step: int = Field(default=32, ge=1)
    """Rows of an optimizer update, of all ranks together."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Tokens of the longest sequence: rows with a longer one are left out, and counted. Unset:
    `learner.token_budget`."""
    validation: ValidationConfig | None = None
    """Validation rows; unset: none."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, given: Any) -> Any:
        """Takes `data: rows.jsonl` for `data: [{path: rows.jsonl}]`, and one source for a list of it."""
        if not isinstance(given, Mapping):
            return given
        filled = dict(given)
        if isinstance(filled.get("validation"), Mapping):
            filled["validation"] = {key: _sources(key, value) for key, value in filled["validation"].items()}
        return {key: _sources(key, value) for key, value in filled.items()}

    @model_validator(mode="after")
    def _weights(self) -> Self:
        if len({source.weight is None for source in self.data}) > 1:
            raise ValueError("data: give all sources a weight, or none")
        return self


def _sources(key: str, value: Any) -> Any:
    """The value of a key; of `data` as a list of sources."""
    if key != "data":
        return value
    listed = [value] if isinstance(value, str | Mapping) else value
    return [{"path": each} if isinstance(each, str) else each for each in listed] if isinstance(listed, list) else value


class SftConfig(FileTrainer):
    """Supervised fine-tuning: cross-entropy of demonstrations."""

    target: ClassVar[str] = "slipstream.learner.trainers.supervised.sft:SftTrainer"
    name: Literal["sft"] = "sft"
    assistant_only_loss: bool = True
    """Loss on the assistant's tokens, of rows with prompt and completion on the completion's; false: on all tokens. Of
    rows that are a text alone, all tokens count."""
    completions: int = Field(default=4, ge=0)
    """Validation rows whose prompts the model answers, greedily, at each measurement; the answers are kept as
    samples. 0: none."""
    completion_tokens: int = Field(default=128, ge=1)
    """Tokens of the longest of these answers."""


class RewardModelConfig(FileTrainer):
    """A reward model from preferences (Bradley-Terry): a classifier with one label, for the reward `reward_model`."""

    target: ClassVar[str] = "slipstream.learner.trainers.supervised.scalar:RewardModelTrainer"
    pairs: ClassVar[bool] = True
    name: Literal["reward_model"] = "reward_model"
    margin: float = Field(default=1.0, ge=0)
    """Factor of the rows' margins, by which the chosen answer's reward should be higher: their column `margin`, in
    pairs of a run the difference of rewards. 0: no margins."""


class ValueModelConfig(FileTrainer):
    """A value model by regression of returns, for `learner.critic.path`: a token classifier with one label."""

    target: ClassVar[str] = "slipstream.learner.trainers.supervised.scalar:ValueModelTrainer"
    name: Literal["value_model"] = "value_model"


class PreferenceLoss(NamedSection):
    """Keys of all losses of preferences."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the tie to the reference: of the log ratios' difference in the loss."""


class DpoLoss(PreferenceLoss):
    """-(1 - ε) log sigmoid(β Δ) - ε log sigmoid(-β Δ), with Δ the difference of the answers' log ratios
    (arXiv 2305.18290)."""

    name: Literal["dpo"] = "dpo"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """ε, the share of pairs in the wrong order; above 0 it is cDPO."""


class IpoLoss(PreferenceLoss):
    """(Δ - 1/(2 β))², with Δ the difference of the answers' log ratios per token (arXiv 2310.12036)."""

    name: Literal["ipo"] = "ipo"


class SimpoLoss(PreferenceLoss):
    """-log sigmoid(β Δ - margin), with Δ the difference of the answers' log-probs per token; no reference
    (arXiv 2405.14734)."""

    name: Literal["simpo"] = "simpo"
    beta: float = Field(default=2.0, gt=0)
    """Factor of the log-probs' difference."""
    margin: float = Field(default=1.0, ge=0)
    """Difference of rewards that is aimed at."""


class KtoLoss(PreferenceLoss):
    """Single answers with a verdict (`label`), or both answers of a pair, against a mean divergence z: λ (1 -
    sigmoid(±β (log ratio - z))) (arXiv 2402.01306)."""

    name: Literal["kto"] = "kto"
    desirable_weight: float = Field(default=1.0, ge=0)
    """λ of desirable answers; with the next, so that λ times their number is about the same for both."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """λ of undesirable answers."""


if TYPE_CHECKING:
    PreferenceLossConfig = PreferenceLoss
else:
    PreferenceLossConfig = one_of(DpoLoss, IpoLoss, SimpoLoss, KtoLoss)


class DpoConfig(FileTrainer):
    """Training of the policy itself on preferences. The reference is the initial model, scored once before training."""

    target: ClassVar[str] = "slipstream.learner.trainers.supervised.dpo:DpoTrainer"
    pairs: ClassVar[bool] = True
    name: Literal["dpo"] = "dpo"
    loss: PreferenceLossConfig = DpoLoss()


_TRAINERS: Final = (RlConfig, SftConfig, RewardModelConfig, ValueModelConfig, DpoConfig)
TRAINERS: Final = registry_of("trainer", *_TRAINERS)


class TrainerPlugin(PluginSection):
    """A trainer of the user's own: a subclass of `Trainer`, see learner/trainers/base.py."""

    registry: ClassVar[Registry] = TRAINERS

    options: dict[str, Any] = Field(default_factory=dict)
    """Its options; the trainer validates them."""


if TYPE_CHECKING:
    TrainerConfig = NamedSection
else:
    TrainerConfig = one_of(*_TRAINERS, TrainerPlugin)
