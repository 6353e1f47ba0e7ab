"""Objects by name, so that a stage can be built in another process."""

from __future__ import annotations

import importlib
from typing import Any


def load_attribute(path: str) -> Any:
    """The object that ``module:attribute`` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
