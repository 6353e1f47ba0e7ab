"""The first frame of a complete MP3 file: silent, and telling players how many samples at either end are not the sound's.

FFmpeg's muxer writes it too, but for some lengths with the wrong padding. Streams have none: players heed it only if it knows
how many frames there are.
"""

from __future__ import annotations

import struct

DECODER_DELAY = 529
"""Samples any MP3 decoder adds in front; players know, and skip them on top of the encoder's delay in the tag."""
_LARGEST = 0xFFF
_FRAMES, _BYTES, _TOC = 1, 2, 4


def info_frame(first: bytes, frames: int, num_bytes: int, delay: int, padding: int) -> bytes:
    """A frame like ``first``, the first of a mono file of constant bit rate, with the tag in the place of its sound.

    The file has ``frames`` of ``num_bytes`` in all. The encoder was ``delay`` samples late and had ``padding`` to add after the
    sound; the decoder's own delay makes less of that, and more of the delay.
    """
    assert first[0] == 0xFF and first[1] & 0xE7 == 0xE3 and first[3] >> 6 == 3, "not a mono MP3 frame without a checksum"
    assert 0 <= delay <= _LARGEST and 0 <= padding <= _LARGEST
    size = len(first)
    side_info = 17 if first[1] & 0x08 else 9  # MPEG-1, or MPEG-2 and 2.5
    tag = first[:4] + bytes(side_info)
    tag += struct.pack(">4sIII", b"Info", _FRAMES | _BYTES | _TOC, frames, size + num_bytes)
    tag += bytes(256 * percent // 100 for percent in range(100))  # where in the file to seek to
    tag += b"LAME3.100" + bytes(12) + (delay << 12 | padding).to_bytes(3, "big") + bytes(4)
    tag += struct.pack(">I", size + num_bytes) + bytes(2)
    assert len(tag) + 2 <= size, "a frame too small for its tag"
    return (tag + crc16(tag).to_bytes(2, "big")).ljust(size, b"\0")


def crc16(data: bytes) -> int:
    """CRC-16/ARC."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xA001 if crc & 1 else 0)
    return crc
