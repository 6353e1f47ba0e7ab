"""``/v1/timings`` and ``/v1/timings/{id}``: where the time went, for playground and benchmark."""

from __future__ import annotations

from fastapi import APIRouter

from .errors import RESPONSES, ApiError
from .protocol.timings import RequestTiming, StageTotals, Timings
from .state import ServerState


def router(state: ServerState) -> APIRouter:
    """Both pages; behind the API key, as all under ``/v1``."""
    routes = APIRouter(tags=["timings"])

    @routes.get("/v1/timings", response_model=Timings)
    async def totals() -> Timings:
        """What each stage has done since the server started; of two looks, the difference is what happened between them."""
        stages = [
            StageTotals(name=stats.name, steps=stats.steps, tokens=stats.tokens, seconds=stats.seconds)
            for stats in state.client.stats()
        ]
        return Timings(object="timings", stages=stages)

    @routes.get("/v1/timings/{req_id}", response_model=RequestTiming, responses={404: RESPONSES[404]})
    async def one(req_id: str) -> RequestTiming:
        """One of the latest requests, by the ``X-Request-Id`` of its response; stages in the order of their first output."""
        timing = state.timings.get(req_id)
        if timing is None:
            raise ApiError(404, "no such request, or one too long ago", "req_id", "not_found")
        return timing

    return routes
