"""What the routes of one server share."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stagevox.config.blueprint import Blueprint
from stagevox.observe.figures import RequestWatch
from stagevox.observe.metrics import Metrics
from stagevox.pipeline.client import OmniClient, StageHealth
from stagevox.pipeline.request import OmniRequest

from .errors import RETRY_SECONDS, ApiError
from .limits import Gate
from .media import MediaLoader
from .record import Observers
from .settings import ServerSettings
from .timings import RequestTimings

LARGE_PROMPT = 1 << 14
"""Characters from which a prompt is read in a thread: the event loop must not stand still for it."""


class Transcripts:
    """What was said under which audio id, so that a client may refer to an earlier answer by its id alone."""

    def __init__(self, seconds: float = 3600.0, most: int = 4096) -> None:
        self._seconds, self._most = seconds, most
        self._held: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def keep(self, audio_id: str, transcript: str) -> int:
        """Remember it; returns until when, in seconds since the epoch."""
        expires_at = time.time() + self._seconds
        self._held[audio_id] = (expires_at, transcript)
        while len(self._held) > self._most:
            self._held.popitem(last=False)
        return int(expires_at)

    def get(self, audio_id: str) -> str | None:
        """The transcript, unless it is unknown or has expired."""
        expires_at, transcript = self._held.get(audio_id, (0.0, None))
        return transcript if time.time() < expires_at else None


class ServerState:
    """One server: its pipeline, its limits, and whether it takes requests. The pipeline is started and closed by who made it."""

    def __init__(self, client: OmniClient, blueprint: Blueprint, settings: ServerSettings) -> None:
        self.client = client
        self.blueprint = blueprint
        self.settings = settings
        self.names = settings.served_model_names or (blueprint.topology.name,)
        self.gate = Gate(settings.max_running, settings.max_queue)
        self.media = MediaLoader(settings)
        self.transcripts = Transcripts()
        self.metrics = Metrics(client, blueprint.stages, settings.registry)
        self.timings = RequestTimings()
        self.observers = Observers((RequestWatch([self.metrics]), self.timings, *settings.observers))
        self.started_at = int(time.time())
        self.draining = False
        self._reading = asyncio.Lock()

    def check_open(self) -> None:
        """Raise 503 while requests can't be taken at all. A dead stage only refuses those whose road it is on: see ``submit``."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": RETRY_SECONDS})
        if StageHealth.STARTING in self.client.health().values():
            raise ApiError(503, "the model is being loaded", code="starting", headers={"Retry-After": RETRY_SECONDS})

    def check_model(self, model: str | None) -> None:
        """Raise 404 unless ``model`` is one of ours, or not given."""
        if model is not None and model not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"model: no model {model[:100]!r} (allowed: {known})", "model", "model_not_found")

    async def admit(
        self, req_id: str, prompt: Mapping[str, Any], sampling: Mapping[str, Any], last_stage: str | None
    ) -> OmniRequest:
        """Make a request of a prompt; a long one is read in a thread."""
        if _size(prompt) < LARGE_PROMPT:
            request = self.blueprint.admit(req_id, prompt, sampling)
        else:
            async with self._reading:
                request = await asyncio.to_thread(self.blueprint.admit, req_id, prompt, sampling)
        return replace(request, last_stage=last_stage)


def _size(value: Any) -> int:
    """Characters in a prompt."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 0
