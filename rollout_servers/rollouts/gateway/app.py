"""The gateway's ASGI application: routes, keys, bounds and errors."""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router

from slipstream.rollout_servers.engines.base import EngineError
from slipstream.rollout_servers.rollouts.gateway import anthropic, chat, responses
from slipstream.rollout_servers.rollouts.gateway.calls import Call, CallRefused
from slipstream.rollout_servers.rollouts.gateway.session import METRICS, Answer, Reward, Session, State
from slipstream.rollout_servers.rollouts.gateway.sessions import Gateway
from slipstream.rollout_servers.rollouts.gateway.tree import Node

MOST_BODY_BYTES: Final = 32 << 20
"""Of a request; images come in it."""
BODY_S: Final = 60.0
"""Time for a request's body to arrive."""
RETRY_AFTER_S: Final = 2
"""Pause that is asked of agents while there is no ticket to play."""
KEEP_ALIVE_S: Final = 5.0
"""Time between two comments that keep a stream's connection open."""
COMING: Final = ("unknown_session", "session_moved", "not_kept")
"""Codes of requests that may be answered later: a session comes to this gateway if its server is lost."""
LARGEST_REWARD: Final = 1e6
MOST_PARTS: Final = 32
MOST_NAME: Final = 100
"""Characters."""


@dataclass(frozen=True)
class Dialect:
    """An API in which agents call."""

    read: Callable[[bytes, Session], Call]
    whole: Callable[[Answer, Call, Session], dict[str, Any]]
    events: Callable[[Answer, Call, Session], Iterator[bytes]]
    error: Callable[[str, int, str], dict[str, Any]]


DIALECTS: Final = {
    "chat/completions": Dialect(chat.read, chat.whole, chat.events, chat.error),
    "responses": Dialect(responses.read, responses.whole, responses.events, chat.error),
    "messages": Dialect(anthropic.read, anthropic.whole, anthropic.events, anthropic.error),
}


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """`reward` is a number, or named parts of one, which are summed; with `more`, others follow."""

    reward: float | dict[str, float]
    completion_id: str | None = None
    agent: str | None = None
    more: bool = False


class CloseBody(msgspec.Struct, forbid_unknown_fields=True):
    """State in which the session ends."""

    state: State = State.DONE


