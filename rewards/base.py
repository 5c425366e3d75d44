"""The contracts of rewards: inputs, results and errors of a reward function.

A reward is one of these functions, plain or `async`, and returns a number or a `Score` for each episode:

    def correct(answer: str, reference: str, info: Mapping[str, Any]) -> float: ...

    async def judged(episode: Episode) -> Score: ...        # its first parameter is annotated with `Episode`

    @group_reward
    def ranked(episodes: Sequence[Episode]) -> Sequence[float]: ...     # all answers to one task at once

A group reward may return an exception in place of a score: it costs that episode only. A reward that limits its own
time has an attribute `worst_case_s`, the seconds of one call; it is used instead of `scoring.deadline_s`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import msgspec

from slipstream.configs.runtime.errors import SlipstreamError

FailureReason = Literal["reward_error", "reward_unavailable", "reward_timeout", "reward_crash", "scoring_timeout"]
Ended = Literal["done", "stop", "length", "turns", "tokens", "wall"]
"""An episode's end: by its session (`done`), or without a session the end of the answer (`stop`); the limit of one
answer's tokens (`length`), or a budget under `rollout.episode`."""
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class EpisodeTurn:
    """One action of the policy and what the env returned.

    Attributes:
        text: the action without special tokens.
        tokens: number of generated tokens.
        end: index after the action's last token in the episode's trajectories end to end: where a span of a `Score`
            may end.
        observation: the env's next observation, a text or chat messages, among them the results of tool calls (role
            `tool`); empty after the last action.
        tool_calls: the action's parsed tool calls: `id`, `name`, `arguments`, and `error`, empty for a good call.
        content: the text before the first tool call.
    """

    text: str
    tokens: int
    end: int
    observation: str | Sequence[Mapping[str, Any]] = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    content: str = ""

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The action (`assistant`) and its observation (a text: `user`) as chat messages."""
        action: dict[str, Any] = {"role": "assistant", "content": self.content if self.tool_calls else self.text}
        if self.tool_calls:
            action["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in self.tool_calls
            ]
        if not isinstance(self.observation, str):
            return [action, *self.observation]
        return [action, {"role": "user", "content": self.observation}] if self.observation else [action]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished episode.

    Attributes:
        prompt: the text or chat messages that the first action answers.
        reference: the task's reference answer.
        info: the task's other values.
        turns: at least one.
        prompt_tokens: length of the prompt.
        finish_reason: how the last action ended: `stop`, or `length` when it was cut off.
        ended: what ended the episode.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    reference: str
    info: Mapping[str, Any]
    turns: Sequence[EpisodeTurn]
    prompt_tokens: int
    finish_reason: str
    ended: Ended = "stop"

    @property
    def answer(self) -> str:
        """Text of the last action."""
        return self.turns[-1].text

    @property
    def tokens(self) -> int:
        """Number of generated tokens of all turns."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The dialogue as chat messages: the prompt (a text: `user`), then actions and observations."""
        prompt = [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        return [*prompt, *(message for turn in self.turns for message in turn.messages)]


@dataclass(frozen=True)
class Score:
    """The result of one reward for one episode.

    Attributes:
        value: the score, finite and usually in [0, 1]; times its weight it is trained on.
        parts: further numbers that are recorded as `<reward>/<part>` and not trained on.
        spans: where in the trajectory the value was earned, as (end, value) with ascending token index `end`; the
            values sum to `value`. Empty: all of it at the last token.
        feedback: what is to be said of the episode, such as a failed test; a teacher may be given it
            (`learner.distill.teachers.context`).
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    spans: Sequence[tuple[int, float]] = ()
    feedback: str = ""


def text_of(content: object) -> str:
    """The text of a message's content, where each part that is none has a mark of its type, such as `<image>`."""
    if isinstance(content, list | tuple):
        return "".join(map(_text_of_part, content))
    return "" if content is None else str(content)


def _text_of_part(part: object) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    text = part.get("text")
    if isinstance(text, str):
        return text
    return f"<{str(part.get('type', 'part')).removesuffix('_url')}>"


_GROUP_MARK: Final = "__slipstream_group_reward__"


def group_reward(function: Function) -> Function:
    """Declares a function `(episodes) -> one number or Score each`: it is called once with all episodes of a group."""
    setattr(function, _GROUP_MARK, True)
    return function


def takes_group(function: object) -> bool:
    """True if `group_reward` has marked the function."""
    return getattr(function, _GROUP_MARK, False) is True


class RewardUnavailable(SlipstreamError):
    """A judge, a sandbox or a model that a reward needs does not work. Never a score of 0."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """In place of a score: an episode that a reward could not score.

    Attributes:
        reason: the reward raised or returned no finite number (`reward_error`), lacked what it needs
            (`reward_unavailable`), exceeded its limit of time (`reward_timeout`) or ended its worker process
            (`reward_crash`); or it was not scored when the ticket's time was over (`scoring_timeout`).
        detail: the reward's name and the error.
    """

    reason: FailureReason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


Result = Score | Failure
