"""How the server is: ``/health``, ``/ready``, ``/metrics``, ``/version``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from stagevox.pipeline.client import StageHealth

from .errors import RETRY_SECONDS
from .protocol.lists import Health, Version
from .state import ServerState

Status = Literal["ok", "starting", "draining", "degraded"]


def router(state: ServerState) -> APIRouter:
    """None of these is behind the API key: probes and scrapers have none."""
    routes = APIRouter(tags=["health"])
    down: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not now."}}

    def stages_status() -> Status:
        kinds = set(state.client.health().values())
        if kinds == {StageHealth.READY}:
            return "ok"
        return "starting" if kinds <= {StageHealth.STARTING, StageHealth.READY} else "degraded"

    def answer(status: Status, *, good: bool) -> Response:
        stages = {name: health.value for name, health in state.client.health().items()}
        body = Health(
            status=status, stages=stages, requests_running=state.client.num_requests, requests_waiting=state.gate.waiting
        )
        headers = {} if good else {"Retry-After": RETRY_SECONDS}
        return Response(body.json_bytes(), 200 if good else 503, headers, "application/json")

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", response_model=Health, responses=down)
    async def health() -> Response:
        """200 while all stages are ready, also while requests in flight are being finished before the end."""
        status = stages_status()
        return answer("draining" if status == "ok" and state.draining else status, good=status == "ok")

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", response_model=Health, responses=down)
    async def ready() -> Response:
        """200 while new requests are taken."""
        status = "draining" if state.draining else stages_status()
        return answer(status, good=status == "ok")

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(state.settings.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @routes.get("/version", response_model=Version)
    async def get_version() -> Version:
        """The version of stagevox."""
        return Version(version=package_version())

    return routes


def package_version() -> str:
    """The installed version; ``unknown`` for a source tree."""
    try:
        return version("stagevox")
    except PackageNotFoundError:
        return "unknown"