class GatewayApp:
    """The routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def app(self) -> Router:
        """The ASGI application; without Starlette's middleware, which has no part here and costs time at each call."""
        calls = [
            Route(f"/s/{{id}}/v1/{path}", self._answerer(dialect), methods=["POST"])
            for path, dialect in DIALECTS.items()
        ]
        manage = [
            Route(prefix + suffix, endpoint, methods=[method])
            for prefix in ("/sessions/{id}", "/s/{id}")
            for suffix, endpoint, method in (
                ("", self._guard(self._show), "GET"),
                ("/reward", self._guard(self._reward), "POST"),
                ("/close", self._guard(self._close), "POST"),
            )
        ]
        return Router(
            routes=[
                *calls,
                Route("/s/{id}/v1/messages/count_tokens", self._guard(self._count, anthropic.error), methods=["POST"]),
                Route("/s/{id}/v1/models", self._guard(self._models), methods=["GET"]),
                Route("/sessions", self._guard(self._open), methods=["POST"]),
                *manage,
            ]
        )

    # --- calls --------------------------------------------------------------------------------------------------------

    def _answerer(self, dialect: Dialect) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            session = self._session(request)
            with session.budget.receiving():
                body = await _body(request)
            with _readable():
                call = dialect.read(body, session)
                task = session.call(
                    call,
                    agent=request.headers.get("x-slipstream-agent", "")[:200],
                    trainable=request.headers.get("x-slipstream-trainable", "true").lower() not in ("false", "0"),
                    is_retry=request.headers.get("x-stainless-retry-count", "0") not in ("", "0"),
                )
            del body  # up to 32 MiB, not needed while the call waits
            if not call.stream:
                result = await asyncio.shield(task)
                if request.state.cycle.disconnected:  # Starlette's `is_disconnected` costs a tenth of a call
                    raise ClientDisconnect
                session.deliver(result)
                return _json(dialect.whole(result, call, session))
            await asyncio.wait([task], timeout=KEEP_ALIVE_S)
            if task.done():
                await asyncio.shield(task)  # an error has a status of its own
            return StreamingResponse(
                self._stream(request, dialect, call, session, task), media_type="text/event-stream"
            )

        return self._guard(answer, dialect.error)

    async def _stream(
        self, request: Request, dialect: Dialect, call: Call, session: Session, task: "asyncio.Task[Answer]"
    ) -> AsyncIterator[bytes]:
        while not task.done():
            yield b": keep-alive\n\n"
            await asyncio.wait([task], timeout=KEEP_ALIVE_S)
        if await request.is_disconnected():
            return
        try:
            result = task.result()
        except (CallRefused, EngineError, asyncio.CancelledError) as error:
            message, status, code = _described(error)
            self._gateway.refused[code] += 1
            yield chat.event(dialect.error(message, status, code), "error")
            return
        session.deliver(result)
        for event in dialect.events(result, call, session):
            yield event

    async def _count(self, request: Request) -> Response:
        session = self._session(request)
        with session.budget.receiving():
            body = await _body(request)
        with _readable():
            call = anthropic.read_to_count(body, session)
        return _json({"input_tokens": session.count_tokens(call)})

    async def _models(self, request: Request) -> Response:
        session = self._session(request)
        return _json({"object": "list", "data": [{"id": session.model, "object": "model", "owned_by": "slipstream"}]})

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def _open(self, request: Request) -> Response:
        if not _has_key(request, self._gateway.key):
            raise CallRefused("opening sessions needs the gateway's key", status=401, code="invalid_key")
        session = self._gateway.take()
        if session is None:
            raise CallRefused("no ticket waits for an agent; ask again", status=429, code="admission_closed")
        try:
            await session.open()
            if request.state.cycle.disconnected:
                raise ClientDisconnect
        except (CallRefused, ClientDisconnect):
            self._gateway.offer_again(session)
            raise
        if session.state is not State.OPEN:
            raise CallRefused("the ticket's time is over; ask again", status=429, code="admission_closed")
        session.hand_out()
        url, task = self._gateway.session_url(session), session.task
        left_s = session.budget.until - asyncio.get_running_loop().time()
        return _json(
            {
                "id": session.id,
                "session_url": url,
                "base_url": f"{url}/v1",
                "api_key": session.key,
                "model": session.model,
                "deadline_s": round(left_s, 3),
                "task": {"prompt": task.prompt, "info": task.info},
            },
            201,
        )

    async def _show(self, request: Request) -> Response:
        return _json(described(self._session(request)))

    async def _reward(self, request: Request) -> Response:
        session = self._session(request)
        with _readable():
            body = msgspec.json.decode(await _body(request), type=RewardBody)
        parts = body.reward if isinstance(body.reward, dict) else {}
        values = [body.reward] if isinstance(body.reward, float) else list(parts.values())
        value = math.fsum(values)
        if not values or not all(map(math.isfinite, values)) or abs(value) > LARGEST_REWARD:
            raise CallRefused(f"a reward is a finite number, or named ones, up to {LARGEST_REWARD:g}")
        if len(parts) > MOST_PARTS or any(len(name) > MOST_NAME or name in METRICS for name in parts):
            raise CallRefused(
                f"a reward has at most {MOST_PARTS} parts, with names of at most {MOST_NAME} characters and none of "
                f"{', '.join(METRICS)}"
            )
        if body.completion_id is not None and body.agent is not None:
            raise CallRefused("a reward is that of an answer (completion_id) or of an agent, not of both")
        await session.reward(Reward(value, parts, body.completion_id, body.agent, body.more))
        return _json({"reward": value})

    async def _close(self, request: Request) -> Response:
        session = self._session(request)
        body = await _body(request)
        with _readable():
            state = msgspec.json.decode(body, type=CloseBody).state if body else State.DONE
        if state is State.OPEN:
            raise CallRefused("state must be done, failed or void")
        await session.end(state)
        return _json({"state": session.state})

    # --- keys and errors ----------------------------------------------------------------------------------------------

    def _session(self, request: Request) -> Session:
        """Raises: CallRefused."""
        session = self._gateway.find(request.path_params["id"])
        if session is None and self._gateway.is_over(request.path_params["id"]):
            raise CallRefused("the session is over", status=410, code="session_over")
        if session is None:
            raise CallRefused("there is no such session", status=404, code="unknown_session")
        if not _has_key(request, session.key):
            raise CallRefused("the key is not that of the session", status=401, code="invalid_key")
        return session

    def _guard(
        self, endpoint: Callable[[Request], Any], describe: Callable[[str, int, str], dict[str, Any]] = chat.error
    ) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            try:
                response: Response = await endpoint(request)
            except ClientDisconnect:
                self._gateway.refused["client_gone"] += 1
                return Response(status_code=499)
            except (CallRefused, EngineError) as error:
                caught: BaseException = error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                caught = error  # the call's, not the request's: the session is over
            else:
                return response
            message, status, code = _described(caught)
            self._gateway.refused[code] += 1
            again = status == 429 or code in COMING
            headers = {"x-should-retry": str(again).lower()} | ({"retry-after": str(RETRY_AFTER_S)} if again else {})
            return _json(describe(message, status, code), status, headers)

        return guarded


