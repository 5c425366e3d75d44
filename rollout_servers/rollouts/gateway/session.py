"""One session: an agent's episode, from its first call to its rewards."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

from slipstream.env.base import Message, Task
from slipstream.env.images import has_images, separate_images
from slipstream.models.images import ImageError
from slipstream.models.tokenizer import PromptError
from slipstream.rewards.base import Ended
from slipstream.rollout_servers.engines.base import Completion, EngineError
from slipstream.rollout_servers.rollouts.base import AnswerGenerator, EpisodeFailed, Prompt
from slipstream.rollout_servers.rollouts.conversation import ChatFormat
from slipstream.rollout_servers.rollouts.gateway.calls import Call, CallRefused, chain, tool_call
from slipstream.rollout_servers.rollouts.gateway.tree import Node, Tree
from slipstream.rollout_servers.tally import UNFINISHED, Tally

MOST_CALLS: Final = 1024
"""Calls of a session, unless `rollout.episode.turns` says less; each is at most one node."""
MOST_INFLIGHT: Final = 32
"""Calls of a session at a time."""
USUAL_CHARACTERS: Final = 8
"""Of a token; a text with more for each token of the context is measured piece by piece."""
PIECE_CHARACTERS: Final = 1 << 16
UNDELIVERED: Final = "undelivered"
"""Reason of the tokens of answers that the agent did not wait for."""
NOT_TRAINABLE: Final = "not_trainable"
"""Reason of the tokens of calls that the agent has marked so."""
STOPPED: Final = "behind_stop"
"""Reason of tokens behind a text that ends an answer."""


METRICS: Final = ("roots", "calls", "branches", "retries")
"""Scores of each session besides the parts of its rewards."""


class State(StrEnum):
    """Of a session: open → done | failed | void."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    VOID = "void"


