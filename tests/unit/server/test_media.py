"""Media in messages: where they may come from (SV-5), and what is wrong with them (F44)."""

from __future__ import annotations

import asyncio
import base64
import datetime
import io
import ipaddress
import os
import ssl
import threading
import time
import wave
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from PIL import Image

from stagevox.audio import decode
from stagevox.audio.encode import encoded
from stagevox.audio.wav import wav_bytes
from stagevox.errors import BadMediaError
from stagevox.models.prompts.media import MAX_SIDE, read_media
from stagevox.server.media import MediaLoader, MediaPart
from stagevox.server.net import Fetcher, is_public
from stagevox.server.settings import ServerSettings
from support.scripted_client import MediaFrontEnd, make_blueprint

SAMPLES = np.sin(np.arange(1600) / 5).astype(np.float32) / 2
WAV = wav_bytes(SAMPLES, 16_000)


def png(size=(4, 3)):
    file = io.BytesIO()
    Image.new("RGBA", size, (200, 10, 10, 255)).save(file, "png")
    return file.getvalue()


def b64(data):
    return base64.b64encode(data).decode()


def ask(*parts):
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is this"}, *parts]}]}


def audio(data):
    return {"type": "input_audio", "input_audio": {"data": b64(data), "format": "wav"}}


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def test_media_reach_the_front_end_in_their_order(serve):
    server = serve(blueprint=make_blueprint(MediaFrontEnd()))
    other = wav_bytes(SAMPLES[:800], 8000)
    url = f"data:audio/wav;base64,{b64(other)}"
    parts = [audio(WAV), image(f"data:image/png;base64,{b64(png())}"), {"type": "audio_url", "audio_url": {"url": url}}]
    answer = server.post("/v1/chat/completions", ask(*parts))
    assert answer.json()["choices"][0]["message"]["content"] == "what is this <audio> <image> <audio>"
    prompt = server.client.submitted[0].first.options["prompt"]
    (first, rate), (second, other_rate) = prompt["audios"]
    assert (rate, other_rate, len(second)) == (16_000, 8_000, 800)
    np.testing.assert_allclose(first, SAMPLES, atol=1e-4)
    assert [(one.size, one.mode) for one in prompt["images"]] == [((4, 3), "RGB")]


@pytest.mark.parametrize(
    "data",
    [WAV[:20], WAV[:-10], b"RIFF" + bytes(60), b"no sound at all, " * 9, png()],
    ids=["head", "cut", "nulls", "text", "png"],
)
def test_damaged_sounds(serve, data):
    """F44."""
    answer = serve(blueprint=make_blueprint(MediaFrontEnd())).post("/v1/chat/completions", ask(audio(WAV), audio(data)))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content[2].input_audio.data"


def jpeg():
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file, "jpeg")
    return file.getvalue()


@pytest.mark.parametrize("data", [jpeg()[:1000], png()[:30], WAV, b"\xff\xd8\xff"], ids=["jpeg cut", "png cut", "wav", "head"])
def test_damaged_images(serve, data):
    """F44."""
    answer = serve(blueprint=make_blueprint(MediaFrontEnd())).post(
        "/v1/chat/completions", ask(image(f"data:image/png;base64,{b64(data)}"))
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"


def in_format(kind):
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (200, 10, 10)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_of_images(kind):
    image = load(MediaPart("image", "x", data=b64(in_format(kind))))
    assert (image.size, image.mode) == ((4, 3), "RGB")
    np.testing.assert_allclose(read_media({"images": [in_format(kind)]}, 16_000)["image"][0], np.asarray(image))


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "PPM", "ICO", "TGA"])
def test_other_formats_are_not_even_opened(kind):
    """Pillow could: it wrote them."""
    data = in_format(kind)
    assert "no image" in fail(MediaPart("image", "x", data=b64(data)))
    for read in (lambda: load(MediaPart("image", "x", data=b64(data))), lambda: read_media({"images": [data]}, 16_000)):
        with pytest.raises(BadMediaError) as caught:
            read()
        assert caught.value.allowed == ("PNG", "JPEG", "WEBP", "GIF", "BMP") and "PNG, JPEG" in str(caught.value)