def described(session: Session) -> dict[str, Any]:
    """The tree of a session's calls, and the account of its tokens, as JSON values."""
    return {
        "id": session.id,
        "state": session.state,
        "limit": session.budget.limit,
        "tokens": session.account(),
        "ignored": dict(session.ignored),
        "retries": session.retries,
        "roots": session.tree.roots,
        "nodes": [_node(node) for node in session.tree],
    }


def _described(error: BaseException) -> tuple[str, int, str]:
    """Message, status and code of an error."""
    if isinstance(error, CallRefused):
        return str(error), error.status, error.code
    if isinstance(error, EngineError):
        return f"the engine has failed: {error}", 503, "engine_failed"
    return "the session is over", 410, "session_over"


@contextmanager
def _readable() -> Iterator[None]:
    """Raises: CallRefused for a body that can't be read."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # also of a value of another type
        raise CallRefused(f"the body can't be read: {error}", code="malformed") from None
    except RecursionError:
        raise CallRefused("the body can't be read: nested too deeply", code="malformed") from None


async def _body(request: Request) -> bytes:
    """The request's body. Raises: CallRefused for one that is too long or too slow, ClientDisconnect."""
    chunks, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MOST_BODY_BYTES:
                    raise CallRefused(
                        f"the body has more than {MOST_BODY_BYTES} bytes", status=413, code="body_too_large"
                    )
                chunks.append(chunk)
    except TimeoutError:
        raise CallRefused(f"the body did not arrive within {BODY_S:g} s", status=408, code="body_too_slow") from None
    return b"".join(chunks)


def _has_key(request: Request, key: str) -> bool:
    """True for the key as OpenAI's clients send it, or Anthropic's."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
    return secrets.compare_digest(given.encode(), key.encode())


def _node(node: Node) -> dict[str, Any]:
    completion = node.completion
    return {
        "id": node.id,
        "parent": None if node.parent is None else node.parent.id,
        "agent": node.agent,
        "trainable": node.trainable,
        "delivered": node.delivered,
        "finish_reason": completion.finish_reason,
        "context_ids": list(node.context),
        "token_ids": list(completion.token_ids),
        "logprobs": [float(value) for value in completion.logprobs],
        "spans": [{"version": span.version, "start": span.start, "end": span.end} for span in completion.spans],
        "content": node.answer["content"],
        "tool_calls": node.answer.get("tool_calls") or [],
    }


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # enc_hook: the info of a task may be of any types.
    return Response(msgspec.json.encode(data, enc_hook=str), status, headers, media_type="application/json")