@dataclass(frozen=True)
class Answer:
    """An answered call as the dialects send it.

    Attributes:
        prompt_tokens: of the whole context.
        stopped_by: the text that ended it.
    """

    node: Node
    prompt_tokens: int
    reasoning: str
    stopped_by: str | None = None

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`."""
        if self.node.answer.get("tool_calls"):
            return "tool_calls"
        return "stop" if self.stopped_by is not None or self.node.completion.finish_reason == "stop" else "length"


@dataclass(frozen=True)
class Reward:
    """A reward that was posted: for the whole episode, for one answer, or for the last one of an agent's label."""

    value: float
    parts: Mapping[str, float]
    completion_id: str | None = None
    agent: str | None = None


class Session:
    """The calls and rewards of one episode.

    Attributes:
        id: public.
        key: of its calls.
        until: deadline, the loop's time.
        limit: the budget that its calls have exhausted.
        ignored: parameters that were not applied, counted by name.
        retries: calls that were answered from an earlier one.
        failure: why no engine answers any more.
        ended, failed, rewarded: set with `state`, `failure` and the first reward.
    """

    def __init__(
        self, policy: AnswerGenerator, format: ChatFormat, task: Task, *, greedy: bool, until: float, tally: Tally
    ) -> None:
        self.id = secrets.token_hex(8)
        self.key = secrets.token_urlsafe(32)
        self.task = task
        self.until = until
        self.tree = Tree()
        self.state = State.OPEN
        self.tally = tally
        self.limit: Ended | None = None
        self.ignored = Counter[str]()
        self.retries = 0
        self.failure: EngineError | None = None
        self.ended, self.failed, self.rewarded = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._rewards: dict[tuple[str | None, str | None], Reward] = {}
        self._policy = policy
        self._format = format
        self._greedy = greedy
        self._used_tokens = self._reserved_tokens = self._arriving = 0
        self._freed = asyncio.Condition()
        self._calls: dict[bytes, asyncio.Task[Answer]] = {}
        self._inflight: set[asyncio.Task[Answer]] = set()

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._policy.tokenizer.model.name

    @property
    def temperature(self) -> float:
        """Of all answers."""
        return 0.0 if self._greedy else self._policy.config.sampling.temperature

    def token_text(self, token: int) -> str:
        """The text of a token."""
        return self._policy.tokenizer.decode_whole([token])

    def begin(self) -> None:
        """Starts the time of the episode, once its agent has the session."""
        if (wall_s := self._policy.config.episode.wall_s) is not None:
            self.until = min(self.until, asyncio.get_running_loop().time() + wall_s)

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(
        self, call: Call, *, agent: str = "", trainable: bool = True, is_retry: bool = False
    ) -> "asyncio.Task[Answer]":
        """The answer to a call; one that its SDK marks as a retry gets that of the call before, finished or not.

        The task goes on when the client is gone, whose retry may want its answer. Raises: CallRefused.
        """
        self._require_open()
        digests = call.digests()
        fingerprint = call.fingerprint(digests[-1], agent)
        earlier = self._calls.get(fingerprint)
        if is_retry and earlier is not None:
            self.retries += 1
            return earlier
        self._require_budget()
        self.ignored.update(call.ignored)
        task = asyncio.create_task(self._answer(call, digests, agent=agent, trainable=trainable))
        self._calls[fingerprint] = task
        self._inflight.add(task)
        task.add_done_callback(partial(self._end_call, fingerprint))
        return task

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While the body of a call arrives. Raises: CallRefused."""
        if self._arriving >= MOST_INFLIGHT:
            raise CallRefused(f"{MOST_INFLIGHT} calls of the session arrive", status=429, code="too_many_calls")
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def deliver(self, answer: Answer) -> None:
        """The agent gets an answer."""
        self.tree.deliver(answer.node)

    def _end_call(self, fingerprint: bytes, task: "asyncio.Task[Answer]") -> None:
        self._inflight.discard(task)
        error = None if task.cancelled() else task.exception()  # also marks it as retrieved: the client may be gone
        if (task.cancelled() or error is not None) and self._calls.get(fingerprint) is task:
            del self._calls[fingerprint]  # its traceback holds the whole body, and failed calls are not bounded
        if isinstance(error, EngineError) and self.failure is None:
            self.failure = error
            self.failed.set()

    def _require_open(self) -> None:
        if self.state is not State.OPEN:
            raise CallRefused(f"the session is over ({self.state})", status=410, code="session_over")

    def _require_budget(self) -> None:
        limits = self._policy.config.episode
        calls, most = len(self.tree.nodes) + len(self._inflight), min(limits.turns or MOST_CALLS, MOST_CALLS)
        if asyncio.get_running_loop().time() >= self.until:
            self._exhaust("wall", "its time is over (rollout.episode.wall_s, rollout.group_deadline_s)")
        if calls >= most:
            self._exhaust("turns", f"{most} calls were answered (rollout.episode.turns)")
        if len(self._inflight) >= MOST_INFLIGHT:
            raise CallRefused(f"{MOST_INFLIGHT} calls of the session are running", status=429, code="too_many_calls")

    def _exhaust(self, limit: Ended, detail: str) -> None:
        """Raises: CallRefused."""
        self.limit = self.limit or limit
        raise CallRefused(f"the session's budget is exhausted: {detail}", code="session_budget_exhausted")

    @asynccontextmanager
    async def _reserved(self, most: int, *, added: int) -> AsyncIterator[int]:
        """Room for an answer of at most `most` tokens behind `added` new ones, which waits for other calls' answers.

        Raises: CallRefused when the session's tokens are used up.
        """

        def room() -> int:
            return self._policy.config.episode_tokens - self._used_tokens - self._reserved_tokens - added

        async with self._freed:
            await self._freed.wait_for(lambda: room() >= most or not self._reserved_tokens)
        if room() <= 0:
            self._exhaust("tokens", f"{self._used_tokens} tokens were used (rollout.episode.tokens)")
        most = min(most, room())
        self._reserved_tokens += most + added
        try:
            yield most
        finally:
            self._reserved_tokens -= most + added
            async with self._freed:
                self._freed.notify_all()

    async def _answer(self, call: Call, digests: Sequence[bytes], *, agent: str, trainable: bool) -> Answer:
        parent, start = self.tree.parent(call.messages, digests)
        messages = call.messages[start:]
        try:
            if parent is not None and not has_images(messages):
                prompt, context = self._continued(parent, messages, call)
            else:
                parent = None
                prompt = self._rendered(call)
                context = prompt.token_ids
                messages = call.messages
        except (PromptError, ImageError) as error:
            raise CallRefused(f"the chat template can't render the messages: {error}") from None
        added = 0 if parent is None else len(context)
        async with self._reserved(self._most_tokens(call, prompt), added=added) as most:
            completion, stopped_by = await self._generate(call, prompt, most)
            self._used_tokens += added + len(completion.token_ids)
        answer, reasoning = self._message(completion, call, stopped_by)
        node = Node(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            parent=parent,
            digest=chain(digests[-1], [answer])[0],
            context=context,
            completion=completion,
            messages=messages,
            answer=answer,
            agent=agent,
            trainable=trainable,
            images=() if parent is not None else prompt.images,
        )
        self.tree.add(node)
        return Answer(node, len(prompt.token_ids), reasoning, stopped_by)

    def _rendered(self, call: Call) -> Prompt:
        """A whole dialogue. Raises: PromptError, ImageError, CallRefused."""
        messages, images = separate_images(call.messages, ())
        assert not isinstance(messages, str), "messages stay messages"
        if images and self._policy.placeholders is None:
            raise CallRefused("the model takes no images", code="images_not_supported")
        text = self._format.render(messages, tools=call.tools)
        self._require_short(text)
        return self._policy.expand(self._format.tokenizer.encode_observation(text), images)

    def _continued(self, parent: Node, messages: Sequence[Message], call: Call) -> tuple[Prompt, Sequence[int]]:
        """The context of a dialogue behind an answer, and its new tokens. Raises: PromptError."""
        for message in messages:
            self._require_short(str(message["content"]))
        context = parent.token_ids
        names = {each["id"]: each["function"]["name"] for each in parent.answer.get("tool_calls") or ()}
        named = [
            {**message, "name": names.get(message["tool_call_id"], "unknown")} if message["role"] == "tool" else message
            for message in messages
        ]
        added = self._format.continued(context, self._format.delta(named, tools=call.tools)).token_ids
        self._policy.expand(added, ())  # a text may name a placeholder
        return Prompt([*context, *added], parent.path[0].images), added

    def _require_short(self, text: str) -> None:
        """Raises: CallRefused for a text of far more tokens than a context may have, without encoding all of it: the
        whole server would wait, for seconds for each megabyte.
        """
        most, tokens = self._policy.config.engine.max_model_len, 0
        if len(text) <= USUAL_CHARACTERS * most:
            return
        for start in range(0, len(text), PIECE_CHARACTERS):
            tokens += len(self._format.tokenizer.encode_observation(text[start : start + PIECE_CHARACTERS]))
            if tokens > 2 * most:  # each cut adds a few
                raise CallRefused(
                    f"a text of {len(text)} characters is longer than this model's maximum context length of {most} "
                    "tokens (rollout.engine.max_model_len)",
                    code="context_length_exceeded",
                )

    def _most_tokens(self, call: Call, prompt: Prompt) -> int:
        """Tokens that an answer may have but for the session's budget. Raises: CallRefused."""
        config = self._policy.config
        context = config.engine.max_model_len - len(prompt.token_ids)
        if context <= 0 or not prompt.token_ids:
            raise CallRefused(
                f"{len(prompt.token_ids)} tokens leave no room for an answer: this model's maximum context length is "
                f"{config.engine.max_model_len} tokens (rollout.engine.max_model_len)",
                code="context_length_exceeded",
            )
        return min(context, config.sampling.max_tokens, call.max_tokens or config.sampling.max_tokens)

    async def _generate(self, call: Call, prompt: Prompt, most: int) -> tuple[Completion, str | None]:
        """An answer of at most `most` tokens. Raises: CallRefused, EngineError."""
        with self.tally.part() as tokens:
            try:
                (completion,) = await self._policy.generate(
                    prompt.token_ids,
                    images=prompt.images,
                    samples=1,
                    greedy=self._greedy,
                    until=self.until,
                    tally=tokens,
                    max_tokens=most,
                )
            except asyncio.CancelledError:
                tokens.lose(UNFINISHED)
                raise
            except EpisodeFailed as error:
                tokens.lose(error.reason)
                raise CallRefused(error.detail, code=error.reason) from error
            if completion.finish_reason == "abort" or not completion.token_ids:
                tokens.lose(UNFINISHED)
                self.limit = self.limit or "wall"
                raise CallRefused("the session's time is over", status=410, code="session_over")
            kept, stopped_by = self._cut(completion, call.stop)
            tokens.discard(STOPPED, len(completion.token_ids) - len(kept.token_ids))
        return kept, stopped_by

    def _cut(self, completion: Completion, stop: Sequence[str]) -> tuple[Completion, str | None]:
        """The answer up to the token that completes one of the texts `stop`: as if sampling had ended there."""
        tokenizer = self._format.tokenizer
        (text,) = tokenizer.decode([completion.token_ids])
        if not any(each in text for each in stop):
            return completion, None
        low, high = 1, len(completion.token_ids)
        while low < high:  # the shortest prefix that has one
            middle = (low + high) // 2
            (part,) = tokenizer.decode([completion.token_ids[:middle]])
            low, high = (low, middle) if any(each in part for each in stop) else (middle + 1, high)
        (part,) = tokenizer.decode([completion.token_ids[:low]])
        spans = [
            type(span)(version=span.version, start=span.start, end=min(span.end, low))
            for span in completion.spans
            if span.start < low
        ]
        shorter = replace(
            completion,
            token_ids=completion.token_ids[:low],
            logprobs=completion.logprobs[:low],
            spans=spans,
            finish_reason="stop",
            kept=None if completion.kept is None else completion.kept[:low],
            routed_experts=completion.routed_experts if low == len(completion.token_ids) else None,
        )
        return shorter, next(each for each in stop if each in part)

    def _message(self, completion: Completion, call: Call, stopped_by: str | None) -> tuple[Message, str]:
        """The message of an answer, and its reasoning."""
        (text,) = self._format.tokenizer.decode([completion.token_ids])
        content, calls = text, list[dict[str, Any]]()
        if call.tools or self._format.always_parses:
            before, parsed = self._format.parse(completion)
            if parsed and not any(each.error for each in parsed):
                content = before
                # Nine letters and digits: Mistral's chat templates take no other ids.
                calls = [tool_call(secrets.token_hex(5)[:9], each.name, each.arguments) for each in parsed]
        reasoning, content = split_reasoning(content)
        if stopped_by is not None:
            content = content.partition(stopped_by)[0]
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        return (answer | {"tool_calls": calls} if calls else answer), reasoning

    # --- rewards and end ----------------------------------------------------------------------------------------------

    def reward(self, reward: Reward) -> None:
        """Records a reward, which replaces an earlier one of the same answer, label, or of the whole.

        Raises: CallRefused for an answer or label that the session does not have, and once it is collected.
        """
        if self.state in (State.FAILED, State.VOID):
            raise CallRefused(f"the session is over ({self.state})", status=410, code="session_over")
        if self._place(reward) is None:
            of = f" of {reward.completion_id or reward.agent!r}" if reward.completion_id or reward.agent else " yet"
            raise CallRefused(f"the session has no answer{of}", status=404, code="unknown_completion")
        self._rewards[reward.completion_id, reward.agent] = reward
        self.rewarded.set()

    def rewards(self) -> list[tuple[Node, Reward]]:
        """The rewards, each with the answer at which it is earned."""
        placed = [(self._place(reward), reward) for reward in self._rewards.values()]
        return [(node, reward) for node, reward in placed if node is not None]

    def _place(self, reward: Reward) -> Node | None:
        if reward.completion_id is not None:
            return self.tree.find(reward.completion_id)
        nodes = [node for node in self.tree.delivered if reward.agent is None or node.agent == reward.agent]
        return nodes[-1] if nodes else None

    def close(self, state: State) -> None:
        """Ends the session; running calls are cancelled. The first end counts."""
        if self.state is State.OPEN:
            self.state = state
            for task in self._inflight:
                task.cancel()
            self.ended.set()

    async def settle(self) -> None:
        """Waits for the calls that `close` has cancelled, whose tokens are counted then."""
        if self._inflight:
            await asyncio.wait(self._inflight)

    def count_unused(self) -> None:
        """Counts the tokens of answers that are not trained on; once, at the end."""
        for node in self.tree:
            if not node.delivered:
                self.tally.discard(UNDELIVERED, len(node.completion.token_ids))
            elif not node.trainable:
                self.tally.discard(NOT_TRAINABLE, len(node.completion.token_ids))

    def account(self) -> dict[str, int]:
        """Tokens of the session so far: sampled, in answers that are trained on, and not used."""
        trained = sum(len(node.completion.token_ids) for node in self.tree.delivered if node.trainable)
        return {"sampled": self.tally.sampled, "trained": trained, "unused": self.tally.sampled - trained}


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and the rest of an answer; the template may have opened the reasoning in the prompt."""
    before, mark, after = text.partition("</think>")
    if mark:
        return before.partition("<think>")[2].strip() or before.strip(), after.lstrip("\n")
    if text.startswith("<think>"):
        return text.removeprefix("<think>").strip(), ""
    return "", text
