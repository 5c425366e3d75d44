"""One session: an agent's episode, from its first call to its rewards."""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from slipstream.env.base import AgentReward, Message, Task
from slipstream.env.images import has_images
from slipstream.models.images import ImageError
from slipstream.models.tokenizer import PromptError
from slipstream.rollout_servers.engines.base import Completion, EngineError
from slipstream.rollout_servers.rollouts.base import AnswerGenerator, EpisodeFailed, Prompt
from slipstream.rollout_servers.rollouts.conversation import ChatFormat
from slipstream.rollout_servers.rollouts.gateway.answers import cut_at_stop, message_of
from slipstream.rollout_servers.rollouts.gateway.budget import Budget
from slipstream.rollout_servers.rollouts.gateway.calls import Call, CallRefused, chain
from slipstream.rollout_servers.rollouts.gateway.events import Called, Ended, Event, Opened, Rewarded, decode, encode
from slipstream.rollout_servers.rollouts.gateway.prompts import Prompts
from slipstream.rollout_servers.rollouts.gateway.tree import Node, Tree
from slipstream.rollout_servers.rollouts.record import VOID, EpisodeRecord
from slipstream.rollout_servers.tally import NOT_RESUMED, UNFINISHED, Tally

KEEP_S: Final = 60.0
"""Time for the buffer to keep a step; the agent waits for it."""
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
    """A reward that was posted: for the whole episode, for one answer, or for the last one of an agent's label.

    Attributes:
        more: others follow, which an episode whose agent has ended waits for.
    """

    value: float
    parts: Mapping[str, float]
    completion_id: str | None = None
    agent: str | None = None
    more: bool = False


