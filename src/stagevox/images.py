"""Image files from anybody: which kinds are opened at all. Pillow knows dozens more, some of which start programs or read other files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from .errors import BadMediaError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow's names of them."""


def open_image(data: bytes, field: str) -> Image.Image:
    """An image whose head was read; its pixels come with ``load``, which may raise whatever a decoder trips over.

    Raises:
        BadMediaError: no image of these formats; ``field`` is its name.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError:
        raise BadMediaError(field, "no image of a format that is read here", IMAGE_FORMATS) from None
