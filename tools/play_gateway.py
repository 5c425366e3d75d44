"""`slipstream try --gateway`: an episode that the user's own agent plays, and the tree of its calls."""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.env.base import AgentEndpoint, Env, Split, Task

if TYPE_CHECKING:
    from slipstream.rollout_servers.rollouts.gateway.session import Session
    from slipstream.rollout_servers.rollouts.gateway.sessions import Gateway

POLL_S: Final = 0.1
SHOWN: Final = 120
"""Characters of an answer."""


class PlayedByHand:
    """The tasks of an env; an episode lasts until its session is closed.

    Attributes:
        gateway: that serves the episode.
    """

    from_outside = False
    needs_reward = False

    def __init__(self, env: Env) -> None:
        self._env = env
        self.gateway: Gateway | None = None
        self._session: Session | None = None

    def size(self, split: Split) -> int:
        """Number of tasks in the split."""
        return self._env.size(split)

    def task(self, split: Split, index: int) -> Task:
        """The task at `index`."""
        return self._env.task(split, index)

    def fingerprint(self) -> str:
        """That of the env."""
        return self._env.fingerprint()

    async def run_agent(self, task: Task, endpoint: AgentEndpoint) -> None:
        """Prints what an agent needs, and returns once the session is closed. Raises: SlipstreamError."""
        assert self.gateway is not None, "the gateway serves before an episode begins"
        session = self._session = self.gateway.find(endpoint.session_url.rpartition("/")[2])
        assert session is not None, "the session of a running agent is open"
        print(_instructions(task, endpoint), file=sys.stderr, flush=True)
        while session.state == "open":  # in the server's event loop, which is another one
            await asyncio.sleep(POLL_S)
        if session.state != "done":
            raise SlipstreamError(f"the session was closed as {session.state}")

    def described(self) -> Mapping[str, Any]:
        """The tree of calls and the account of tokens."""
        from slipstream.rollout_servers.rollouts.gateway.app import described

        assert self._session is not None, "an episode was played"
        return described(self._session)


def _instructions(task: Task, endpoint: AgentEndpoint) -> str:
    head = f"-H 'Authorization: Bearer {endpoint.api_key}'"
    call = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
    return f"""task: {json.dumps({"prompt": task.prompt, "info": task.info}, default=str, ensure_ascii=False)}
export OPENAI_BASE_URL={endpoint.base_url} OPENAI_API_KEY={endpoint.api_key} OPENAI_MODEL={endpoint.model}
export ANTHROPIC_BASE_URL={endpoint.session_url} ANTHROPIC_API_KEY={endpoint.api_key}
a call:  curl {endpoint.base_url}/chat/completions {head} -d '{call}'
reward:  curl {endpoint.session_url}/reward {head} -d '{{"reward": 1.0}}'
the end: curl -X POST {endpoint.session_url}/close {head}
waiting until the session is closed; Ctrl-C gives it up"""


def call_table(session: Mapping[str, Any]) -> Table:
    """The calls, each with the one that it continues."""
    table = Table(title="calls", title_justify="left", border_style="cyan")
    for name in ("call", "continues", "agent", "context", "answer", "ended by", "trained", "text"):
        table.add_column(name, justify="right" if name in ("context", "answer") else "left", overflow="fold")
    numbers = {node["id"]: str(number) for number, node in enumerate(session["nodes"], start=1)}
    for node in session["nodes"]:
        text = json.dumps(node["tool_calls"], ensure_ascii=False) if node["tool_calls"] else node["content"]
        table.add_row(
            numbers[node["id"]],
            numbers.get(node["parent"], "(root)"),
            Text(node["agent"]),
            f"{len(node['context_ids']):,}",
            f"{len(node['token_ids']):,}",
            node["finish_reason"],
            "yes" if node["trainable"] and node["delivered"] else "no",
            Text(text[:SHOWN] + ("…" if len(text) > SHOWN else "")),
        )
    return table


def account_of(session: Mapping[str, Any]) -> str:
    """The numbers of sequences and tokens."""
    tokens = session["tokens"]
    ignored = "".join(f", {name} ignored {count} times" for name, count in session["ignored"].items())
    return (
        f"{session['roots']} roots, {len(session['nodes'])} calls, {session['retries']} retries; tokens: "
        f"{tokens['sampled']:,} sampled, {tokens['trained']:,} trained, {tokens['unused']:,} unused{ignored}"
    )
