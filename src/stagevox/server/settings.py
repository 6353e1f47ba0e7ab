"""What an operator sets of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from .record import Observer

if TYPE_CHECKING:
    from .state import ServerState

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and permissions. Sizes are in bytes, times in seconds."""

    served_model_names: tuple[str, ...] = ()
    """What requests may give as ``model``; empty for the model's own name."""
    api_keys: tuple[str, ...] = ()
    """Keys that open ``/v1``; empty for no lock."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may read answers; ``*`` for all."""
    max_running: int = 32
    """Choices that the pipeline works on at a time; its engines queue what they have no slot for."""
    max_queue: int = 128
    """Requests that wait for one of these; beyond it is 429."""
    max_choices: int = 16
    max_body_bytes: int = 32 * MIB
    body_seconds: float = 60.0
    """Longest wait for a whole request body."""
    send_seconds: float = 60.0
    """Longest wait for a client that stops reading; then its request is aborted."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts, or ``host:port``, that media may be fetched from; empty: none."""
    allowed_local_media_path: Path | None = None
    """Folder whose files ``file:`` URLs may name; None: none."""
    max_media_items: int = 16
    max_media_bytes: int = 25 * MIB
    max_decoded_bytes: int = 256 * MIB
    """Memory for the decoded media of one request, all together: 4 bytes a pixel, 4 a sample."""
    media_seconds: float = 10.0
    """Longest fetch of one item, redirects included."""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    """What ``/metrics`` shows."""
    observers: Sequence[Observer] = ()
    routers: Sequence[Callable[[ServerState], APIRouter]] = ()
    """More pages; not behind the API key unless under ``/v1``."""
    playground: bool = True
    """A page at ``/`` to try the voice with."""
