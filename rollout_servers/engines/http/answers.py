"""What the answers of all engines' servers have in common."""

from collections.abc import Sequence

import msgspec

from slipstream.buffer.wire.messages import VersionSpan
from slipstream.rollout_servers.engines.base import EngineError, RequestRefused

PIECE_TOKENS = 8
"""An answer comes in pieces of so many tokens: what is lost of it at most when the server dies."""


class FailedAnswer(EngineError):
    """The server answered that it failed; whether it lives on, its health tells."""


class Span(msgspec.Struct):
    """Which of an answer's tokens came from which version."""

    version: str
    start: int
    end: int


class StreamError(msgspec.Struct):
    """Why a server breaks an answer off."""

    message: str
    code: int


def failure(code: int, message: str) -> EngineError:
    """The error that an HTTP status stands for: the request's fault, or the server's."""
    return RequestRefused(message) if 400 <= code < 500 else FailedAnswer(message)


def version_spans(spans: Sequence[Span]) -> list[VersionSpan]:
    """In our terms; those without tokens are left out."""
    return [
        VersionSpan(version=int(span.version), start=span.start, end=span.end)
        for span in spans
        if span.end > span.start
    ]


def whole(version: int, tokens: int) -> list[VersionSpan]:
    """The spans of tokens that all came from one version."""
    return [VersionSpan(version=version, start=0, end=tokens)] if tokens else []
