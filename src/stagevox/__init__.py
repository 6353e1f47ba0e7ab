"""stagevox: a serving runtime for models that think in text, then speak."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .omni import Omni, OmniResult

__all__ = ["Omni", "OmniResult"]

_HOMES = {"Omni": ".omni", "OmniResult": ".omni"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import stagevox`` alone stays light."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
