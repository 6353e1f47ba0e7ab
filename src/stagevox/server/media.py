"""Sounds and images of messages: where their bytes may come from, and what a front end is given.

=========== ================== ==========================================================
kind        prompt field       value
=========== ================== ==========================================================
sound       ``audios``         ``(float32 [samples], Hz)``, mono
image       ``images``         a ``PIL.Image.Image`` in RGB
=========== ================== ==========================================================
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from stagevox.audio.decode import decode_clip
from stagevox.errors import BadMediaError, BadRequestError
from stagevox.images import open_image

from .errors import ApiError, refused
from .net import Fetcher
from .settings import ServerSettings

FIELDS = {"audio": "audios", "image": "images"}
"""Kinds of media and the prompt's fields for them."""

MAX_PIXELS = 64_000_000


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One item of a message, not read yet."""

    kind: str
    param: str
    """What the client calls it."""
    url: str | None = None
    data: str | None = None
    """Base64."""


class MediaBudget:
    """Memory for the decoded media of one request."""

    def __init__(self, num_bytes: int) -> None:
        self._all = self._left = num_bytes

    def take(self, num_bytes: int, param: str) -> None:
        """Count what is decoded next.

        Raises:
            ApiError: 400, there is no room for it; ``param`` is the client's name of the item.
        """
        if num_bytes > self._left:
            raise refused(param, f"the request's media, decoded, take more than {self._all} bytes", "media_too_large")
        self._left -= num_bytes


class MediaLoader:
    """Reads items from messages, ``data:`` URLs, and, where the operator allows it, from the internet and from files."""

    def __init__(self, settings: ServerSettings, fetcher: Fetcher | None = None) -> None:
        self._max_bytes = settings.max_media_bytes
        self._decoded_bytes = settings.max_decoded_bytes
        self._may_fetch = bool(settings.allowed_media_domains)
        self._folder = settings.allowed_local_media_path
        self._fetcher = fetcher or Fetcher(settings.allowed_media_domains, settings.max_media_bytes, settings.media_seconds)

    def budget(self) -> MediaBudget:
        """A new one, for one request."""
        return MediaBudget(self._decoded_bytes)

    async def load(self, part: MediaPart, budget: MediaBudget) -> Any:
        """What the front end gets for an item of a request, whose other items share the budget.

        Raises:
            ApiError: see :meth:`MediaBudget.take`.
            BadRequestError: it can't be had or can't be read; ``field`` is the item's.
        """
        data = await self._bytes(part)
        if not data:
            raise BadMediaError(part.param, "empty: 0 bytes")
        return await asyncio.to_thread(_decode, part, data, self._max_bytes, budget)

    async def _bytes(self, part: MediaPart) -> bytes:
        if part.data is not None:
            return self._base64(part.data, part.param)
        assert part.url is not None
        scheme = part.url.partition(":")[0].lower()
        if scheme == "data":
            return self._data_url(part.url, part.param)
        if scheme in ("http", "https"):
            if not self._may_fetch:
                raise BadMediaError(part.param, "media URLs are switched off here: send the data itself")
            return await self._fetcher.fetch(part.url, part.param)
        if scheme == "file":
            if self._folder is None:
                raise BadMediaError(part.param, "local files are switched off here: send the data itself")
            return await asyncio.to_thread(self._file, part.url, self._folder, part.param)
        raise BadMediaError(part.param, "not a data:, http: or https: URL")

    def _base64(self, data: str, param: str) -> bytes:
        if len(data) * 3 // 4 > self._max_bytes + 3:
            raise BadMediaError(param, f"more than {self._max_bytes} bytes")
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadMediaError(param, f"not base64: {error}") from None

    def _data_url(self, url: str, param: str) -> bytes:
        head, comma, data = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise BadMediaError(param, "not a data: URL in base64")
        return self._base64(data, param)

    def _file(self, url: str, folder: Path, param: str) -> bytes:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise BadMediaError(param, "not a file of this machine")
        # One answer for what is missing and what is out of bounds: nobody learns what else there is.
        nothing = BadMediaError(param, "no such file in the folder that is allowed")
        try:
            data = _read_within(os.path.realpath(folder), os.path.realpath(unquote(parts.path)), self._max_bytes + 1)
        except (OSError, ValueError):
            raise nothing from None
        if data is None:
            raise nothing
        if len(data) > self._max_bytes:
            raise BadMediaError(param, f"more than {self._max_bytes} bytes")
        return data


def _read_within(root: str, path: str, size: int) -> bytes | None:
    """The first ``size`` bytes of a plain file under ``root``; both paths are real ones."""
    if os.path.commonpath([root, path]) != root:
        return None
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        real = os.path.realpath(f"/proc/self/fd/{number}")  # where it is now that it is open
        if not stat.S_ISREG(os.fstat(number).st_mode) or os.path.commonpath([root, real]) != root:
            return None
        with os.fdopen(number, "rb", closefd=False) as file:
            return file.read(size)
    finally:
        os.close(number)


def _decode(part: MediaPart, data: bytes, max_bytes: int, budget: MediaBudget) -> Any:
    try:
        if part.kind == "audio":
            clip = decode_clip(
                data, max_bytes=max_bytes, field=part.param, taken=lambda count: budget.take(4 * count, part.param)
            )
            return clip.samples, clip.sample_rate
        return _image(data, part.param, budget)
    except (BadRequestError, ApiError):
        raise
    except Exception as error:  # whatever a decoder trips over, the item is to blame
        raise BadMediaError(part.param, f"can't be read: {type(error).__name__}") from error


def _image(data: bytes, param: str, budget: MediaBudget) -> Any:
    with open_image(data, param) as image:
        if image.width * image.height > MAX_PIXELS:
            raise BadMediaError(param, f"more than {MAX_PIXELS} pixels")
        budget.take(4 * image.width * image.height, param)  # Pillow's RGB has a byte to spare
        image.load()
        return image.convert("RGB")
