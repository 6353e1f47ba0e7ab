"""OpenAI's shape of an error."""

from __future__ import annotations

from .base import ResponseModel


class ErrorBody(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request that is to blame, such as ``messages[0].content``."""
    code: str | None


class ErrorResponse(ResponseModel):
    """Every response whose status is 400 or above."""

    error: ErrorBody
