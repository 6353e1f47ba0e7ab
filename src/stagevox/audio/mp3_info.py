"""The first frame of an MP3 file: silent, and telling players how many samples at either end are not the sound's.

FFmpeg's muxer writes it too, but only into files, and for some lengths with the wrong padding.
"""

from __future__ import annotations

import struct

DECODER_DELAY = 529
"""Samples any MP3 decoder adds in front; players know, and skip them on top of the encoder's delay in the tag."""
MAX_PADDING = 0xFFF
_FRAMES, _BYTES, _TOC = 1, 2, 4


def info_frame(first: bytes, delay: int, end: tuple[int, int, int] | None) -> bytes:
    """A frame like ``first``, the first frame of a mono file of constant bit rate, with the tag in the place of its sound.

    ``delay`` is that of encoder and decoder together. ``end`` is, for a file that is complete, how many frames it has, how many
    bytes they are, and how many samples of padding close it. None: not known, and the tag says so.
    """
    assert first[0] == 0xFF and first[1] & 0xE6 == 0xE2 and first[3] >> 6 == 3, "no header of a mono MP3 frame"
    encoder_delay = delay - DECODER_DELAY
    size = len(first)
    side_info = 17 if first[1] & 0x08 else 9  # MPEG-1, or MPEG-2 and 2.5
    if end is None:
        flags, fields, padding = 0, b"", 0
    else:
        frames, num_bytes, padding = end
        flags = _FRAMES | _BYTES | _TOC
        fields = struct.pack(">II", frames, size + num_bytes) + bytes(256 * percent // 100 for percent in range(100))
    assert 0 <= encoder_delay <= MAX_PADDING and 0 <= padding <= MAX_PADDING
    no_crc = bytes([first[0], first[1] | 1, first[2], first[3]])
    tag = no_crc + bytes(side_info) + struct.pack(">4sI", b"Info", flags) + fields
    tag += b"LAME3.100" + bytes(12) + (encoder_delay << 12 | padding).to_bytes(3, "big") + bytes(4)
    tag += struct.pack(">I", size + end[1] if end else 0) + bytes(2)
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
