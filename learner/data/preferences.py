"""Examples of preferences: pairs of answers, answers with a verdict, and answers with a reward; from files and runs.

# E episodes, L actions of the longest episode, T actions of a trajectory, A actions of a sequence
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slipstream.buffer.wire.codec import action_mask, token_ids
from slipstream.buffer.wire.messages import Group, Trajectory
from slipstream.configs.schema.trainers import DataConfig
from slipstream.learner.data.chat import (
    COMPLETIONS,
    Chat,
    Completion,
    DemonstrationEncoder,
    Message,
    column,
    messages_of,
    prompt_of,
    tools_of,
    with_completion,
)
from slipstream.learner.data.examples import Example, UnusableRow
from slipstream.learner.data.packing import TokenSequence, whole_sequence
from slipstream.learner.data.rows import build_rows
from slipstream.models.row_sources import Row
from slipstream.models.tokenizer import PromptError, Tokenizer

GROUP: Final = "group"
"""Key of a row that is a group of an earlier run."""
CHOSEN: Final = 0
"""Index of a pair's better answer among its sequences; the other is the next."""

Answer = Chat | Completion | Trajectory
"""An answer with its prompt, as text or as the tokens that were generated."""
EncodeAnswer = Callable[[Answer], TokenSequence]


@dataclass(frozen=True)
class PairExample(Example):
    """Two answers to a prompt, the better one first."""

    margin: float = 0.0
    """Difference of the answers' rewards; 0 where it is unknown."""


@dataclass(frozen=True)
class VerdictExample(Example):
    """An answer."""

    desirable: bool = True


@dataclass(frozen=True)
class RatedExample(Example):
    """An answer whose actions have returns."""

    returns_A: NDArray[np.float32]


@dataclass(frozen=True)
class RecordedPair:
    """The best and the worst answer of a group, of one trajectory each."""

    chosen: Trajectory
    rejected: Trajectory

    @property
    def margin(self) -> float:
        """Difference of their rewards, above 0."""
        return self.chosen.reward - self.rejected.reward


def _usable(group: Group) -> list[Trajectory]:
    """The answers that are one trajectory without images."""
    parts = Counter(trajectory.episode for trajectory in group.trajectories)
    return [each for each in group.trajectories if parts[each.episode] == 1 and not each.images]


def best_and_worst(group: Group) -> RecordedPair | None:
    """The answers with the highest and the lowest reward, of several the first; None if all have the same.

    Answers with images, or of several trajectories, are left out.
    """
    usable = _usable(group)
    if not usable:
        return None
    best, worst = (choose(usable, key=lambda each: each.reward) for choose in (max, min))
    return RecordedPair(best, worst) if best.reward > worst.reward else None


def sequence_of(trajectory: Trajectory) -> TokenSequence:
    """The tokens of a trajectory, exactly as they were generated."""
    return TokenSequence(token_ids(trajectory), action_mask(trajectory))


def returns_of(group: Group) -> Sequence[NDArray[np.float32]]:
    """The return of each action of each trajectory: the rewards from there to the episode's end, undiscounted."""
    rows = build_rows([(group, 1.0)], terms=())
    rewards_EL = rows.by_episode(rows.rewards_BT)
    returns_BT = rows.by_trajectory(rewards_EL.flip(1).cumsum(1).flip(1))
    lengths = rows.mask_BT.sum(1).int().tolist()
    return [returns_T[:length].numpy() for returns_T, length in zip(returns_BT, lengths, strict=True)]


def read_pair(row: Row, source: DataConfig, encode: EncodeAnswer) -> PairExample:
    """The pair of a row, in TRL's or verl's form, or the best and the worst answer of a recorded group.

    `prompt`, `chosen` and `rejected` as texts or messages; without a prompt, or beside one that they repeat, `chosen`
    and `rejected` are whole chats. `margin`, a number, is optional.

    Raises: UnusableRow.
    """
    if GROUP in row:
        pair = best_and_worst(_group(row))
        if pair is None:
            raise UnusableRow("no_preference", "all its answers have the same reward")
        return PairExample([encode(pair.chosen), encode(pair.rejected)], pair.margin)
    answers = [column(row, source, name) for name in ("chosen", "rejected")]
    if None in answers:
        raise UnusableRow(
            "malformed",
            f"has not both chosen and rejected (learner.trainer.data.columns); its columns are {sorted(row)}",
        )
    if answers[0] == answers[1]:
        raise UnusableRow("no_preference", "chosen and rejected are the same")
    margin = column(row, source, "margin")
    pair_of = _pair(prompt_of(row, source), answers, tools_of(column(row, source, "tools")), chat=source.chat)
    return PairExample([encode(each) for each in pair_of], 0.0 if margin is None else _number(margin, "margin"))


