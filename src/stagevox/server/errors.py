"""Every failure as a status and OpenAI's JSON shape."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagevox.errors import BadRequestError, ClosedError, DeadlineError, RequestFailedError, StageDiedError

from .protocol.base import RequestModel
from .protocol.chat import ChatRequest
from .protocol.errors import ErrorBody, ErrorResponse
from .protocol.speech import SpeechRequest

logger = logging.getLogger("stagevox.server")

MAX_MESSAGE = 1000
RETRY_SECONDS = "5"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
UNKNOWN_STATUS = "request failed"


class ApiError(Exception):
    """Answered with ``status`` and OpenAI's JSON shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """What the client reads."""
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + " ..."
        param = self.param[:200] if self.param else None
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        # Not pydantic's JSON: what is quoted may hold halves of characters, which only ASCII can carry.
        error = ErrorBody.model_construct(message=message, type=kind, param=param, code=self.code)
        return {"error": dict(error)}

    def json(self) -> bytes:
        """The body's bytes."""
        return json.dumps(self.body(), separators=(",", ":")).encode()

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.json(), self.status, self.headers, "application/json")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class UnfinishedResponse(Exception):
    """A response that can't be completed: the connection is closed so that nobody takes it for whole."""


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """A field of the request that can't be honoured."""
    return ApiError(400, f"{param}: {message}", param, code)


def as_api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """What a client is told of ``error``; ``names`` gives its names for the pipeline's fields."""
    match error:
        case ApiError():
            return error
        case BadRequestError():
            param = _renamed(error.field, names or {})
            message = str(error)
            if message.startswith(f"{error.field}: "):
                message = f"{param}: {message.removeprefix(f'{error.field}: ')}"
            return ApiError(400, message, param, _snake(type(error).__name__))
        case StageDiedError() | ClosedError():
            return ApiError(503, str(error), code=_snake(type(error).__name__), headers={"Retry-After": RETRY_SECONDS})
        case DeadlineError():
            return ApiError(504, str(error), code="deadline")
        case RequestFailedError():
            return ApiError(500, str(error), code=_snake(type(error).__name__))
    logger.error("unexpected %s", type(error).__name__, exc_info=error)
    return ApiError(500, "an internal error; the server's log has it", code="internal_error")


def _renamed(field: str, names: Mapping[str, str]) -> str:
    if field in names:
        return names[field]
    stage, dot, rest = field.partition(".")
    return f"{names[stage]}.{rest}" if dot and stage in names else field


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Error")).lower()


def install(app: FastAPI) -> None:
    """Answer all errors of routes in one shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = {
        404: f"no such page: {request.url.path}",
        405: f"{request.method} is not possible here",
    }.get(status, str(error.detail))
    if message == _phrase(status):
        message = message.lower()
    return ApiError(status, message, code=_code(status), headers=error.headers).response()


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'invalid')}", code="bad_json").response()
    loc = list(first["loc"])
    field = first.get("ctx", {}).get("field")
    param = _param([*loc, field] if isinstance(field, str) else loc)
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "extra_forbidden":
            message = f"no such field{_nearest(request, loc)}"
        case "missing":
            message = "is missing"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = "not a JSON object"
            if param is None and "json" not in (kind := request.headers.get("content-type", "")):
                message = (
                    f"sent as {kind[:100]!r}, not with Content-Type: application/json"
                    if kind
                    else "sent without Content-Type: application/json"
                )
        case "too_long" if "actual_length" in first.get("ctx", {}):
            message = f"more than the {first['ctx']['max_length']} items that are allowed"
    return ApiError(400, f"{param}: {message}" if param else f"the body: {message}", param, first["type"]).response()


def _param(loc: Sequence[Any]) -> str | None:
    """``messages[0].content[1].text`` of pydantic's path, which also names the types that it tried."""
    path = ""
    before: Any = None
    for item in loc[1:] if loc[:1] == ["body"] else loc:
        tried = isinstance(item, str) and (item == "str" or "[" in item or item[:1].isupper())
        tag = isinstance(before, int) and path.endswith("]") and item in _PARTS
        if not tried and not tag:
            path += f"[{item}]" if isinstance(item, int) else f".{item}" if path else str(item)
        before = None if tag else item
    return path or None


_PARTS = {"text", "refusal", "input_audio", "image_url", "audio_url", "video_url"}
_BODIES: dict[str, type[RequestModel]] = {"/v1/chat/completions": ChatRequest, "/v1/audio/speech": SpeechRequest}
_SAMPLING = {"temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "repetition_penalty"}
"""Fields of chat that speech doesn't have, and of neither of them."""


def _nearest(request: Request, loc: list[Any]) -> str:
    if loc[-1] in _SAMPLING:
        return "; sampling parameters go into stage_params"
    model = _BODIES.get(request.url.path)
    if model is None or len(loc) != 2:
        return ""
    close = difflib.get_close_matches(str(loc[-1])[:100], model.model_fields, n=1)
    return f"; the nearest is {close[0]}" if close else ""


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return UNKNOWN_STATUS


def _code(status: int) -> str:
    return _phrase(status).lower().replace(" ", "_").replace("-", "_")


class LastResort:
    """Outermost: an exception that nobody foresaw is a logged 500 in the same shape, and never takes the server down."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; after headers are out, an error leaves the response unfinished."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, note)
        except (ClientGone, UnfinishedResponse):
            pass  # nobody listens, or nobody is to take what came for whole
        except asyncio.CancelledError:  # by the server, whose patience at its end is over
            if not started:
                await ApiError(503, "the server is shutting down", code="draining").response()(scope, receive, send)
            raise
        except Exception as error:
            answer = as_api_error(error)
            if not started:
                await answer.response()(scope, receive, send)


RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request can't be served; `param` names the field."},
    401: {"model": ErrorResponse, "description": "No key, or a wrong one."},
    404: {"model": ErrorResponse, "description": "No such model."},
    413: {"model": ErrorResponse, "description": "The body is too large."},
    429: {"model": ErrorResponse, "description": "The queue is full; `Retry-After` says when to come again."},
    500: {"model": ErrorResponse, "description": "The request failed."},
    503: {"model": ErrorResponse, "description": "Starting, draining, or a stage is down."},
    504: {"model": ErrorResponse, "description": "A stage waited for its input for too long."},
}
