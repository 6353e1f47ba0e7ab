"""docs/serving.md says of every field, page and option what becomes of it, and of no other."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from stagevox.cli import serve
from stagevox.server.app import create_app
from stagevox.server.protocol.chat import ChatRequest
from stagevox.server.protocol.speech import SpeechRequest
from support.scripted_client import ScriptedClient, make_blueprint

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text()


def first_cells(title):
    """What stands in backticks in the first column of the tables of a section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("title, model", [("Chat", ChatRequest), ("Speech", SpeechRequest)])
def test_fields(title, model):
    assert sorted(first_cells(title)) == sorted(model.model_fields)


def test_pages():
    paths = create_app(ScriptedClient(), make_blueprint()).openapi()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    named = {tuple(page.split(" ")) for page in first_cells("Pages")}
    assert named == described | {("GET", "/openapi.json")}


def test_options():
    commands = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(commands)
    options = {
        option
        for action in commands.choices["serve"]._actions
        for option in (action.option_strings or [action.metavar])
        if option not in ("-h", "--help")
    }
    assert {name.split(" ")[0] for name in first_cells("Options")} == options
