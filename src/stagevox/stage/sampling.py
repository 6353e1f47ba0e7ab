"""Sampling parameters are layered, not replaced: the model's constraints over what the client sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import SamplingParams


def sampling_params(fields: Mapping[str, Any], constraints: Mapping[str, Any], room: int) -> SamplingParams:
    """The client's parameters with the model's constraints laid over them.

    Lists such as ``stop_token_ids`` are joined; ``max_tokens`` is the least of the client's, the model's and the ``room`` that
    the context leaves; ``min_tokens`` is the most of the client's and the model's, and never more than that.
    """
    merged = dict(fields)
    for key, value in constraints.items():
        old = merged.get(key)
        merged[key] = [*old, *(item for item in value if item not in old)] if isinstance(value, list) and old else value
    caps = [fields.get("max_tokens"), constraints.get("max_tokens"), room]
    merged["max_tokens"] = min(cap for cap in caps if cap is not None)
    least = max(fields.get("min_tokens") or 0, constraints.get("min_tokens") or 0)
    merged["min_tokens"] = min(least, merged["max_tokens"])
    merged.setdefault("detokenize", False)
    return SamplingParams(**merged)
