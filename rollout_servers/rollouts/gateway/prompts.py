"""The tokens of a call's messages: of a whole dialogue, or of those behind an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slipstream.env.base import Message
from slipstream.env.images import separate_images
from slipstream.rollout_servers.rollouts.base import AnswerGenerator, Prompt
from slipstream.rollout_servers.rollouts.conversation import ChatFormat
from slipstream.rollout_servers.rollouts.gateway.calls import Call, CallRefused
from slipstream.rollout_servers.rollouts.gateway.tree import Node

USUAL_CHARACTERS: Final = 8
"""Of a token; a text with more for each token of the context is measured piece by piece."""
PIECE_CHARACTERS: Final = 1 << 16


@dataclass(frozen=True)
class Prompts:
    """Makes the contexts of a session's answers."""

    policy: AnswerGenerator
    format: ChatFormat

    def rendered(self, call: Call) -> Prompt:
        """A whole dialogue. Raises: PromptError, ImageError, CallRefused."""
        messages, images = separate_images(call.messages, ())
        assert not isinstance(messages, str), "messages stay messages"
        if images and self.policy.placeholders is None:
            raise CallRefused("the model takes no images", code="images_not_supported")
        text = self.format.render(messages, tools=call.tools)
        self._require_short(text)
        return self.policy.expand(self.format.tokenizer.encode_observation(text), images)

    def continued(self, parent: Node, messages: Sequence[Message], call: Call) -> tuple[Prompt, Sequence[int]]:
        """The context of a dialogue behind an answer, and its new tokens. Raises: PromptError."""
        for message in messages:
            self._require_short(str(message["content"]))
        context = parent.token_ids
        names = {each["id"]: each["function"]["name"] for each in parent.answer.get("tool_calls") or ()}
        named = [
            {**message, "name": names.get(message["tool_call_id"], "unknown")} if message["role"] == "tool" else message
            for message in messages
        ]
        added = self.format.continued(context, self.format.delta(named, tools=call.tools)).token_ids
        self.policy.expand(added, ())  # a text may name a placeholder
        return Prompt([*context, *added], parent.path[0].images), added

    def _require_short(self, text: str) -> None:
        """Raises: CallRefused for a text of far more tokens than a context may have, without encoding all of it: the
        whole server would wait, for seconds for each megabyte.
        """
        most, tokens = self.policy.config.engine.max_model_len, 0
        if len(text) <= USUAL_CHARACTERS * most:
            return
        for start in range(0, len(text), PIECE_CHARACTERS):
            tokens += len(self.format.tokenizer.encode_observation(text[start : start + PIECE_CHARACTERS]))
            if tokens > 2 * most:  # each cut adds a few
                raise CallRefused(
                    f"a text of {len(text)} characters is longer than this model's maximum context length of {most} "
                    "tokens (rollout.engine.max_model_len)",
                    code="context_length_exceeded",
                )

    def most_tokens(self, call: Call, prompt: Prompt) -> int:
        """Tokens that an answer may have but for the session's budget. Raises: CallRefused."""
        config = self.policy.config
        context = config.engine.max_model_len - len(prompt.token_ids)
        if context <= 0 or not prompt.token_ids:
            raise CallRefused(
                f"{len(prompt.token_ids)} tokens leave no room for an answer: this model's maximum context length is "
                f"{config.engine.max_model_len} tokens (rollout.engine.max_model_len)",
                code="context_length_exceeded",
            )
        return min(context, config.sampling.max_tokens, call.max_tokens or config.sampling.max_tokens)
