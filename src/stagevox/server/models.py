"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from fastapi import APIRouter

from .errors import RESPONSES
from .protocol.lists import Model, ModelList
from .state import ServerState


def router(state: ServerState) -> APIRouter:
    """The names under which the model is served."""
    routes = APIRouter(tags=["models"])

    def entry(name: str) -> Model:
        root = state.blueprint.topology.name
        return Model(id=name, object="model", created=state.started_at, owned_by="stagevox", root=root)

    @routes.get("/v1/models", response_model=ModelList)
    async def list_models() -> ModelList:
        """All names."""
        return ModelList(object="list", data=[entry(name) for name in state.names])

    @routes.get("/v1/models/{name:path}", response_model=Model, responses={404: RESPONSES[404]})
    async def get_model(name: str) -> Model:
        """One name."""
        state.check_model(name)
        return entry(name)

    return routes