class Session:
    """The calls and rewards of one episode.

    Attributes:
        id: public.
        key: of its calls.
        budget: of its calls, tokens and time.
        ignored: parameters that were not applied, counted by name.
        retries: calls that were answered from an earlier one.
        failure: why no engine answers any more.
        ended, failed, taken, rewarded: set with `state`, `failure`, `opened` and the first reward.
        opened: True if an agent from outside has it.
        moved: True once another server goes on with it, or this one with a later ticket.
        is_collected: True once its episode is over: later rewards would be lost.
        finished: how its agent has ended on an earlier server.
    """

    def __init__(
        self,
        policy: AnswerGenerator,
        format: ChatFormat,
        task: Task,
        *,
        greedy: bool,
        until: float,
        tally: Tally,
        record: EpisodeRecord,
    ) -> None:
        """A session, which goes on from the steps that `record` has of an earlier server (`_resume`)."""
        self.id = secrets.token_hex(8)
        self.key = secrets.token_urlsafe(32)
        self.task = task
        self.budget = Budget(policy.config, until=until)
        self.tree = Tree()
        self.state = State.OPEN
        self.tally = tally
        self.ignored = Counter[str]()
        self.retries = 0
        self.failure: EngineError | None = None
        self.ended, self.failed = asyncio.Event(), asyncio.Event()
        self.taken, self.rewarded = asyncio.Event(), asyncio.Event()
        self._rewards: dict[tuple[str | None, str | None], Reward] = {}
        self._policy = policy
        self._format = format
        self._prompts = Prompts(policy, format)
        self._greedy = greedy
        self._calls: dict[bytes, asyncio.Task[Answer]] = {}
        self._inflight: set[asyncio.Task[Answer]] = set()
        self._record = record
        self._earlier: dict[bytes, list[Answer]] = {}
        self.opened = self.moved = self.is_collected = False
        self.finished: Ended | None = None
        self._resume(decode(record.kept))

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

    # --- steps of an earlier server, and those that are kept for a later one ------------------------------------------

    def _resume(self, events: Sequence[Event]) -> None:
        """Goes on from the steps of an earlier server.

        An agent from outside is alive, and one that has ended is not run again: their answers are in the tree. Any
        other is run again from its beginning: a call as before gets the answer of then, which joins the tree.
        """
        self.tally.take(self._record.kept_tokens)
        self.finished = next((event for event in events if isinstance(event, Ended)), None)
        opened = next((event for event in events if isinstance(event, Opened)), None)
        if opened is not None:
            self.id, self.key, self.opened = opened.id, opened.key, True
        is_whole = self.opened or self.finished is not None
        nodes = dict[str, Node]()
        for event in events:
            if isinstance(event, Called):
                node = event.node(nodes)
                if node is None:
                    self.tally.discard(NOT_RESUMED, len(event.completion.completion().token_ids))
                    continue
                nodes[node.id] = node
                tokens = len(node.token_ids) - len(node.completion.token_ids)
                answer = Answer(node, tokens, event.reasoning, event.stopped_by)
                self._earlier.setdefault(event.fingerprint, []).append(answer)
                if is_whole:
                    self._join(node)
                    if self.finished is None or node.id not in self.finished.undelivered:
                        self.tree.deliver(node)
            elif isinstance(event, Rewarded) and is_whole:
                self._set_reward(Reward(event.value, event.parts, event.completion_id, event.agent, event.more))
        if self.finished is not None:
            self.budget.limit = self.finished.limit
            self.close(State(self.finished.state))

    def _join(self, node: Node) -> None:
        """Adds an answer of an earlier server to the tree."""
        self.tree.add(node)
        self.budget.use((0 if node.parent is None else len(node.context)) + len(node.completion.token_ids))

    def _answered_earlier(self, fingerprint: bytes) -> Answer | None:
        """The answer of an earlier server to the same call, once, unless another call has continued it."""
        answers = self._earlier.get(fingerprint)
        if not answers:
            return None
        parents = {node.parent for node in self.tree}
        for answer in answers:
            node = answer.node
            if node not in parents and (node.parent is None or node.parent in self.tree.nodes):
                answers.remove(answer)
                if node not in self.tree.nodes:
                    self._join(node)
                return answer
        return None

    async def _keep(self, content: bytes, *, tokens: int = 0) -> None:
        """Returns once the buffer keeps a step. Raises: CallRefused."""
        try:
            async with asyncio.timeout(KEEP_S):
                outcome = await self._record.add(content, tokens=tokens)
        except TimeoutError:
            raise CallRefused(f"not kept within {KEEP_S:g} s", status=503, code="not_kept") from None
        if outcome == VOID:
            self.move()
            self._require_here()

    def move(self) -> None:
        """Ends a session whose ticket is another one by now; none of its rewards comes here any more."""
        self.moved = True
        self.close(State.VOID)
        self.rewarded.set()

    def _require_here(self) -> None:
        if self.moved:
            raise CallRefused("another server goes on with the session", status=503, code="session_moved")

    async def open(self) -> None:
        """Has it kept that an agent from outside takes the session. Raises: CallRefused."""
        await self._keep(encode(Opened(self.id, self.key)))

    def hand_out(self) -> None:
        """The agent gets the opened session."""
        self.opened = True
        self.budget.begin()
        self.taken.set()

    async def end(self, state: State, *, reward: AgentReward | None = None) -> None:
        """Ends the session, with the reward that its agent has returned. Raises: CallRefused."""
        undelivered = [node.id for node in self.tree if not node.delivered]
        await self._keep(encode(Ended(state, self.budget.limit, reward, undelivered)))
        self.close(state)

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
        answer = self._answered_earlier(fingerprint)
        if answer is not None:
            self._calls[fingerprint] = asyncio.create_task(_given(answer))
            return self._calls[fingerprint]
        self.budget.require(answered=len(self.tree.nodes), running=len(self._inflight))
        self.ignored.update(call.ignored)
        answering = self._answer(call, digests, fingerprint, agent=agent, trainable=trainable)
        task = asyncio.create_task(self._unless_moved(answering))
        self._calls[fingerprint] = task
        self._inflight.add(task)
        task.add_done_callback(partial(self._end_call, fingerprint))
        return task

    async def _unless_moved(self, answering: Awaitable[Answer]) -> Answer:
        try:
            return await answering
        except asyncio.CancelledError:
            self._require_here()  # the agent asks again, where the session is
            raise

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
        self._require_here()
        if self.state is not State.OPEN:
            raise CallRefused(f"the session is over ({self.state})", status=410, code="session_over")

    def count_tokens(self, call: Call) -> int:
        """Tokens that the prompt of a call would have. Raises: CallRefused."""
        self._require_open()
        _, prompt, _, _ = self._prompt(call, call.digests())
        return len(prompt.token_ids)

    def _prompt(
        self, call: Call, digests: Sequence[bytes]
    ) -> tuple[Node | None, Prompt, Sequence[int], Sequence[Message]]:
        """The node that a call continues, its prompt, and of that the new tokens and messages. Raises: CallRefused."""
        parent, start = self.tree.parent(call.messages, digests)
        messages = call.messages[start:]
        try:
            if parent is not None and not has_images(messages):
                return parent, *self._prompts.continued(parent, messages, call), messages
            prompt = self._prompts.rendered(call)
        except (PromptError, ImageError) as error:
            raise CallRefused(f"the chat template can't render the messages: {error}") from None
        return None, prompt, prompt.token_ids, call.messages

    async def _answer(
        self, call: Call, digests: Sequence[bytes], fingerprint: bytes, *, agent: str, trainable: bool
    ) -> Answer:
        parent, prompt, context, messages = self._prompt(call, digests)
        added = 0 if parent is None else len(context)
        async with self.budget.reserved(self._prompts.most_tokens(call, prompt), added=added) as most:
            completion, stopped_by = await self._generate(call, prompt, most)
            self.budget.use(added + len(completion.token_ids))
        parses = bool(call.tools) or self._format.always_parses
        answer, reasoning = message_of(completion, self._format, parses=parses, stopped_by=stopped_by)
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
        kept = Called.of(node, fingerprint, reasoning=reasoning, stopped_by=stopped_by)
        await self._keep(kept, tokens=len(completion.token_ids))
        return Answer(node, len(prompt.token_ids), reasoning, stopped_by)

    async def _generate(self, call: Call, prompt: Prompt, most: int) -> tuple[Completion, str | None]:
        """An answer of at most `most` tokens. Raises: CallRefused, EngineError."""
        with self.tally.part() as tokens:
            try:
                (completion,) = await self._policy.generate(
                    prompt.token_ids,
                    images=prompt.images,
                    samples=1,
                    greedy=self._greedy,
                    until=self.budget.until,
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
                self.budget.limit = self.budget.limit or "wall"
                raise CallRefused("the session's time is over", status=410, code="session_over")
            kept, stopped_by = cut_at_stop(completion, call.stop, self._format.tokenizer)
            tokens.discard(STOPPED, len(completion.token_ids) - len(kept.token_ids))
        return kept, stopped_by

    # --- rewards and end ----------------------------------------------------------------------------------------------

    async def reward(self, reward: Reward) -> None:
        """Records a reward, which replaces an earlier one of the same answer, label, or of the whole.

        Raises: CallRefused for an answer or label that the session does not have, and once it is collected.
        """
        self._require_rewardable()
        if self._place(reward) is None:
            of = f" of {reward.completion_id or reward.agent!r}" if reward.completion_id or reward.agent else " yet"
            raise CallRefused(f"the session has no answer{of}", status=404, code="unknown_completion")
        event = Rewarded(reward.value, dict(reward.parts), reward.completion_id, reward.agent, reward.more)
        await self._keep(encode(event))
        self._require_rewardable()
        self._set_reward(reward)

    def _require_rewardable(self) -> None:
        self._require_here()
        if self.state in (State.FAILED, State.VOID) or self.is_collected:
            raise CallRefused(f"the session is over ({self.state})", status=410, code="session_over")

    def _set_reward(self, reward: Reward) -> None:
        self._rewards[reward.completion_id, reward.agent] = reward
        if not reward.more:
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
        for answer in itertools.chain(*self._earlier.values()):
            if answer.node not in self.tree.nodes:
                self.tally.discard(NOT_RESUMED, len(answer.node.completion.token_ids))

    def account(self) -> dict[str, int]:
        """Tokens of the session so far: sampled, in answers that are trained on, and not used."""
        trained = sum(len(node.completion.token_ids) for node in self.tree.delivered if node.trainable)
        return {"sampled": self.tally.sampled, "trained": trained, "unused": self.tally.sampled - trained}


async def _given(answer: Answer) -> Answer:
    return answer