def test_too_many_and_too_large(serve):
    server = serve(blueprint=make_blueprint(MediaFrontEnd()), max_media_items=2, max_media_bytes=len(WAV))
    assert server.post("/v1/chat/completions", ask(audio(WAV), audio(WAV))).status_code == 200
    assert server.post("/v1/chat/completions", ask(*[audio(WAV)] * 3)).json()["error"]["param"] == "messages"
    answer = server.post("/v1/chat/completions", ask(audio(WAV + bytes(100))))
    assert answer.status_code == 400 and "bytes" in answer.json()["error"]["message"]


def flac_of_silence(seconds):
    """20 times smaller than its samples, at the least."""
    data = encoded("flac", np.zeros(16_000 * seconds, np.float32), 16_000)
    assert len(data) * 20 < 64_000 * seconds
    return data


@pytest.mark.parametrize(
    "part, name, size",
    [
        (image(f"data:image/png;base64,{b64(png((100, 100)))}"), "image_url.url", 40_000),
        (audio(flac_of_silence(2)), "input_audio.data", 128_000),
    ],
    ids=["images", "sounds"],
)
def test_what_a_request_s_media_take_decoded_is_bounded_together(serve, monkeypatch, part, name, size):
    """Three fit; of the fourth, nothing is decoded but a piece of sound."""
    pixels, samples = [], []
    convert, mono = Image.Image.convert, decode._mono
    monkeypatch.setattr(Image.Image, "convert", lambda self, mode: pixels.append(self.width * self.height) or convert(self, mode))
    monkeypatch.setattr(decode, "_mono", lambda frame: samples.append(frame.samples) or mono(frame))
    server = serve(blueprint=make_blueprint(MediaFrontEnd()), max_decoded_bytes=3 * size)
    assert server.post("/v1/chat/completions", ask(*[part] * 3)).status_code == 200
    assert 4 * sum(pixels + samples) == 3 * size
    pixels.clear(), samples.clear()
    answer = server.post("/v1/chat/completions", ask(*[part] * 6))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "media_too_large")
    assert error["param"] == f"messages[0].content[4].{name}" and str(3 * size) in error["message"]
    assert 3 * size <= 4 * sum(pixels + samples) < 3.5 * size
    assert len(server.client.submitted) == 1
    assert server.post("/v1/chat/completions", ask(part)).status_code == 200  # each request has a budget of its own


def test_an_image_of_too_many_pixels(monkeypatch):
    monkeypatch.setattr("stagevox.server.media.MAX_PIXELS", 10)
    assert "pixels" in fail(MediaPart("image", "x", data=b64(png())))


class ReadingFrontEnd(MediaFrontEnd):
    """Reads media as those of published models do, which take videos too."""

    fields = (*MediaFrontEnd.fields, "videos")

    def admit(self, req_id, prompt):
        read_media(prompt, 16_000)
        return super().admit(req_id, prompt)


def test_what_the_front_end_finds_has_the_client_s_name(serve):
    """A side that only the front end minds."""
    server = serve(blueprint=make_blueprint(ReadingFrontEnd()))
    good, long = (image(f"data:image/png;base64,{b64(png(size))}") for size in ((4, 3), (MAX_SIDE + 1, 1)))
    assert server.post("/v1/chat/completions", ask(good, audio(WAV), good)).status_code == 200
    answer = server.post("/v1/chat/completions", ask(good, audio(WAV), long))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "bad_media")
    assert error["param"] == "messages[0].content[3].image_url.url"
    assert error["message"].startswith("messages[0].content[3].image_url.url: shape [1, 16385, 3]")


def test_videos_are_not_supported_over_http(serve):
    """Also where the model takes some: front ends take frames."""
    server = serve(blueprint=make_blueprint(ReadingFrontEnd()))
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    answer = server.post("/v1/chat/completions", ask(audio(WAV), video))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_media")
    assert error["param"] == "messages[0].content[2].video_url.url" and "not supported over HTTP" in error["message"]
    assert not server.client.submitted


def load(part, fetcher=None, **settings):
    loader = MediaLoader(ServerSettings(**settings), fetcher)
    return asyncio.run(loader.load(part, loader.budget()))


def fail(part, fetcher=None, **settings):
    with pytest.raises(BadMediaError) as caught:
        load(part, fetcher, **settings)
    assert caught.value.field == "x"
    return str(caught.value)


# Local files.


