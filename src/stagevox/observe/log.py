"""Logs for people and for machines: one line an event, with the id of the request it belongs to.

Texts and voices of clients are not logged; messages of errors may quote a word of them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from .figures import RequestFigures

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that the running task works for."""

FORMATS = ("human", "json")
LOGGERS = ("stagevox", "uvicorn")

logger = logging.getLogger("stagevox.request")


class _Named(logging.Filter):
    """Gives each record the request's id, in the task that made it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = request_id.get()
        return True


class HumanFormatter(logging.Formatter):
    """``2026-01-31 10:20:30.123 INFO stagevox.request: message [id]``; a message is one line, a traceback follows it."""

    def format(self, record: logging.LogRecord) -> str:
        """As above."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        message = _one_line(record.getMessage())
        named = getattr(record, "request_id", None)
        line = f"{moment}.{int(record.msecs):03d} {record.levelname} {record.name}: {message}" + (f" [{named}]" if named else "")
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, ``request_id``, ``exception``, and figures."""

    def format(self, record: logging.LogRecord) -> str:
        """As above."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        named = getattr(record, "request_id", None)
        if named:
            line["request_id"] = named
        figures = getattr(record, "figures", None)
        if isinstance(figures, Mapping):
            line.update({key: value for key, value in figures.items() if key not in line})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(form: str, level: str) -> logging.Handler:
    """Write our lines and the HTTP server's to stderr; what else there is keeps its own settings. Returns the handler."""
    handler = logging.StreamHandler()
    handler.addFilter(_Named())
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    for name in LOGGERS:
        ours = logging.getLogger(name)
        ours.addHandler(handler)
        ours.setLevel(level.upper())
        ours.propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return handler


class RequestLog:
    """A line when a request has ended; a sink of figures."""

    def opened(self, figures: RequestFigures) -> None:
        """A line for those who look closely."""
        logger.debug("%s request", figures.record.endpoint, extra={"request_id": figures.record.req_id})

    def audio_gap(self, figures: RequestFigures, seconds: float) -> None:
        """Nothing."""

    def closed(self, figures: RequestFigures) -> None:
        """The line: a warning for an error."""
        values = figures.as_dict()
        level = logging.WARNING if figures.reason == "error" else logging.INFO
        logger.log(level, "%s", _sentence(values), extra={"request_id": figures.record.req_id, "figures": values})


def _sentence(values: Mapping[str, Any]) -> str:
    """The figures in words."""
    parts = [f"{values['endpoint']} {values['finish_reason']}"]
    if "error" in values:
        parts[0] += f" {values['error']}"
    parts.append(f"{values['seconds']:.3f} s" if "seconds" in values else "")
    parts.append(f"queued {values['queue_seconds']:.3f} s" if values.get("queue_seconds", 0) >= 0.0005 else "")
    parts.append(f"{values['prompt_tokens']} + {values['text_tokens']} tokens")
    if values["audio_seconds"]:
        parts.append(f"{values['audio_seconds']:.2f} s of audio")
    if "first_audio_seconds" in values:
        parts.append(f"the first after {values['first_audio_seconds']:.3f} s")
    parts.append(f"RTF {values['rtf']:.3f}" if "rtf" in values else "")
    return ", ".join(part for part in parts if part)


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
