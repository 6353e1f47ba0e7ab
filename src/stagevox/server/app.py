"""The application: routes, and what every request passes on its way to them."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from stagevox.config.blueprint import Blueprint
from stagevox.pipeline.client import OmniClient

from . import chat, health, models, playground, speech, timing_pages, voices
from .auth import ApiKeyLock
from .errors import LastResort, install
from .limits import BodyLimit
from .settings import ServerSettings
from .state import ServerState

EXPOSED = ["X-Request-Id", "X-Sample-Rate", "X-Finish-Reason", "Retry-After"]


def create_app(client: OmniClient, blueprint: Blueprint, settings: ServerSettings | None = None) -> FastAPI:
    """The server over ``client``, which the caller starts and closes; ``app.state.server`` is its :class:`ServerState`."""
    settings = settings or ServerSettings()
    state = ServerState(client, blueprint, settings)
    # Pages with documentation load scripts from elsewhere: only the description itself is served.
    app = FastAPI(
        title="stagevox",
        version=health.package_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    install(app)
    pages = (*settings.routers, *((playground.router,) if settings.playground else ()))
    routers = (chat.router, speech.router, voices.router, models.router, health.router, timing_pages.router, *pages)
    for make in routers:
        app.include_router(make(state))
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
    if settings.api_keys:
        app.add_middleware(ApiKeyLock, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    app.add_middleware(LastResort)
    return app