@pytest.mark.covers("SV-5")
def test_files_of_the_folder_alone(tmp_path):
    folder, outside = tmp_path / "media", tmp_path / "media-secret"
    folder.mkdir()
    outside.mkdir()
    for place in (folder, outside):
        (place / "a b.wav").write_bytes(WAV)
    (folder / "link.wav").symlink_to(outside / "a b.wav")
    (folder / "inside.wav").symlink_to(folder / "a b.wav")
    (folder / "away").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    options = {"allowed_local_media_path": folder}

    def part(url):
        return MediaPart("audio", "x", url=url)

    assert load(part(f"file://{folder}/a%20b.wav"), **options)[1] == 16_000
    assert load(part(f"file://{folder}/inside.wav"), **options)[1] == 16_000
    answers = {
        fail(part(url), **options)
        for url in (
            f"file://{outside}/a%20b.wav",
            f"file://{folder}/link.wav",
            f"file://{folder}/away/a%20b.wav",
            f"file://{folder}/../media-secret/a%20b.wav",
            f"file://{folder}/%2e%2e/media-secret/a%20b.wav",
            f"file://{folder}",
            f"file://{folder}/pipe",
            f"file://{folder}/gone.wav",
            f"file://{folder}/a%00b.wav",
            "file:///etc/passwd",
        )
    }
    assert answers == {"x: no such file in the folder that is allowed"}  # nobody learns what else there is
    assert "switched off" in fail(part(f"file://{folder}/a%20b.wav"))
    assert "this machine" in fail(part(f"file://elsewhere{folder}/a%20b.wav"), **options)
    assert "bytes" in fail(part(f"file://{folder}/a%20b.wav"), max_media_bytes=100, **options)


# The internet.


@pytest.mark.covers("SV-5")
@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "192.0.2.1",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
    ],
)
def test_addresses_that_are_not_the_open_internet(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_are(address):
    assert is_public(ipaddress.ip_address(address))


class Site(BaseHTTPRequestHandler):
    """``/sound``, ``/to/URL``, ``/loop``, ``/slow``, ``/endless``, ``/packed``, ``/missing``."""

    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        if self.path.startswith("/to/"):
            self.answer(302, {"Location": self.path.removeprefix("/to/")})
        elif self.path == "/loop":
            self.answer(307, {"Location": "/loop"})
        elif self.path == "/slow":
            time.sleep(1.5)
            self.answer(200, {}, WAV)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(65536))
            except OSError:
                pass
        elif self.path == "/packed":
            self.answer(200, {"Content-Encoding": "gzip"}, bytes(100))
        elif self.path == "/sound":
            self.answer(200, {"Content-Type": "audio/wav"}, WAV)
        else:
            self.answer(404, {})

    def answer(self, status, headers, body=b""):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextmanager
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def web():
    """``(fetch, host, seen)``: names resolve to the site here, which a test may do as if it were public."""
    with site() as server:
        port = server.server_port
        host = f"media.example:{port}"
        names = {"media.example": ["127.0.0.1"], "other.example": ["127.0.0.1"], "none.example": []}

        async def resolve(name, port):
            if name not in names:
                raise OSError("no such host")
            return names[name]

        def fetch(url, domains=(host,), max_bytes=10**6, seconds=5.0, may_connect=lambda address: True):
            fetcher = Fetcher(domains, max_bytes, seconds, resolve=resolve, may_connect=may_connect)
            return asyncio.run(fetcher.fetch(url, "x"))

        fetch.host, fetch.port, fetch.seen, fetch.names = host, port, server.seen, names
        yield fetch


def refused(fetch, url, **options):
    with pytest.raises(BadMediaError) as caught:
        fetch(url, **options)
    return str(caught.value)


@pytest.mark.covers("SV-5")
def test_a_fetch_goes_to_the_address_that_was_checked(web):
    checked = []
    assert web(f"http://{web.host}/sound", may_connect=lambda address: checked.append(str(address)) or True) == WAV
    assert checked == ["127.0.0.1"]
    ((path, headers),) = web.seen
    assert path == "/sound" and headers["Host"] == web.host and "Authorization" not in headers


