"""``stagevox bench serve`` as its users run it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from stagevox.cli.main import main


@pytest.fixture
def bench(tmp_path, capsys, monkeypatch):
    """Run it against a URL: ``bench(url, "--endpoint", "chat")`` gives exit code, saved result, output and errors."""
    monkeypatch.delenv("STAGEVOX_API_KEY", raising=False)

    def run(url, *args):
        saved = tmp_path / "result.json"
        saved.unlink(missing_ok=True)
        code = main(["bench", "serve", "--base-url", url, "--no-progress", "--save-result", str(saved), *map(str, args)])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, result=json.loads(saved.read_text()) if saved.exists() else None, out=out, err=err)

    return run
