"""What a caller is told of media that a processor can't read: the first reason, without the media."""

import numpy as np

from stagevox.stage.media import REASON_LENGTH, _pictures, _reason


def raised():
    samples = np.sin(np.arange(90)).astype(np.float32)
    try:
        try:
            raise ValueError(f"The audio {samples} (len=90) is\ntoo short, {[[1, 2, 3, 4], [5, 6, 7, 8, 9]]} for {[1, 28, 3]}")
        except ValueError as error:
            raise ValueError(f"Failed to apply the processor on {samples}") from error
    except ValueError as error:
        return error


def test_the_first_reason_without_its_numbers():
    assert _reason(raised()) == "ValueError: The audio [...] (len=90) is too short, [...] for [1, 28, 3]"


def test_a_long_reason_is_cut():
    assert len(_reason(TypeError("x" * 10_000))) == REASON_LENGTH + len("TypeError: ")


def test_low_pictures_are_no_channels():
    pixels = [np.arange(height * 30, dtype=np.uint8).reshape(height, 10, 3) for height in (1, 3)]
    for given, made in zip(pixels, _pictures({"image": pixels, "audio": []})["image"], strict=True):
        assert made.size == (10, len(given))
        np.testing.assert_array_equal(np.asarray(made), given)
