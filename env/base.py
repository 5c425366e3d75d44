"""The contract of an env: tasks by index and, for several turns, a session for each episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeGuard

Split = Literal["train", "eval"]

Message = Mapping[str, Any]
"""A chat message: `role`, `content`; of an assistant also `tool_calls`, of a tool `tool_call_id` and `name`."""

MOST_TASKS: Final = 10**8
"""Of one split. The buffer shuffles the indices of an epoch in its memory: so many take 0.8 GB and several seconds."""

LONGEST_FINGERPRINT: Final = 1024
"""Characters. The buffer drops frames with longer names."""


@dataclass(frozen=True)
class Task:
    """One problem.

    Attributes:
        prompt: text that is tokenized as it is, or chat messages (`role`, `content`) for the model's chat template. A
            content may be a list of parts, `{"type": "text", "text": …}` and `{"type": "image"}`.
        reference: the correct answer, for rewards.
        info: anything else a reward needs; plain JSON values, because rewards run in other processes.
        images: of the prompt, in the order of its parts: encoded bytes (PNG, JPEG, WebP), paths or pictures of Pillow.
            A part may have its own instead, as `image`. Rewards do not get them.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    reference: str
    info: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Any] = ()


class Env(Protocol):
    """A family of tasks; the same index always gives the same task.

    A rollout server builds it and reads its sizes and its fingerprint in the main thread, at the start; with
    `rollout.skip_long_prompts` all its tasks, too. Later tasks are read in one other thread, one at a time: an env
    needs no locks, but what belongs to the thread that opens it, such as a connection of sqlite3, must be opened by the
    first `task` there. After a call that exceeds `rollout.group_deadline_s` the next ones come from a new thread.
    """

    def size(self, split: Split) -> int:
        """Number of tasks in the split, at most `MOST_TASKS`; `eval` tasks never occur in `train`."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`, 0 <= index < size(split).

        It may block, up to `rollout.group_deadline_s`: other tasks wait for it, generation does not. It may raise: that
        costs the group, which is dropped and counted (`env_error`).
        """
        ...

    def fingerprint(self) -> str:
        """A text that differs when the tasks differ: every server of a run must announce the same.

        At most `LONGEST_FINGERPRINT` characters.
        """
        ...


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as it was parsed from the text of an action.

    Attributes:
        id: unique within the action.
        name: the tool's; empty where it can't be read.
        arguments: plain JSON values by name.
        error: why the call can't be run; empty for a good one.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True)
class Action:
    """The policy's action in one turn.

    Attributes:
        text: the generated text, without special tokens.
        token_ids: the generated tokens.
        tool_calls: calls that were parsed from the text.
        finish_reason: `stop`, or `length` if it was cut off at a limit. Then the episode continues only if the session
            answers with messages: the action gets its stop token as context.
    """

    text: str
    token_ids: Sequence[int]
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Observation:
    """The prompt of an episode's first action.

    Attributes:
        messages: a text that is tokenized as it is, or chat messages for the model's chat template.
        tools: schemas for the template, each whole: `{"type": "function", "function": {...}}`.
    """

    messages: str | Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Turn:
    """The env's answer to an action.

    Attributes:
        observation: text that is appended to the context as it is, or chat messages for the template; ignored when
            `done`.
        reward: is added to the episode's reward, at the action's last token.
        done: whether the episode ends here.
        metrics: numbers to record; they are summed over the turns of an episode.
    """

    observation: str | Sequence[Message] = ""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Session(Protocol):
    """One episode's state in an env of several turns.

    All sessions run in one event loop beside the server's: a method that blocks delays other sessions, but nothing
    else. A method may raise: that costs the episode (`env_error`). All calls of an episode share its group's deadline.

    It may have an attribute `resumable` that is true: the same actions in a new session of the same task lead to the
    same observations, and may be repeated without harm. If a rollout server is lost, another one repeats the episode's
    finished turns in a new session and goes on; otherwise its episodes begin again.
    """

    async def reset(self) -> Observation | str | Sequence[Message]:
        """The first observation: the prompt of the first action, as a text or chat messages; called once, first."""
        ...

    async def step(self, action: Action) -> Turn:
        """Applies an action."""
        ...

    async def close(self) -> None:
        """Frees what the session holds; called once, however the episode ended."""
        ...


class SessionEnv(Env, Protocol):
    """An `Env` whose episodes have several turns.

    If its sessions offer tools (`Observation.tools`), it has an attribute `offers_tools` that is true: a rollout server
    then checks the chat template's calls and results of tools before the engine starts.
    """

    def session(self, task: Task) -> Session:
        """A new session, made in the thread that sessions run in."""
        ...


@dataclass(frozen=True)
class AgentEndpoint:
    """Address and key of an agent's model; an OpenAI or Anthropic client needs nothing else.

    Attributes:
        session_url: of the session, `http://127.0.0.1:1234/s/ID`: Anthropic's clients append `/v1/messages`. Rewards
            are posted to `reward` below it.
        api_key: of this session alone.
        model: name of the model.
    """

    session_url: str
    api_key: str
    model: str

    @property
    def base_url(self) -> str:
        """The address for clients of OpenAI."""
        return f"{self.session_url}/v1"


@dataclass(frozen=True)
class AgentReward:
    """The reward of an agent's episode.

    Attributes:
        value: finite.
        metrics: numbers that are only recorded (`score/env/<name>`).
    """

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class EnvFailed(Exception):
    """The surroundings of an agent failed: that costs the episode (`env_error`), and is no failure of the agent."""


class AgentEnv(Env, Protocol):
    """An `Env` whose episodes are played by agents, programs that call the policy through the gateway.

    Attributes:
        from_outside: the agents open their sessions themselves, by `POST /sessions`; `run_agent` is not called.
        needs_reward: an episode fails (`reward_missing`) if neither `run_agent` nor the agent gave a reward; otherwise
            the run's `rewards` may score it alone.
    """

    from_outside: bool
    needs_reward: bool

    async def run_agent(self, task: Task, endpoint: AgentEndpoint) -> AgentReward | float | None:
        """Plays one episode; returns its reward, or None where the agent posts it or the run's `rewards` score it.

        All agents run in one event loop beside the server's. It may raise: that costs the episode (`agent_error`, or
        for EnvFailed `env_error`), which is never a reward of 0. It is cancelled at the episode's deadline.
        """
        ...


def runs_agents(env: Env) -> TypeGuard[AgentEnv]:
    """True if the env has a method `run_agent`."""
    return callable(getattr(env, "run_agent", None))


def gives_rewards(env: Env) -> bool:
    """True if episodes have rewards by the env itself, and several answers."""
    return has_sessions(env) or runs_agents(env)


def has_sessions(env: Env) -> TypeGuard[SessionEnv]:
    """True if the env has a method `session`."""
    return callable(getattr(env, "session", None))


def is_resumable(session: Session) -> bool:
    """True if the finished turns of an episode may be repeated in a new session."""
    return bool(getattr(session, "resumable", False))


def offers_tools(env: Env) -> bool:
    """True if the sessions of the env offer tools."""
    return bool(getattr(env, "offers_tools", False))
