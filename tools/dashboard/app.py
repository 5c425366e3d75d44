"""The web application: routes that answer with JSON, live events, and the page's files. No route writes."""

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import uvicorn
from anyio.to_thread import run_sync
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.configs.runtime.errors import SlipstreamError
from slipstream.tools.dashboard.columns import MOST_POINTS
from slipstream.tools.dashboard.ledgers import LedgerError, Ledgers
from slipstream.tools.dashboard.runs import Run, Runs, UnknownRun, catalogue, compare
from slipstream.tools.dashboard.samples import MOST_ROWS, PROMPTS, Samples, Selection, UnknownSample
from slipstream.tools.dashboard.stream import Feed
from slipstream.tools.follow import json_bytes

PAGE: Final = Path(__file__).parent / "page"
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
FOREIGN: Final = frozenset({"cross-site", "same-site"})
"""Values of the header `Sec-Fetch-Site` of another site's page, or of another server's on this host."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
HEARTBEAT_S: Final = 15
SHUTDOWN_S: Final = 2


class Json(Response):
    """A JSON answer that is never kept by a cache."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200) -> None:
        super().__init__(json_bytes(content), status_code, {"Cache-Control": "no-store"})


class Guard:
    """Refuses requests that name another host than the loopback or come from another site's page, and sets the headers
    that confine the page.

    A page of another site may make a browser send requests here, also under a name of its own (DNS rebinding). It can't
    read the answers, but some of them take work.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if _without_port(host).lower() not in LOOPBACK:
            refusal = f"this server answers to localhost only, not to {host!r}: forward its port by ssh -L"
            await Json({"error": refusal}, 400)(scope, receive, send_with_headers)
        elif scope["path"].startswith("/api/") and headers.get("sec-fetch-site", "none") in FOREIGN:
            refusal = "a page of another site asked for this; open the dashboard's own page"
            await Json({"error": refusal}, 403)(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


class Parameters:
    """The query of a request."""

    def __init__(self, request: Request) -> None:
        self._values: Mapping[str, str] = request.query_params

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        return self._values.get(name, default)

    def number(self, name: str, default: float) -> float:
        """A number. Raises: HTTPException 400 for another text."""
        text = self._values.get(name, "")
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise HTTPException(400, f"{name}={text!r} is no number")
        return value

    def count(self, name: str, default: int, most: int) -> int:
        """A number from 0 to `most`; what is beyond counts as the bound. Raises: as `number`."""
        return int(min(max(self.number(name, default), 0), most))

    def list(self, name: str) -> list[str]:
        """The texts between commas."""
        return [part for part in self._values.get(name, "").split(",") if part]


class Dashboard:
    """The answers to all routes."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._samples = Samples(runs)
        self._ledgers = Ledgers()
        self._feeds: dict[str, Feed] = {}

    def app(self) -> Starlette:
        """The ASGI application."""
        of_run: dict[str, Callable[[Run, Parameters, Request], Any]] = {
            "": lambda run, *_: run.detail(),
            "/series": self._series,
            "/events": lambda run, query, _: run.events(query.count("after", 0, 1 << 53)),
            "/servers": lambda run, query, _: (
                run.servers_history(query.count("points", MOST_POINTS, 100_000))
                if query.text("history")
                else run.servers()
            ),
            "/samples": self._search,
            "/samples/{sample}": lambda run, _, request: self._samples.one(run, request.path_params["sample"]),
            "/prompts": lambda run, query, _: self._samples.prompts(run, query.count("limit", PROMPTS, MOST_ROWS)),
            "/prompts/{task}": self._prompt,
        }
        routes = [
            Route("/api/runs", self._answering(lambda _: [run.overview() for run in self._runs.all()])),
            Route("/api/compare", self._answering(self._compare)),
            Route("/api/metrics", self._answering(lambda _: catalogue())),
            *(Route(f"/api/runs/{{id}}{path}", self._of_run(answer)) for path, answer in of_run.items()),
            Route("/api/runs/{id}/groups", self._groups),
            Route("/api/runs/{id}/groups/{group}", self._group),
            Route("/api/runs/{id}/account", self._account),
            Route("/api/runs/{id}/stream", self._stream),
            Route("/api/{path:path}", self._unknown),
            Mount("/", StaticFiles(directory=PAGE, html=True, check_dir=False)),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Guard), Middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _http_error, SlipstreamError: _own_error},
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._ledgers.close()

    def _answering(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """An endpoint whose answer is made in a thread: it reads files."""

        async def endpoint(request: Request) -> Response:
            return await run_sync(lambda: Json(answer(request)))

        return endpoint

    def _of_run(self, answer: Callable[[Run, Parameters, Request], Any]) -> Callable[[Request], Any]:
        return self._answering(
            lambda request: answer(self._runs.get(request.path_params["id"]), Parameters(request), request)
        )

    def _compare(self, request: Request) -> dict[str, Any]:
        return {"keys": compare(self._runs.get(run_id) for run_id in Parameters(request).list("runs"))}

    def _series(self, run: Run, query: Parameters, _: Request) -> dict[str, Any]:
        return self._runs.series(
            run,
            kind=query.text("kind", "step"),
            keys=query.list("keys") or ["*"],
            first=query.number("from", -math.inf),
            last=query.number("to", math.inf),
            points=query.count("points", MOST_POINTS, 100_000),
        )

    def _search(self, run: Run, query: Parameters, _: Request) -> dict[str, Any]:
        selection = Selection(
            kind=query.text("kind", "step"),
            query=query.text("query"),
            sort=query.text("sort", "-step"),
            equal={name: query.text(name) for name in ("chosen", "task", "env")},
            first=query.number("from", -math.inf),
            last=query.number("to", math.inf),
            offset=query.count("offset", 0, 1 << 53),
            limit=query.count("limit", 50, MOST_ROWS),
        )
        return self._samples.search(run, selection)

    def _prompt(self, run: Run, query: Parameters, request: Request) -> dict[str, Any]:
        """The samples of one task over steps."""
        selection = Selection(kind=query.text("kind", "step"), equal={"task": request.path_params["task"]})
        return self._samples.search(run, selection)

    async def _run(self, request: Request) -> Run:
        return await run_sync(self._runs.get, request.path_params["id"])

    async def _groups(self, request: Request) -> Response:
        query = Parameters(request)
        answer = await self._ledgers.ask(
            await self._run(request),
            "groups",
            **{name: query.text(name) for name in ("state", "query", "sort")},
            offset=query.count("offset", 0, 1 << 53),
            limit=query.count("limit", 50, MOST_ROWS),
        )
        return Json(answer)

    async def _group(self, request: Request) -> Response:
        group_id = request.path_params["group"]
        return Json(await self._ledgers.ask(await self._run(request), "group", group_id=group_id))

    async def _account(self, request: Request) -> Response:
        return Json(await self._ledgers.account(await self._run(request)))

    async def _stream(self, request: Request) -> Response:
        run = await self._run(request)
        feed = self._feeds.setdefault(run.id, Feed(run))
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return EventSourceResponse(feed.events(after), ping=HEARTBEAT_S, sep="\n")

    async def _unknown(self, request: Request) -> Response:
        raise HTTPException(404, f"there is no {request.url.path}")


def server_of(runs: Runs) -> uvicorn.Server:
    """The web server of the dashboard of these runs; `run(sockets=[listener])` serves."""
    return uvicorn.Server(
        uvicorn.Config(
            Dashboard(runs).app(),
            # uvloop forks its child processes in the way of os.fork, whose handlers may crash in a child of a process
            # with gloo's threads; asyncio's own loop runs no Python between fork and exec.
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    return Json({"error": error.detail}, error.status_code)


async def _own_error(_: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, 404 if isinstance(error, UnknownRun | UnknownSample | LedgerError) else 503)
