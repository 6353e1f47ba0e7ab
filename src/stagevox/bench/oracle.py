"""The packaged voice's plain-torch reference, as far as this is a checkout of the repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from stagevox.errors import ConfigError

FILE = Path(__file__).resolve().parents[3] / "tests" / "oracles" / "mini_reference.py"


def load_reference() -> Any:
    """The reference with its weights: ``generate(text)`` gives codes, ``code2wav(codes)`` samples."""
    if not FILE.is_file():
        raise ConfigError("reference", f"{FILE} is part of the repository, not of the installed package")
    spec = importlib.util.spec_from_file_location("mini_reference", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TinyOmni()
