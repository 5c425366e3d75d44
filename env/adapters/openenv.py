"""Episodes on an OpenEnv server, over one WebSocket each; the server's own package is not needed here."""

import asyncio
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from slipstream.configs.runtime.errors import ConfigError, SlipstreamError
from slipstream.env.adapters.base import GeneratedGames, Prompt, as_prompt, require
from slipstream.env.base import Action, Task, Turn

HEALTH_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
CLOSE_S: Final = 5.0
LARGEST_MESSAGE: Final = 16 << 20
"""Bytes; the server's own client has the same order."""


class OpenEnvError(SlipstreamError):
    """The server failed at a request that was in order."""


@dataclass(frozen=True, kw_only=True)
class _Protocol:
    """How texts become actions, and observations texts."""

    action_field: str | None
    observation_field: str | None
    instructions: str
    chat: bool

    def action(self, text: str) -> dict[str, Any] | None:
        """The action in a text; None where it has none."""
        if self.action_field is not None:
            return {self.action_field: text}
        for start in (match.start() for match in re.finditer(r"\{", text)):
            try:
                value, _ = json.JSONDecoder().raw_decode(text[start:])
            except ValueError:
                continue
            return value if isinstance(value, dict) else None
        return None

    def shown(self, observation: Mapping[str, Any]) -> str:
        """The text of an observation: its field, or all of it as JSON."""
        if self.observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        return str(observation.get(self.observation_field, ""))


class OpenEnv(GeneratedGames):
    """An env behind an OpenEnv server; each episode is a session of it, begun by `reset(seed=…)`.

    Where the server is full, an episode waits until another one has ended.

    Args:
        url: of the server, such as `ws://127.0.0.1:8000`.
        action_field: the action's field that holds the answer's text; unset: the answer holds the action as a JSON
            object, the first one in it.
        observation_field: the observation's field that is shown; unset: all of them as JSON.
        instructions: the begin of the prompt.
        sessions: most episodes at once, of each rollout server.
        size, eval_size, seed: number of train and held-out starts, and what they are drawn from.
        chat: observations are chat messages of the user; False: texts.

    Raises: ConfigError when the server does not answer.
    """

    def __init__(  # noqa: PLR0913  (the keys of env.options)
        self,
        url: str,
        *,
        action_field: str | None = None,
        observation_field: str | None = None,
        instructions: str = "",
        sessions: int = 64,
        size: int = 10_000,
        eval_size: int = 256,
        seed: int = 0,
        chat: bool = True,
    ) -> None:
        require("openenv")
        self._url = _socket_url(url)
        if not isinstance(sessions, int) or sessions < 1:
            raise ConfigError(f"env openenv: sessions={sessions!r} must be a whole number of at least 1")
        self._places = asyncio.Semaphore(sessions)
        self._protocol = _Protocol(
            action_field=action_field, observation_field=observation_field, instructions=instructions, chat=chat
        )
        schema = _schema(self._url)
        # Without the address: servers of one run may use different ones.
        options = [action_field, observation_field, instructions, chat]
        super().__init__(size, eval_size, seed, made_by=["openenv", schema], options=options)

    def session(self, task: Task) -> "OpenEnvSession":
        """A session of the server, once there is a place."""
        return OpenEnvSession(self._url, self._places, self._protocol, task.info["seed"])


class OpenEnvSession:
    """One episode."""

    def __init__(self, url: str, places: asyncio.Semaphore, protocol: _Protocol, seed: int) -> None:
        self._url, self._places, self._protocol, self._seed = url, places, protocol, seed
        self._socket: Any = None
        self._has_place = False

    async def reset(self) -> Prompt:
        """Connects, waiting while the server is full. Raises: OpenEnvError."""
        await self._places.acquire()
        self._has_place = True
        pause_s = FIRST_PAUSE_S
        while (reply := await self._begin()) is None:
            await self._disconnect()
            # Several servers wait for the same places: not all at the same moments.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        text = self._protocol.shown(_observation(reply, "reset")["observation"])
        return as_prompt(f"{self._protocol.instructions}\n\n{text}".strip(), chat=self._protocol.chat)

    async def step(self, action: Action) -> Turn:
        """Plays one action in the server's env. Raises: OpenEnvError."""
        data = self._protocol.action(action.text)
        if data is None:
            return self._refused("Your answer has no JSON object.")
        reply = await self._request({"type": "step", "data": data})
        if reply["type"] == "error" and reply["data"].get("code") == "VALIDATION_ERROR":
            return self._refused(f"Your action is not valid: {_reasons(reply['data'])}")
        result = _observation(reply, "step")
        shown = as_prompt(self._protocol.shown(result["observation"]), chat=self._protocol.chat)
        return Turn(shown, float(result["reward"] or 0.0), done=bool(result["done"]), metrics={"invalid_actions": 0.0})

    async def close(self) -> None:
        """Ends the session of the server, and gives the place back."""
        try:
            await self._disconnect()
        finally:
            if self._has_place:
                self._has_place = False
                self._places.release()

    def _refused(self, reason: str) -> Turn:
        return Turn(as_prompt(reason, chat=self._protocol.chat), metrics={"invalid_actions": 1.0})

    async def _begin(self) -> dict[str, Any] | None:
        """The reply to a reset on a new connection; None where the server is full."""
        websockets = require("openenv", "websockets.asyncio.client")
        from websockets.exceptions import ConnectionClosed

        self._socket = await websockets.connect(
            self._url, max_size=LARGEST_MESSAGE, close_timeout=CLOSE_S, compression=None
        )
        try:
            reply = await self._request({"type": "reset", "data": {"seed": self._seed}})
        except ConnectionClosed:  # before the first answer: some versions of the server refuse by closing alone
            return None
        return None if reply["data"].get("code") == "CAPACITY_REACHED" else reply

    async def _request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps(message))
        reply = json.loads(await self._socket.recv())
        if not isinstance(reply, dict) or not isinstance(reply.get("data"), dict) or "type" not in reply:
            raise OpenEnvError(f"{self._url} replied {str(reply)[:200]}, which is no message of OpenEnv")
        return reply

    async def _disconnect(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await socket.close()  # within close_timeout


def _observation(reply: Mapping[str, Any], request: str) -> Mapping[str, Any]:
    """Raises: OpenEnvError."""
    data: Mapping[str, Any] = reply["data"]
    if reply["type"] != "observation" or not {"observation", "reward", "done"} <= data.keys():
        raise OpenEnvError(
            f"the server failed at {request}: {data.get('code', '')} {str(data.get('message', data))[:300]}"
        )
    return data


def _reasons(data: Mapping[str, Any]) -> str:
    """pydantic's errors as text."""
    errors = data.get("errors") or []
    return (
        "; ".join(f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}" for each in errors) or "unknown"
    )


def _socket_url(url: str) -> str:
    """The WebSocket of a server. Raises: ConfigError."""
    parts = urlsplit(url)
    schemes = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise ConfigError(f"env openenv: url={url!r} must look like ws://host:port")
    path = parts.path.rstrip("/").removesuffix("/ws") + "/ws"
    return urlunsplit((schemes[parts.scheme], parts.netloc, path, "", ""))


def _schema(url: str) -> Any:
    """The server's schema of actions and observations. Raises: ConfigError when it does not answer."""
    import httpx  # here: other envs don't pay for it

    address = "http" + url.removeprefix("ws").removesuffix("/ws") + "/schema"
    try:
        return httpx.get(address, timeout=HEALTH_S).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(
            f"env openenv: {address} does not answer: {type(error).__name__}: {error}; start the server first"
        ) from None
