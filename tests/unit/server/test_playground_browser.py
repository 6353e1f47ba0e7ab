"""The playground in a browser, over a scripted pipeline: what is typed is heard, seen and saved; by mouse, keyboard and screen
reader; in light and dark."""

from __future__ import annotations

import wave
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest

from stagevox.audio.wav import pcm16, wav_bytes
from stagevox.errors import RequestFailedError
from support.browser import launched
from support.scripted_client import RATE, MediaFrontEnd, make_blueprint, samples_of

TEXT = "hello there"
HEARD = """
  window.heard = [];
  const start = AudioBufferSourceNode.prototype.start;
  AudioBufferSourceNode.prototype.start = function (when) {
    const samples = [...this.buffer.getChannelData(0)];
    window.heard.push({ when, rate: this.buffer.sampleRate, context: this.context.sampleRate, samples });
    return start.call(this, when);
  };
"""


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    """Open a server's playground: ``with visit(server) as page``. Whatever a page complains of or asks of others is a failure."""

    @contextmanager
    def opened(server, *, expected=(), **options):
        page = browser.new_page(**{"viewport": {"width": 1000, "height": 900}, **options})
        problems, asked = [], []
        page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.add_init_script(HEARD)
        try:
            page.goto(server.url)
            page.wait_for_selector("#model:not(:has-text('…'))")
            yield page
        finally:
            page.close()
        assert [url for url in asked if not url.startswith((server.url + "/", f"blob:{server.url}/"))] == []
        assert [problem for problem in problems if not any(part in problem for part in expected)] == []

    return opened


def wait(page, what):
    page.wait_for_selector(what, state="attached", timeout=20_000)


def status(page):
    return page.inner_text("#status")


def speak(page, text=TEXT):
    page.fill("#text", text)
    page.click("#speak")
    wait(page, "#download[href]")
    wait(page, "#timeline tr")  # asked for once all is here


def save(page, tmp_path) -> bytes:
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "stagevox.wav"
    path = Path(tmp_path) / "saved.wav"
    download.value.save_as(path)
    return path.read_bytes()


@pytest.mark.parametrize("mode", ["speech", "chat"])
@pytest.mark.parametrize("voice", ["slt", "kal"])
def test_what_is_typed_is_heard_seen_and_saved(listen, visit, tmp_path, mode, voice):
    with listen(pause=0.001) as server, visit(server) as page:
        page.select_option("#voice", voice)
        page.check(f"#mode-{mode}", force=True)
        speak(page)
        saved = save(page, tmp_path)
        heard = page.evaluate("window.heard")
        timing = httpx.get(f"{server.url}/v1/timings/{server.client.submitted[-1].req_id.rpartition('-')[0]}").json()
        fields = {"input": TEXT, "response_format": "wav", "sample_rate": RATE, "voice": voice}
        own = httpx.post(f"{server.url}/v1/audio/speech", json=fields).content
        rows = page.locator("#timeline tr").all_inner_texts()
        shown = {name: page.inner_text(f"#{name}") for name in ("ttfa", "length", "total", "rtf", "breaks")}
        label, reply, said = page.get_attribute("#wave", "aria-label"), page.inner_text("#reply"), status(page)
    samples = samples_of(TEXT.encode(), voice)
    assert saved == own == wav_bytes(samples, RATE)  # to the byte
    with wave.open(BytesIO(saved)) as file:
        assert file.getnframes() == len(samples)
    # Heard: all of it, once, in order, each piece where the one before ends, at the model's own rate.
    assert {(piece["rate"], piece["context"]) for piece in heard} == {(RATE, RATE)}
    sound = np.concatenate([piece["samples"] for piece in heard])
    assert np.array_equal(np.rint(sound * 32768).astype("<i2").tobytes(), pcm16(samples))
    ends = [piece["when"] + len(piece["samples"]) / RATE for piece in heard]
    late = sum(abs(piece["when"] - end) > 1e-6 for piece, end in zip(heard[1:], ends, strict=False))
    assert len(heard) >= 2 and shown["breaks"] == str(late)
    seconds = len(samples) / RATE
    assert shown["length"] == f"{seconds:.2f} s" and label == f"Waveform: {seconds:.2f} seconds of speech"
    first, total = float(shown["ttfa"].removesuffix(" ms")), float(shown["total"].removesuffix(" ms"))
    assert 1e3 * timing["first_audio_s"] - 1 <= first <= total
    assert float(shown["rtf"]) == pytest.approx(total / 1e3 / seconds, abs=2e-3)
    assert reply == (TEXT if mode == "chat" else "") and f"after {shown['ttfa']}" in said
    assert [row.split("\t")[0].strip() for row in rows] == ["queue", "thinker", "talker", "code2wav", "whole request"]
    for row, stage in zip(rows[1:4], timing["stages"], strict=True):
        assert row.split()[-2 if stage["tokens"] else -1] == str(stage["outputs"])


