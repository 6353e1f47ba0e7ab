"""The API key: everything under ``/v1`` needs it, if there is one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError


class ApiKeyLock:
    """Lets requests with one of ``keys`` through; ``OPTIONS`` needs none, for browsers ask without."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or go on."""
        if scope["type"] == "http" and self._is_locked(scope) and not self._opens(Headers(scope=scope).get("authorization", "")):
            error = ApiError(401, "no API key, or a wrong one", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    @staticmethod
    def _is_locked(scope: Scope) -> bool:
        return scope["method"] != "OPTIONS" and (scope["path"] == "/v1" or scope["path"].startswith("/v1/"))

    def _opens(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        # All keys, and digests of one length: the time tells neither which key was near nor how long it is.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
