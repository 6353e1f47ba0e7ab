"""Requests drawn from the server's own description, right and spoilt: no 500, no hang, errors in one shape, nothing left."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagevox.server.app import create_app
from support.schema_strategies import ANYTHING, from_schema, mostly, spoilt
from support.scripted_client import MediaFrontEnd, ScriptedClient, make_blueprint

EXAMPLES = int(os.environ.get("STAGEVOX_FUZZ_EXAMPLES", "200"))
"""In all; ``make soak`` may want more."""
SECONDS = 10.0


def operations():
    """``(method, path, strategy of bodies)`` of the description."""
    document = create_app(ScriptedClient(), make_blueprint()).openapi()
    defs = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody")
            schema = body["content"]["application/json"]["schema"] if body else None
            yield method.upper(), path, from_schema(schema, defs) if schema else None


OPERATIONS = list(operations())
BODIES = {path: strategy for _, path, strategy in OPERATIONS if strategy is not None}
PATHS = [path for _, path, _ in OPERATIONS] + ["/", "/v1", "/v1/none", "/v1/models/x%2Fy", "/v1/models/%00", "/openapi.json"]
SETTINGS = settings(
    max_examples=EXAMPLES // 4,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def counts():
    """How often each status came: at the end all kinds must have come."""
    seen = Counter()
    yield seen
    assert seen[200] > 20 and seen[400] > 20, seen


def check(runner, server, counts, method, path, content, headers=None):
    async def one():
        async with asyncio.timeout(SECONDS):
            async with server.http() as http:
                return await http.request(method, path, content=content, headers=headers or {"content-type": "application/json"})

    answer = runner.run(one())
    counts[answer.status_code] += 1
    assert answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code >= 400:
        assert answer.json().keys() == {"error"}
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n") or '"speech.audio.done"' in answer.text
    assert not server.client.live and server.state.gate.running == 0


@pytest.mark.covers("SV-1")
@pytest.mark.parametrize("kind", ["text", "media"])
@pytest.mark.parametrize("path", sorted(BODIES))
def test_bodies(serve, runner, counts, path, kind):
    server = serve(blueprint=make_blueprint(MediaFrontEnd() if kind == "media" else None))

    @SETTINGS
    @given(mostly(BODIES[path], spoilt(BODIES[path])))
    def each(body):
        check(runner, server, counts, "POST", path, json.dumps(body))

    each()


def test_anything_anywhere(serve, runner, counts):
    server = serve()

    @SETTINGS
    @given(
        st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS"]),
        st.sampled_from(PATHS),
        st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()),
        st.sampled_from(["application/json", "text/plain", "application/json; charset=latin-1", ""]),
    )
    def each(method, path, content, kind):
        check(runner, server, counts, method, path, content, {"content-type": kind})

    each()
