"""The playground's files: what is served, that it needs nobody else, and that it can be read. In a browser: the next file."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from stagevox.server import playground
from stagevox.server.playground import TYPES
from support.scripted_client import MediaFrontEnd, make_blueprint

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(playground.__file__).parent
HTML = (FOLDER / "index.html").read_text()
CSS = (FOLDER / "style.css").read_text()


def test_the_page_and_its_files(serve):
    server = serve(api_keys=("key",))  # the page itself asks for the key
    for path, name in [("/", "index.html"), *((f"/playground/{name}", name) for name in TYPES if name != "index.html")]:
        answer = server.call("GET", path)
        assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["content-type"] == TYPES[name]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert server.call("GET", path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
        head = server.call("HEAD", path)
        assert head.status_code == 200 and not head.content


@pytest.mark.parametrize(
    "path", ["/playground/", "/playground/index.html", "/playground/__init__.py", "/playground/..%2fapp.py", "/x"]
)
def test_nothing_else_is_served(serve, path):
    assert serve().call("GET", path).status_code == 404


def test_without_a_playground(serve):
    server = serve(playground=False)
    assert server.call("GET", "/").status_code == server.call("GET", "/playground/main.js").status_code == 404
    assert server.speech("hello").status_code == 200


def test_what_the_page_asks_first(serve):
    about = serve(api_keys=("key",)).call("GET", "/playground/about").json()
    assert about == {"needs_key": True, "sample_rate": 16_000, "reads_aloud": True, "examples": []}
    about = serve(blueprint=make_blueprint(MediaFrontEnd())).call("GET", "/playground/about").json()
    assert not about["needs_key"] and not about["reads_aloud"]


def test_examples_can_be_said():
    from stagevox.config.blueprint import Blueprint

    blueprint = Blueprint.of("mini")
    assert len(blueprint.topology.examples) >= 3
    for number, example in enumerate(blueprint.topology.examples):
        blueprint.admit(str(number), example, None)


@pytest.mark.covers("SV-5")
def test_nothing_comes_from_elsewhere(serve):
    """The policy forbids it, and the files don't try: no other host, nothing inline that the policy would block."""
    policy = serve().call("GET", "/").headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "unsafe" not in policy
    assert {rules[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for name in TYPES:
        text = (FOLDER / name).read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.findall(r"https?://|[\"'(]//|@import|url\(", text), name
    assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", HTML)
    named = set(re.findall(r'(?:src|href)="playground/([^"]+)"', HTML)) | {
        found for name in TYPES if name.endswith(".js") for found in re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text())
    }
    assert named == set(TYPES) - {"index.html"}


def test_the_files_are_in_the_package():
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} - {"__init__.py"} == set(TYPES)
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["stagevox"]
    assert "server/playground/*" in data


def test_the_page_names_its_parts():
    """Every control has a label, every heading follows the one above, ids stand once and are those the script asks for."""
    ids = re.findall(r'\sid="([^"]+)"', HTML)
    assert len(ids) == len(set(ids))
    labelled = set(re.findall(r'<label for="([^"]+)"', HTML))
    controls = re.findall(r"<(?:textarea|select|input)[^>]*\sid=\"([^\"]+)\"", HTML)
    assert controls and set(controls) <= labelled
    assert all(target in ids for target in re.findall(r'(?:aria-\w+by|href="#)="?([\w-]+)"', HTML))
    levels = [int(level) for level in re.findall(r"<h([1-6])", HTML)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    script = (FOLDER / "main.js").read_text() + (FOLDER / "timeline.js").read_text()
    assert set(re.findall(r'(?:\bat|getElementById)\("([\w-]+)"\)', script)) <= set(ids)
    assert '<html lang="en">' in HTML and 'role="status"' in HTML and 'role="alert"' in HTML and "viewport" in HTML


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_counted_right():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_apart(theme):
    """WCAG AA: 4.5 for text, 3 for what must be seen to use the page, in both themes."""
    blocks = [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.S)]
    assert len(blocks) == 2 and blocks[0].keys() >= blocks[1].keys()
    colours = blocks[0] | (blocks[1] if theme == "dark" else {})
    for text in ("text", "muted", "accent"):
        for back in ("surface", "sunk", "back"):
            assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
    assert contrast(colours["bad"], colours["bad-back"]) >= 4.5
    for back in ("accent", "accent-hover"):
        assert contrast(colours["on-accent"], colours[back]) >= 4.5
    for seen in ("edge", "wave", "stage-0", "stage-1", "stage-2", "stage-3"):
        for back in ("surface", "sunk"):
            assert contrast(colours[seen], colours[back]) >= 3, (seen, back)
    assert contrast(colours["wave"], colours["wave-ahead"]) >= 1.5