def test_it_is_heard_while_it_streams(listen, visit):
    """The server still works on it when the page plays, draws and says so."""
    with listen(pause=0.12) as server, visit(server) as page:
        page.fill("#text", TEXT)
        page.click("#speak")
        page.wait_for_selector("#status:has-text('Waiting')")
        page.wait_for_selector("#status:has-text('Speaking')")
        assert page.evaluate("window.heard.length") >= 1 and page.inner_text("#ttfa") != "–"
        assert server.client.live  # not over
        assert page.get_attribute("#download", "href") is None
        empty = page.evaluate("document.getElementById('wave').toDataURL()")
        wait(page, "#download[href]")
        assert page.evaluate("document.getElementById('wave').toDataURL()") != empty


def test_keyboard_alone(listen, visit, tmp_path):
    """Tab reaches everything in the order it is read; Ctrl+Enter speaks, Escape stops, Enter plays again and saves."""
    with listen() as server, visit(server) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the text"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "text"
        page.keyboard.type(TEXT)
        page.keyboard.press("Control+Enter")
        wait(page, "#download[href]")
        order = []
        for _ in range(6):
            page.keyboard.press("Tab")
            order.append(page.evaluate("document.activeElement.id"))
        assert order == ["voice", "mode-speech", "speak", "stop", "replay", "download"]
        page.keyboard.press("Shift+Tab")
        played = page.evaluate("window.heard.length")
        page.keyboard.press("Enter")
        assert page.evaluate("window.heard.length") == 2 * played
        page.keyboard.press("Tab")
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        download.value.save_as(tmp_path / "x.wav")
        assert (tmp_path / "x.wav").read_bytes() == wav_bytes(samples_of(TEXT.encode()), RATE)
        page.focus("#mode-speech")
        page.keyboard.press("ArrowRight")
        assert page.is_checked("#mode-chat")


def test_escape_stops_and_frees_the_server(listen, visit):
    with listen(pause=0.12) as server, visit(server) as page:
        page.fill("#text", TEXT)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#status:has-text('Speaking')")
        page.keyboard.press("Escape")
        page.wait_for_selector("#status:has-text('Stopped after 0.')")
        wait(page, "#stop[aria-disabled=true]")
        for _ in range(100):
            if server.client.aborted:
                break
            page.wait_for_timeout(20)
        assert len(server.client.aborted) == 1 and not server.client.live
        assert page.get_attribute("#download", "href") is None
        speak(page, "yes")  # and goes on working
        assert "of speech" in status(page)


def test_speaking_again_takes_the_place_of_the_first(listen, visit, tmp_path):
    with listen(pause=0.02) as server, visit(server) as page:
        page.fill("#text", "one two three four five")
        page.click("#speak")
        page.wait_for_selector("#status:has-text('Waiting')")
        speak(page, "yes")
        assert save(page, tmp_path) == wav_bytes(samples_of(b"yes"), RATE)
        assert len(server.client.aborted) == 1