@pytest.mark.covers("SV-5")
def test_private_addresses_are_never_called(web):
    assert "not public" in refused(web, f"http://{web.host}/sound", may_connect=is_public)
    web.names["media.example"] = ["93.184.216.34", "127.0.0.1"]  # one private among public ones
    assert "not public" in refused(web, f"http://{web.host}/sound", may_connect=is_public)
    assert web.seen == []


@pytest.mark.covers("SV-5")
def test_redirects_are_checked_anew(web):
    assert web(f"http://{web.host}/to//sound") == WAV
    assert "may not be fetched" in refused(web, f"http://{web.host}/to/http://other.example:{web.port}/sound")
    assert "plain http" in refused(web, f"http://{web.host}/to/file:///etc/passwd")
    assert "redirects" in refused(web, f"http://{web.host}/loop")
    web.seen.clear()
    allowed = []

    def once(address):
        allowed.append(address)
        return len(allowed) == 1

    assert "not public" in refused(web, f"http://{web.host}/to//sound", may_connect=once)  # the name moved meanwhile
    assert [path for path, _ in web.seen] == ["/to//sound"]


@pytest.mark.covers("SV-5")
@pytest.mark.parametrize(
    "url",
    [
        "http://evil.example/sound",
        "http://media.example/sound",  # allowed with its port only
        "http://media.example.evil.example:{port}/sound",
        "http://user:secret@media.example:{port}/sound",
        "http://media.example:{port}@evil.example/sound",
        "http://127.0.0.1:{port}/sound",
        "http://[::1]:{port}/sound",
        "http://2130706433:{port}/sound",
        "http:///sound",
        "http://media.example:port/sound",
        "ftp://media.example:{port}/sound",
        "http://[media.example:{port}/sound",
    ],
)
def test_hosts_that_are_not_allowed(web, url):
    refused(web, url.format(port=web.port))
    assert web.seen == []


@pytest.mark.covers("SV-5")
@pytest.mark.parametrize("name", ["media.example", "other.example"])
def test_a_certificate_is_checked_against_the_name(name, tmp_path):
    """Though the connection goes to an address."""
    certificate = self_signed("media.example", tmp_path)
    with site() as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)

        async def resolve(host, port):
            return ["127.0.0.1"]

        fetcher = Fetcher(
            (f"{name}:{server.server_port}",),
            10**6,
            5.0,
            resolve=resolve,
            may_connect=lambda address: True,
            trusted=lambda: ssl.create_default_context(cafile=certificate),
        )
        call = fetcher.fetch(f"https://{name}:{server.server_port}/sound", "x")
        if name == "media.example":
            assert asyncio.run(call) == WAV
        else:
            with pytest.raises(BadMediaError, match="could not be fetched"):
                asyncio.run(call)


def self_signed(name, folder):
    """A PEM file with a key and a certificate of ``name``."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "site.pem"
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return str(path)


def test_fetches_that_fail(web):
    assert "status 404" in refused(web, f"http://{web.host}/missing")
    assert "bytes" in refused(web, f"http://{web.host}/endless", max_bytes=100_000)
    assert "within" in refused(web, f"http://{web.host}/slow", seconds=0.3)
    assert "compressed" in refused(web, f"http://{web.host}/packed")
    assert "could not be fetched" in refused(web, "http://gone.example/sound", domains=("gone.example",))
    assert "not public" in refused(web, "http://none.example/sound", domains=("none.example",))
    web.names["dead.example"] = ["127.0.0.1"]
    assert "could not be fetched" in refused(web, "http://dead.example:9/sound", domains=("dead.example:9",))


def test_a_url_in_a_message(web, serve, monkeypatch):
    """F44: whole road, with a dead link beside it."""
    server = serve(blueprint=make_blueprint(MediaFrontEnd()), allowed_media_domains=(web.host,))
    assert server.post("/v1/chat/completions", ask(image(f"http://{web.host}/x"))).status_code == 400  # private: not even tried

    class Open:
        async def fetch(self, url, field):
            return await asyncio.to_thread(web, url)

    server.state.media._fetcher = Open()
    part = {"type": "audio_url", "audio_url": {"url": f"http://{web.host}/sound"}}
    assert server.post("/v1/chat/completions", ask(part)).status_code == 200
    ((samples, rate),) = server.client.submitted[0].first.options["prompt"]["audios"]
    with wave.open(io.BytesIO(WAV)) as file:
        assert (rate, len(samples)) == (file.getframerate(), file.getnframes())
