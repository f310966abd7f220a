"""The one table from errors to HTTP answers, and their OpenAI shape. Knows no route.

An answer never holds a traceback, a path, or the text of an error that was not raised for the client to read.
"""

import http
import logging
import math
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from twinjet.core.errors import (
    CapacityError,
    ContextTooLong,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestError,
    TwinjetError,
)

logger = logging.getLogger("twinjet.server")


class BodyTooLarge(RequestError):
    """The request body is over the server's limit."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one class of error is answered."""

    status: int
    type: str
    code: str | None = None


_UNAVAILABLE = ErrorKind(503, "server_error", "unavailable")
_INTERNAL = ErrorKind(500, "server_error", "internal_error")

# The first match counts, so a class stands before those it derives from.
_KINDS: tuple[tuple[type[TwinjetError], ErrorKind], ...] = (
    (BodyTooLarge, ErrorKind(413, "invalid_request_error", "body_too_large")),
    (ContextTooLong, ErrorKind(400, "invalid_request_error", "context_length_exceeded")),
    (ModelNotFound, ErrorKind(404, "invalid_request_error", "model_not_found")),
    (InvalidRequest, ErrorKind(400, "invalid_request_error", "invalid_value")),
    (RequestError, ErrorKind(400, "invalid_request_error")),
    (DeadlineExceeded, ErrorKind(504, "server_error", "deadline_exceeded")),
    (Overloaded, ErrorKind(429, "rate_limit_error", "overloaded")),
    (CapacityError, _UNAVAILABLE),
    (EngineDead, ErrorKind(503, "server_error", "engine_dead")),
    (EngineError, ErrorKind(500, "server_error", "engine_error")),
)

_ENGINE_TEXT = "the engine failed this request; the server's log says why, and sending it again may succeed"
_INTERNAL_TEXT = "the server failed on this request; its log says why"


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of an OpenAI error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """An OpenAI error body."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error, ready to be sent whole or inside a stream."""

    status: int
    detail: ErrorDetail
    retry_after_s: float | None = None

    def response(self, headers: dict[str, str] | None = None) -> Response:
        """The whole HTTP answer."""
        headers = dict(headers or {})
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        body = msgspec.json.encode(ErrorBody(self.detail))
        return Response(body, self.status, headers, media_type="application/json")


def answer_error(error: Exception, *, serving: bool = True) -> ErrorAnswer:
    """What the client is told about `error`; anything that is not its own doing is logged here.

    `serving` is False while the server is starting or draining: refusals for lack of room then are
    503 (go elsewhere) rather than 429 (slow down).
    """
    kind = next((kind for kind_of, kind in _KINDS if isinstance(error, kind_of)), _INTERNAL)
    if isinstance(error, CapacityError):
        if not serving and not isinstance(error, DeadlineExceeded):
            kind = _UNAVAILABLE
        retry_after_s = error.retry_after_s
        text = str(error)
    elif isinstance(error, RequestError):
        retry_after_s = None
        text = str(error)
    elif isinstance(error, EngineDead):
        logger.error("no engine for a request: %s", error)
        retry_after_s = 5.0
        text = "no engine is running; the server's log says why"
    elif isinstance(error, EngineError):
        logger.error("the engine failed a request: %s", error)
        retry_after_s = None
        text = _ENGINE_TEXT
    else:
        logger.error("unexpected error on a request", exc_info=error)
        retry_after_s = None
        text = _INTERNAL_TEXT
    detail = ErrorDetail(text, kind.type, getattr(error, "param", None), kind.code)
    return ErrorAnswer(kind.status, detail, retry_after_s)


def answer_status(status: int, method: str, path: str, allow: str | None = None) -> ErrorAnswer:
    """For what the router itself refuses: no such path, or not with this method."""
    # A path is the client's own text, but no reason to send a megabyte of it back.
    shown = f"{method} {path[:200]}"
    if status == http.HTTPStatus.NOT_FOUND:
        return ErrorAnswer(status, ErrorDetail(f"there is no {shown}", "invalid_request_error", None, "not_found"))
    if status == http.HTTPStatus.METHOD_NOT_ALLOWED:
        text = f"{shown} is not possible" + (f"; use {allow}" if allow else "")
        return ErrorAnswer(status, ErrorDetail(text, "invalid_request_error", None, "method_not_allowed"))
    phrase = http.HTTPStatus(status).phrase
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ErrorAnswer(status, ErrorDetail(phrase, kind, None, None))