def read_verdicts(row: Row, source: DataConfig, encode: EncodeAnswer) -> list[VerdictExample]:
    """The answer of a row with `prompt`, `completion` and `label`, TRL's form, or both answers of a pair.

    Raises: UnusableRow.
    """
    label = column(row, source, "label")
    if label is None:
        return [
            VerdictExample([sequence], index == CHOSEN)
            for index, sequence in enumerate(read_pair(row, source, encode).sequences)
        ]
    if label not in (0, 1):
        raise UnusableRow("malformed", f"label={label!r} must be true or false")
    return [VerdictExample([encode(_completion(row, source))], bool(label))]


def read_rated(row: Row, source: DataConfig, encode: EncodeAnswer) -> list[RatedExample]:
    """The answer of a row with `prompt`, `completion` and `reward`, or all trajectories of a recorded group.

    The reward of a row of a file is the return of all its actions.

    Raises: UnusableRow.
    """
    if GROUP in row:
        group = _group(row)
        rated = zip(group.trajectories, returns_of(group), strict=True)
        found = [RatedExample([encode(each)], returns_A) for each, returns_A in rated if not each.images]
        if not found:
            raise UnusableRow("images", "its answers have images")
        return found
    sequence, reward = encode(_completion(row, source)), column(row, source, "reward")
    actions = int(sequence.action_mask[1:].sum())
    return [RatedExample([sequence], np.full(actions, _number(reward, "reward"), dtype=np.float32))]


def mismatched(prompt: TokenSequence, answer: TokenSequence, *, most_tokens: int) -> TokenSequence:
    """The tokens before the first action of one sequence, and from there on those of another."""
    start, other = (int(np.argmax(each.action_mask[1:])) + 1 for each in (prompt, answer))
    ids = np.concatenate([prompt.token_ids[:start], answer.token_ids[other:]])
    mask = np.concatenate([np.zeros(start, dtype=bool), np.asarray(answer.action_mask[other:], dtype=bool)])
    return TokenSequence(ids[:most_tokens], mask[:most_tokens])


def _group(row: Row) -> Group:
    group = row[GROUP]
    if not isinstance(group, Group):
        raise UnusableRow("malformed", f"{GROUP} is a {type(group).__name__}, not a group of a run")
    return group


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise UnusableRow("malformed", f"{name} must be a number, not {value!r}")
    return float(value)


def _completion(row: Row, source: DataConfig) -> Chat | Completion:
    prompt, completion = prompt_of(row, source), column(row, source, "completion", COMPLETIONS)
    if completion is None:
        raise UnusableRow("malformed", f"has no completion (learner.trainer.data.columns), but {sorted(row)}")
    tools = tools_of(column(row, source, "tools"))
    if prompt is None:
        return _whole_chat(completion, completion, tools)[0]
    return with_completion(prompt, completion, tools, chat=source.chat)


def _pair(prompt: Any, answers: Sequence[Any], tools: Sequence[Message], *, chat: bool) -> list[Chat | Completion]:
    repeats = any(isinstance(answer, list) and _role(answer) != "assistant" for answer in answers)
    if prompt is None or repeats:
        chosen, rejected = answers
        return _whole_chat(chosen, rejected, tools)
    return [with_completion(prompt, answer, tools, chat=chat) for answer in answers]


def _role(messages: Sequence[Any]) -> Any:
    return messages[0].get("role") if messages and isinstance(messages[0], dict) else None