@pytest.mark.parametrize("mode", ["speech", "chat"])
def test_errors_are_told_at_the_field(listen, visit, mode):
    with listen() as server, visit(server, expected=["400 (Bad Request)"]) as page:
        page.check(f"#mode-{mode}", force=True)
        page.fill("#text", "\N{GRINNING FACE}")
        page.click("#speak")
        page.wait_for_selector("#error:has-text('the voice can')")
        assert page.get_attribute("#text", "aria-invalid") == "true" and page.get_attribute("#error", "role") == "alert"
        assert status(page) == "Nothing was said." and page.get_attribute("#replay", "aria-disabled") == "true"
        page.fill("#text", "  ")
        page.click("#speak")
        page.wait_for_selector("#error:has-text('Type something')")
        assert page.evaluate("document.activeElement.id") == "text" and len(server.client.submitted) == 0
        speak(page)
        assert page.inner_text("#error") == "" and page.get_attribute("#text", "aria-invalid") is None


@pytest.mark.parametrize("mode", ["speech", "chat"])
def test_speech_that_breaks_off_is_no_speech(listen, visit, mode):
    with listen(pause=0.01) as server, visit(server, expected=["ERR_INCOMPLETE_CHUNKED_ENCODING"]) as page:
        server.client.fail = {TEXT: (RequestFailedError("talker: it broke"), len(TEXT) + 4)}
        page.check(f"#mode-{mode}", force=True)
        page.fill("#text", TEXT)
        page.click("#speak")
        page.wait_for_selector("#error:not(:empty)")
        assert status(page) == "The speech is not whole." and page.inner_text("#length") != "–"
        assert page.get_attribute("#download", "href") is None and page.inner_text("#rtf") == "–"


def test_a_server_that_asks_for_a_key(listen, visit):
    with listen(api_keys=("secret",)) as server, visit(server, expected=["401 (Unauthorized)"]) as page:
        assert page.is_visible("#key") and not page.is_visible("#voice")
        page.fill("#key", "wrong")
        page.fill("#text", TEXT)
        page.click("#speak")
        page.wait_for_selector("#error:has-text('API key')")
        assert page.evaluate("document.activeElement.id") == "key"
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#voice")
        speak(page)
        assert page.locator("#timeline tr").count() == 5
        assert page.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie])") == '[{},{},""]'


def test_a_model_that_answers_has_only_chat(listen, visit):
    with listen(blueprint=make_blueprint(MediaFrontEnd())) as server, visit(server) as page:
        assert not page.is_visible("#mode-row")
        speak(page)
        assert page.inner_text("#reply") == TEXT


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1000])
def test_no_rule_of_access_is_broken(listen, visit, scheme, width):
    """axe-core finds nothing: empty, with an error, and with speech; nothing is wider than the window."""
    from axe_playwright_python.sync_playwright import Axe

    def violations():
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]

    size = {"width": width, "height": 800}
    with listen(api_keys=("x",)) as server, visit(server, expected=["401", "400"], color_scheme=scheme, viewport=size) as page:
        page.fill("#key", "x")
        page.press("#key", "Tab")
        page.wait_for_selector("#voice")
        assert violations() == []
        page.fill("#text", "\N{GRINNING FACE}")
        page.click("#speak")
        page.wait_for_selector("#error:not(:empty)")
        assert violations() == []
        page.check("#mode-chat", force=True)
        speak(page)
        wait(page, "#timeline tr")
        assert violations() == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 16, 23)"
        assert dark == (scheme == "dark")


def test_a_screen_reader_finds_names_and_roles(listen, visit):
    with listen() as server, visit(server) as page:
        speak(page)
        tree = page.locator("main").aria_snapshot()
        for part in (
            'textbox "What to say"',
            'combobox "Voice"',
            'group "Endpoint"',
            'radio "Speech" [checked]',
            'button "Speak"',
            'button "Play again"',
            'link "Download WAV"',
            'img "Waveform:',
            "status:",
            'columnheader "Stage"',
            'rowheader "talker"',
        ):
            assert part in tree, part
