"""How much KV cache a stage takes unless its operator says otherwise: so many positions, not a share of the machine.

A share would have to be free when the engine starts, and several stages live on one device, or on a laptop beside other programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MORE = 4096
"""Positions beyond one request of full length."""

_HALF = ("bfloat16", "float16")


def kv_pool(config: Any, length: int, dtype: str = "float32", more: int = MORE) -> dict[str, Any]:
    """Engine arguments for a decoder's context of ``length`` positions, and a pool that holds one such request and ``more``.

    ``config`` is the decoder's, an object or a mapping of its fields. A ``dtype`` that is not known yet counts as four bytes.
    """

    def field(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    head = field("head_dim") or field("hidden_size") // field("num_attention_heads")
    size = 2 if dtype.removeprefix("torch.") in _HALF else 4
    bytes_per_position = 2 * size * field("num_hidden_layers") * field("num_key_value_heads") * head
    return {
        "max_model_len": length,
        "kv_cache_memory_bytes": (length + more) * bytes_per_position,
        # The pool is sized in bytes; this only has to be free when the engine starts, and no laptop has 92 % of its memory free.
        "gpu_memory_utilization": 0.05,
    }
