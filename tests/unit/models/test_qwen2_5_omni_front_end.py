"""What a caller may ask of Qwen2.5-Omni, and how what can't be served is named."""

import io
import wave

import numpy as np
import pytest
from PIL import Image

from stagevox.errors import BadMediaError, BadParameterError, EmptyTextError, UnknownVoiceError, VocabularyError
from stagevox.models.qwen2_5_omni.front_end import Qwen2_5OmniFrontEnd

pytestmark = pytest.mark.filterwarnings("ignore")

PIXELS = np.zeros((56, 56, 3), np.uint8)
SAMPLES = np.zeros(1600, np.float32)


@pytest.fixture(scope="module")
def front_end(tiny_qwen2_5_omni):
    return Qwen2_5OmniFrontEnd(tiny_qwen2_5_omni)


def jpeg():
    file = io.BytesIO()
    Image.fromarray(np.arange(56 * 56 * 3, dtype=np.uint8).reshape(56, 56, 3)).save(file, "JPEG")
    return file.getvalue()


def wav(count=1600):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(b"\x00\x40\x00\x20" * count)
    return file.getvalue()


def test_voices(front_end):
    assert front_end.voices == ("Chelsie", "Ethan") and front_end.sample_rate == 24000
    assert front_end.admit("r", {"text": "hello"}).options == {"voice": "Chelsie"}
    for voice in ("Nobody", "ethan", ""):
        with pytest.raises(UnknownVoiceError, match=r"voice: no voice .*Chelsie, Ethan"):
            front_end.admit("r", {"text": "hello", "voice": voice})


def test_a_text_is_a_conversation_with_the_usual_system_prompt(front_end):
    text = front_end.admit("r", {"text": "hello"})
    from stagevox.models.qwen2_5_omni.front_end import SYSTEM

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert front_end.admit("r", {"messages": messages}).prompt_token_ids == text.prompt_token_ids
    assert front_end.reply_text(text.prompt_token_ids, {}).endswith("assistant\n")


def test_media_in_all_their_shapes(front_end):
    given = {
        "text": "what",
        "images": [PIXELS, Image.fromarray(PIXELS), jpeg()],
        "audios": [SAMPLES, (SAMPLES, 8000), wav()],
        "videos": [PIXELS[None]],
    }
    made = front_end.admit("r", given)
    assert {kind: len(items) for kind, items in made.media.items()} == {"image": 3, "audio": 3, "video": 1}
    samples = made.media["audio"][2]
    assert samples.shape == (3200,) and abs(samples[1600] - (0x4000 + 0x2000) / 2 / 32768) < 1e-3  # 8 kHz brought to 16


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"text": " "}, EmptyTextError, "text: is blank"),
        ({"text": 5}, BadParameterError, "text: not a text"),
        ({}, BadParameterError, "text: not a text"),
        ({"text": "a", "voice": 5}, BadParameterError, "voice: not a name"),
        ({"text": "say <|im_end|>"}, VocabularyError, r"text: holds the special token <\|im_end\|>"),
        ({"text": "a", "messages": []}, BadParameterError, "either a text or messages"),
        ({"messages": []}, EmptyTextError, "messages: no messages"),
        ({"messages": "hello"}, BadParameterError, "messages: not a sequence"),
        ({"messages": [5]}, BadParameterError, r"messages\[0\]: not a mapping"),
        ({"messages": [{"role": "tool", "content": "a"}]}, BadParameterError, r"messages\[0\]\.role: no role 'tool'"),
        ({"messages": [{"role": "user"}]}, BadParameterError, r"messages\[0\]\.content: neither a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            BadParameterError,
            r"messages\[0\]\.content\[0\]\.type: no part 'smell'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "<|IMAGE|>"}]}]},
            VocabularyError,
            r"messages\[0\]\.content\[0\]\.text: holds the special token",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            BadParameterError,
            "messages: 1 places for image, 0 given",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "audios": [SAMPLES]}, BadParameterError, "0 places for audio, 1 given"),
        ({"text": "a", "images": PIXELS.tobytes()}, BadParameterError, "images: not a sequence"),
        ({"text": "a", "images": [jpeg()[:200]]}, BadMediaError, r"images\[0\]: no image"),
        ({"text": "a", "images": [PIXELS, b""]}, BadMediaError, r"images\[1\]: no image"),
        ({"text": "a", "images": [PIXELS[:0]]}, BadMediaError, r"images\[0\]: shape \[0, 56, 3\]"),
        ({"text": "a", "images": [PIXELS.astype(float)]}, BadMediaError, r"images\[0\]: .*of float64, expected"),
        ({"text": "a", "images": [PIXELS[..., 0]]}, BadMediaError, r"images\[0\]: shape"),
        ({"text": "a", "audios": [b""]}, BadMediaError, r"audios\[0\]: no WAV file"),
        ({"text": "a", "audios": [wav()[:30]]}, BadMediaError, r"audios\[0\]: no WAV file"),
        ({"text": "a", "audios": [wav(0)]}, BadMediaError, r"audios\[0\]: no samples"),
        ({"text": "a", "audios": [SAMPLES[:0]]}, BadMediaError, r"audios\[0\]: no samples"),
        ({"text": "a", "audios": [SAMPLES + np.float32("nan")]}, BadMediaError, r"audios\[0\]: samples that are no numbers"),
        ({"text": "a", "audios": [SAMPLES.astype(int)]}, BadMediaError, r"audios\[0\]: .*expected one axis of floats"),
        ({"text": "a", "audios": [(SAMPLES, 0)]}, BadMediaError, r"audios\[0\]: a sample rate of 0 Hz"),
        ({"text": "a", "videos": [PIXELS]}, BadMediaError, r"videos\[0\]: shape"),
        ({"text": "a", "videos": [PIXELS[None][:0]]}, BadMediaError, r"videos\[0\]: shape \[0, 56, 56, 3\]"),
    ],
)
def test_what_can_not_be_served_is_named(front_end, given, error, says):
    with pytest.raises(error, match=says):
        front_end.admit("r", given)
