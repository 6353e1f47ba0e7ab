"""WAV files: true sizes, whole or absent (F40)."""

from __future__ import annotations

import os
import stat
import wave

import numpy as np
import pytest
import torch

from stagevox.audio.stream import SampleStream
from stagevox.audio.wav import check_writable, pcm16, wav_bytes, write_whole
from stagevox.errors import ConfigError, SamplesError


def test_a_strict_reader_gets_every_sample(tmp_path):
    samples = np.linspace(-1, 1, 999, dtype=np.float32)
    write_whole(tmp_path / "a.wav", wav_bytes(samples, 16000))
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()) == (1, 2, 16000, 999)
        back = np.frombuffer(file.readframes(2000), "<i2") / 32767.0
    np.testing.assert_allclose(back, samples, atol=0.5 / 32767)
    data = (tmp_path / "a.wav").read_bytes()
    assert int.from_bytes(data[4:8], "little") == len(data) - 8
    assert int.from_bytes(data[40:44], "little") == len(data) - 44 == 2 * 999


def test_no_samples_is_a_valid_file(tmp_path):
    write_whole(tmp_path / "a.wav", wav_bytes(np.zeros(0, np.float32), 16000))
    with wave.open(str(tmp_path / "a.wav"), "rb") as file:
        assert file.getnframes() == 0


def test_loud_samples_are_clamped_not_wrapped():
    assert np.frombuffer(pcm16(np.array([2, -2, 1, -1, 0], np.float32)), "<i2").tolist() == [32767, -32767, 32767, -32767, 0]


def test_what_was_there_is_replaced_at_once(tmp_path):
    target = tmp_path / "a.wav"
    target.write_bytes(b"old")
    link = tmp_path / "link.wav"
    link.symlink_to(target)
    check_writable("output", link)
    assert target.read_bytes() == b"old"
    write_whole(link, b"new")
    assert target.read_bytes() == b"new" and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.wav", "link.wav"]
    assert stat.S_IMODE(target.stat().st_mode) & 0o077 == 0o077 & ~os.umask(os.umask(0o022)) & 0o066


def test_an_interrupt_leaves_no_half_file(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.wav", b"data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "folder", "missing/a.wav", "file/a.wav", "x" * 300, "a\0b"])
def test_a_path_that_can_not_be_written_is_told(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^output: can't write") as caught:
        check_writable("output", tmp_path / name)
    assert caught.value.field == "output"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_devices_are_written_straight():
    check_writable("output", "/dev/null")
    write_whole("/dev/null", b"data")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_stream_joins_in_order():
    stream = SampleStream(10)
    assert stream.push([0.5, 0.25]).dtype == np.float32
    stream.push(np.zeros(0))
    stream.push(np.array([1.0]))
    assert stream.joined().tolist() == [0.5, 0.25, 1.0]
    assert stream.joined().dtype == np.float32
    assert (stream.num_samples, stream.seconds) == (3, 0.3)
    assert SampleStream(10).joined().shape == (0,)


@pytest.mark.parametrize("make", [lambda: np.ones(2, np.float32), lambda: torch.ones(2)], ids=["array", "tensor"])
def test_a_stream_keeps_its_own_copy(make):
    stream, reused = SampleStream(10), make()
    stream.push(reused)
    reused[:] = 0
    assert stream.joined().tolist() == [1, 1]


@pytest.mark.parametrize("samples", [[np.nan], [np.inf], [[1.0]], 1.0])
def test_what_is_no_sound_is_refused(samples):
    with pytest.raises(SamplesError, match="samples"):
        SampleStream(10).push(samples)