def _whole_chat(chosen: Any, rejected: Any, tools: Sequence[Message]) -> list[Chat | Completion]:
    """Chats, or texts, that contain their prompt: what both begin with, up to the last message of the assistant."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        return [Completion("", chosen), Completion("", rejected)]
    chats = [messages_of(chosen), messages_of(rejected)]
    shared = 0
    while shared < min(map(len, chats)) - 1 and chats[0][shared] == chats[1][shared]:
        shared += 1
    if any(each[shared]["role"] != "assistant" for each in chats):
        raise UnusableRow("malformed", "the two chats do not differ in answers to the same messages")
    return [Chat(each, tools, first=shared) for each in chats]


@dataclass(frozen=True)
class PolicyEncoder:
    """Makes sequences whose actions are an answer's tokens, of which a policy has log-probs."""

    tokenizer: Tokenizer

    def __call__(self, answer: Answer) -> TokenSequence:
        """The sequence of an answer; recorded tokens are taken as they are. Raises: UnusableRow."""
        if isinstance(answer, Trajectory):
            sequence = sequence_of(answer)
            if not sequence.action_mask[1:].any():
                raise UnusableRow("no_target", "an answer is empty")
            if sequence.token_ids.max() >= self._token_ids:
                raise UnusableRow("malformed", f"token {sequence.token_ids.max()} is none of the model's")
            return sequence
        if isinstance(answer, Completion) and not answer.prompt:
            raise UnusableRow("malformed", "has no prompt, and the texts do not say where the answers begin")
        sequences = DemonstrationEncoder(self.tokenizer, assistant_only=True).encode(answer)
        if len(sequences) > 1:
            raise UnusableRow("template", "the chat template changes earlier turns, so that it is no sequence")
        return sequences[0]

    @cached_property
    def _token_ids(self) -> int:
        """The model's number of token ids."""
        return self.tokenizer.vocab_size


@dataclass(frozen=True)
class RewardEncoder:
    """Makes the sequences that the reward `reward_model` gives its model, to be scored as a whole."""

    tokenizer: Tokenizer

    def __call__(self, answer: Answer) -> TokenSequence:
        """The sequence of an answer; it has one action, behind its last token. Raises: UnusableRow."""
        try:
            ids = self._encode(answer)
        except PromptError as error:
            raise UnusableRow("template", str(error)) from error
        while ids and ids[-1] == self.tokenizer.padding_token_id:  # classifiers of transformers look before it
            ids.pop()
        if not ids:
            raise UnusableRow("no_target", "it is empty")
        return whole_sequence(np.array(ids))

    def _encode(self, answer: Answer) -> list[int]:
        if isinstance(answer, Completion):
            return self.tokenizer.encode(answer.prompt + answer.completion)
        if isinstance(answer, Chat):
            return self.tokenizer.encode_observation(self._render(answer.messages))
        return self._encode_recorded(sequence_of(answer))

    def _encode_recorded(self, sequence: TokenSequence) -> list[int]:
        """The tokens of the text that the reward has of an episode: those that the policy chose last are its answer."""
        actions = np.flatnonzero(sequence.action_mask)
        if not len(actions):
            raise UnusableRow("no_target", "it has no answer")
        gaps = np.flatnonzero(np.diff(actions) > 1)
        start, end = int(actions[gaps[-1] + 1] if len(gaps) else actions[0]), int(actions[-1]) + 1
        context = self.tokenizer.decode_whole(sequence.token_ids[:start].tolist())
        (text,) = self.tokenizer.decode([sequence.token_ids[start:end].tolist()])
        if self._opening is None or not context.endswith(self._opening):
            (prompt,) = self.tokenizer.decode([sequence.token_ids[:start].tolist()])
            return self.tokenizer.encode(prompt + text)
        # A template may change an answer, such as the white space around thoughts.
        question = self._render([_QUESTION])
        whole = self._render([_QUESTION, {"role": "assistant", "content": text}])
        if not whole.startswith(question):
            raise UnusableRow("template", "the chat template changes a question when it has an answer")
        return self.tokenizer.encode_observation(context.removesuffix(self._opening) + whole[len(question) :])

    @cached_property
    def _opening(self) -> str | None:
        """The text with which the chat template lets an answer begin; None without a template."""
        if self.tokenizer.chat_template is None:
            return None
        question = self._render([_QUESTION])
        return self.tokenizer.render([_QUESTION]).removeprefix(question)

    def _render(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.render(messages, generation_prompt=False)


_QUESTION: Final = {"role": "user", "content": "u"}
