"""A page at ``/`` to try a model with: a few files that are served as they are, and what the page needs to know first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from ..protocol.lists import Playground
from ..state import ServerState

TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript; charset=utf-8",
    "api.js": "text/javascript; charset=utf-8",
    "player.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "wave.js": "text/javascript; charset=utf-8",
}
HEADERS = {
    # Nothing but this server's own files, and nobody else's frame: the page may hold an API key.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    """A file with what tells a browser that it has it already."""

    data: bytes
    mime: str
    etag: str

    @classmethod
    def read(cls, name: str) -> _File:
        data = files(__package__).joinpath(name).read_bytes()
        return cls(data, TYPES[name], f'"{hashlib.sha256(data).hexdigest()[:16]}"')

    def answer(self, request: Request) -> Response:
        headers = HEADERS | {"ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(None, 304, headers)
        return Response(self.data, 200, headers, self.mime)


def router(state: ServerState) -> APIRouter:
    """``/`` and ``/playground/...``. Not behind the API key, which the page asks for; what it shows then comes from ``/v1``."""
    routes = APIRouter(include_in_schema=False)
    held = {name: _File.read(name) for name in TYPES}
    front_end = state.blueprint.front_end

    @routes.head("/")
    @routes.get("/")
    async def page(request: Request) -> Response:
        return held["index.html"].answer(request)

    @routes.get("/playground/about")
    async def about() -> Response:
        body = Playground(
            needs_key=bool(state.settings.api_keys),
            sample_rate=front_end.sample_rate,
            reads_aloud="text" in front_end.fields,
            examples=list(state.blueprint.topology.examples),
        )
        return Response(body.json_bytes(), headers={"Cache-Control": "no-store"}, media_type="application/json")

    @routes.head("/playground/{name}")
    @routes.get("/playground/{name}")
    async def file(name: str, request: Request) -> Response:
        if name not in held or name == "index.html":
            return Response(None, 404)
        return held[name].answer(request)

    return routes
