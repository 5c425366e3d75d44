"""The kinds of training, which `learner.trainer` chooses from."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from slipstream.configs.registry import Registry
from slipstream.configs.schema.base import NamedSection, PluginSection, Section, one_of, registry_of


class RlConfig(NamedSection):
    """Reinforcement learning on groups that rollout servers generate."""

    target: ClassVar[str] = "slipstream.learner.trainers.rl.trainer:RLTrainer"
    name: Literal["rl"] = "rl"


class DataConfig(Section):
    """Rows of files, of a folder that `datasets` saved, or of a data set of the Hugging Face hub."""

    path: str | tuple[str, ...]
    """A JSON-lines or parquet file, a pattern of files, a folder, a name on the hub, or a list of these."""
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


class DemonstrationTrainer(FileTrainer):
    """A training on demonstrations."""

    assistant_only_loss: bool = True
    """Loss on the assistant's tokens, of rows with prompt and completion on the completion's; false: on all tokens. Of
    rows that are a text alone, all tokens count."""
    completions: int = Field(default=4, ge=0)
    """Validation rows whose prompts the model answers, greedily, at each measurement; the answers are kept as
    samples. 0: none."""
    completion_tokens: int = Field(default=128, ge=1)
    """Tokens of the longest of these answers."""


class SftConfig(DemonstrationTrainer):
    """Supervised fine-tuning: cross-entropy of demonstrations."""

    target: ClassVar[str] = "slipstream.learner.trainers.supervised.sft:SftTrainer"
    name: Literal["sft"] = "sft"


class DistillRowsConfig(DemonstrationTrainer):
    """Offline distillation: divergence from a teacher on the assistant's tokens of demonstrations, or of its answers.

    Loss: `learner.streams.ref_kl` · divergence, by `learner.distill`, + `learner.streams.ce` · cross-entropy.
    """

    target: ClassVar[str] = "slipstream.learner.trainers.supervised.distill:DistillTrainer"
    name: Literal["distill"]


TRAINERS: Final = registry_of("trainer", RlConfig, SftConfig, DistillRowsConfig)


class TrainerPlugin(PluginSection):
    """A trainer of the user's own: a subclass of `Trainer`, see learner/trainers/base.py."""

    registry: ClassVar[Registry] = TRAINERS

    options: dict[str, Any] = Field(default_factory=dict)
    """Its options; the trainer validates them."""


if TYPE_CHECKING:
    TrainerConfig = NamedSection
else:
    TrainerConfig = one_of(RlConfig, SftConfig, DistillRowsConfig, TrainerPlugin)
