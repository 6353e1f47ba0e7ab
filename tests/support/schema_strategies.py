"""Hypothesis strategies from an OpenAPI description: values that fit it, and values with something else in some place."""

from __future__ import annotations

from hypothesis import strategies as st

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def mostly(usual, other):
    """Three times in four the one, else the other; ``one_of`` counts equal strategies once."""
    return st.sampled_from((True, True, True, False)).flatmap(lambda plain: usual if plain else other)


PLAIN = st.sampled_from(["hello", "hello there", "naïve 日本", "a" * 300])
ODD = st.sampled_from(["", " ", "\N{GRINNING FACE}", "\ud800", "a" * 5000]) | st.text(max_size=20)
KNOWN = {
    "model": ["scripted", "scripted", "scripted", "gpt"],
    "role": ["user", "user", "user", "system", "assistant", "tool"],
    "voice": ["slt", "kal", "alloy", "", "SLT"],
    "format": ["wav", "mp3", "pcm16", "ogg"],
    "response_format": ["wav", "pcm", "opus", "flac", " WAV "],
    "url": ["data:audio/wav;base64,UklGRg==", "http://example.invalid/a.wav", "file:///etc/passwd", "x"],
    "data": ["UklGRg==", "", "%%%"],
    "modalities": [["text"], ["text", "audio"], ["audio"], []],
    "stage_params": [{}, {"talker": {"temperature": 0.5}}, {"thinker": {"max_tokens": 3}}, {"talker": {"heat": 1}}, {"x": {}}],
    "stop": ["lo", ["th", "e"], "", []],
    "n": [1, 2, 3, 100],
    "seed": [0, 5, -1, 2**63],
    "max_tokens": [1, 5, 0],
    "speed": [1.0, 0.5, 4, 0, 9],
    "temperature": [0, 0.7, 2, 3],
    "sample_rate": [8000, 24000, 1],
}
"""Values worth trying in fields of these names, right and wrong."""


def from_schema(schema, defs, name=""):
    """A strategy for ``schema``; ``defs`` are the description's."""
    if "$ref" in schema:
        return st.deferred(lambda: from_schema(defs[schema["$ref"].rsplit("/", 1)[-1]], defs, name))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("discriminator", {}).get("propertyName") == "type":  # parts of a message: mostly the plain one
        kinds = [from_schema(one, defs, name) for one in schema["oneOf"]]
        return mostly(kinds[0], st.one_of(kinds))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [from_schema(one, defs, name) for one in schema[key] if one != {"type": "null"}]
            fits = st.one_of(kinds)
            return fits if len(kinds) == len(schema[key]) else mostly(fits, st.none())
    match schema.get("type"):
        case "object":
            return _object(schema, defs)
        case "array":
            items = from_schema(schema.get("items", {}), defs)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 3))
        case "string":
            return mostly(PLAIN, ODD)
        case "integer":
            return st.integers(-2, 40) | st.integers()
        case "number":
            return st.floats(-1, 5) | st.floats()
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return ANYTHING


def _object(schema, defs):
    properties = schema.get("properties")
    if properties is None:
        return st.dictionaries(st.text(max_size=6), ANYTHING, max_size=2)
    required = set(schema.get("required", ())) | (properties.keys() & {"content"})  # without it a message says nothing
    fields = {name: _field(name, each, defs) for name, each in properties.items()}
    needed = st.fixed_dictionaries({name: fields[name] for name in required})
    # A few of the others: with all of them there would always be one that is refused.
    rest = sorted(fields.keys() - required)
    some = st.lists(st.sampled_from(rest), unique=True, max_size=3) if rest else st.just([])
    return st.builds(
        lambda base, more: {**base, **more},
        needed,
        some.flatmap(lambda names: st.fixed_dictionaries({n: fields[n] for n in names})),
    )


def _field(name, schema, defs):
    fits = from_schema(schema, defs, name)
    return mostly(st.sampled_from(KNOWN[name]), fits) if name in KNOWN else fits


@st.composite
def spoilt(draw, values):
    """One of ``values`` with anything in one of its places, at any depth."""
    value = draw(values)
    return _spoil(draw, value)


def _spoil(draw, value):
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: _spoil(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], _spoil(draw, value[index]), *value[index + 1 :]]
    if isinstance(value, dict) and draw(st.booleans()):
        return {**value, draw(st.text(max_size=6)): draw(ANYTHING)}
    return draw(ANYTHING)
