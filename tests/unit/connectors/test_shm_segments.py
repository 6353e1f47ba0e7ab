"""Shared memory comes back, is bounded, is private, and can be swept by whoever owns the run."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys

import pytest

from stagevox.connectors import segments as module
from stagevox.connectors.roadmap import RoadOwner, sweep_stale
from stagevox.connectors.segments import SegmentPool, read, size_of, sweep
from stagevox.errors import ConfigError
from support.road import SHM, segments

PREFIX = f"stagevox-test{secrets.token_hex(4)}."


@pytest.fixture
def pool():
    pool = SegmentPool(SHM, PREFIX, keep=10_000)
    yield pool
    pool.close()
    assert segments(PREFIX) == []


def view(size, fill=1):
    return memoryview(bytearray([fill]) * size)


def read_back(segment, *sizes):
    views = [view(size, 0) for size in sizes]
    read(SHM, PREFIX, segment.name, views)
    return [bytes(each) for each in views]


def test_bytes_come_back(pool):
    first = pool.write([view(3, 1), view(0), view(4, 2)])
    assert read_back(first, 3, 0, 4) == [b"\1\1\1", b"", b"\2\2\2\2"]
    assert size_of(SHM, first.name) == 7


def test_more_pieces_than_one_system_call_takes(pool):
    pieces = [view(2, index % 251) for index in range(2500)]
    assert read_back(pool.write(pieces), *[2] * 2500) == [bytes(piece) for piece in pieces]


def test_a_call_that_does_a_part_is_continued(pool, monkeypatch):
    calls = []

    def some(call, fd, views, offset):
        calls.append(offset)
        return call(fd, [views[0][: max(1, len(views[0]) // 2)]], offset)

    write, fill = os.pwritev, os.preadv
    monkeypatch.setattr(module.os, "pwritev", lambda *args: some(write, *args))
    monkeypatch.setattr(module.os, "preadv", lambda *args: some(fill, *args))
    pieces = [memoryview(bytes(range(100))), view(1), memoryview(bytes(range(100, 200)))]
    assert read_back(pool.write(pieces), 100, 1, 100) == [bytes(piece) for piece in pieces]
    assert len(calls) > 20


@pytest.mark.covers("SV-5")
def test_segments_are_private(pool):
    segment = pool.write([view(1)])
    assert stat.S_IMODE((SHM / segment.name).stat().st_mode) == 0o600


def test_a_released_segment_is_used_again_and_a_discarded_one_is_not(pool):
    first = pool.write([view(100)])
    pool.release(first)
    assert pool.write([view(50)]) is first
    pool.discard(first)
    assert segments(PREFIX) == []
    assert pool.write([view(50)]).name != first.name
    assert pool.num_used == 1


def test_the_segment_that_fits_is_taken_and_none_is_taken_twice(pool):
    large, small = pool.write([view(5000)]), pool.write([view(10)])
    pool.release(large)
    pool.release(small)
    assert [pool.write([view(8)]), pool.write([view(8)])] == [small, large]
    assert pool.write([view(8)]) not in (small, large)


def test_what_is_kept_is_bounded(pool):
    written = [pool.write([view(4000)]) for _ in range(5)]
    assert len(segments(PREFIX)) == 5
    for segment in written:
        pool.release(segment)
    assert len(segments(PREFIX)) == 2


def test_a_reader_that_is_in_time_finishes_and_a_late_one_finds_nothing(pool):
    segment = pool.write([view(3, 7)])
    with open(SHM / segment.name, "rb") as reader:
        pool.discard(segment)
        assert reader.read() == b"\7\7\7"
    with pytest.raises(FileNotFoundError):
        read_back(segment, 3)
    assert size_of(SHM, segment.name) == 0


@pytest.mark.covers("SV-5")
@pytest.mark.parametrize("name", ["other.0", PREFIX + "../passwd", "/etc/passwd", ""])
def test_only_segments_of_the_run_are_read(name):
    with pytest.raises(ValueError, match="not a segment of this run"):
        read(SHM, PREFIX, name, [view(1)])


@pytest.mark.covers("SV-5")
def test_a_link_is_not_followed(pool, tmp_path):
    (tmp_path / "secret").write_text("secret")
    link = SHM / f"{PREFIX}link"
    link.symlink_to(tmp_path / "secret")
    try:
        with pytest.raises(OSError, match="symbolic"):
            read(SHM, PREFIX, link.name, [view(6)])
    finally:
        link.unlink()


def test_a_short_segment_is_an_error(pool):
    segment = pool.write([view(3)])
    with pytest.raises(ValueError, match="shorter"):
        read_back(segment, 4)


@pytest.mark.parametrize("where", ["open", "pwritev"])
def test_no_room_is_told_and_leaves_nothing(pool, monkeypatch, where):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, where, fail)
    assert pool.write([view(3)]) is None
    assert pool.num_used == 0 and segments(PREFIX) == []


def test_other_errors_are_not_taken_for_it(pool, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "pwritev", fail)
    with pytest.raises(OSError, match="Input/output"):
        pool.write([view(3)])
    assert segments(PREFIX) == []


def test_sweeping_takes_what_begins_so(pool):
    pool.write([view(3)])
    other = SegmentPool(SHM, "x" + PREFIX, keep=0)
    kept = other.write([view(3)])
    assert sweep(SHM, PREFIX) == 1
    assert segments(PREFIX) == [] and segments("x" + PREFIX) == [kept.name]
    other.close()


@pytest.fixture
def temp(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.covers("SV-5")
def test_an_owner_leaves_nothing(temp):
    owner = RoadOwner(["a", "a-b"])
    (folder,) = temp.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and owner.map.folder == str(folder)
    assert owner.map.addresses == {"a": f"ipc://{folder}/a", "a-b": f"ipc://{folder}/a-b"}
    for stage in ("a", "a-b"):
        pool = SegmentPool(SHM, owner.map.prefix(stage), keep=0)
        pool.write([view(3)])
        pool.write([view(3)])
    assert owner.map.sweep("a") == 2
    assert len(segments(owner.map.prefix())) == 2
    owner.close()
    owner.close()
    assert list(temp.iterdir()) == [] and segments(owner.map.prefix()) == []


def test_runs_whose_every_process_was_killed_are_swept_and_live_ones_are_not(temp):
    alive = RoadOwner(["a"])
    code = "import os; from pathlib import Path\nfrom stagevox.connectors.roadmap import RoadOwner, SHM_FOLDER\n"
    code += "owner = RoadOwner(['a']); (SHM_FOLDER / (owner.map.prefix('a') + 'x.0')).write_bytes(b'123')\n"
    code += "print(owner.map.prefix(), flush=True); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "TMPDIR": str(temp)}
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert dead.returncode == -9
    prefix = dead.stdout.strip()
    assert len(segments(prefix)) == 1 and len(list(temp.iterdir())) == 2
    (temp / "stagevox-another-program").mkdir()
    assert sweep_stale() == 1
    assert segments(prefix) == []
    assert sorted(path.name for path in temp.iterdir()) == sorted(
        ["stagevox-another-program", os.path.basename(alive.map.folder)]
    )
    alive.close()


def test_a_path_too_long_for_a_socket_is_said_at_once(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR: a socket's path may have 107 bytes"):
        RoadOwner(["a"])
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a b"])
def test_names_that_would_not_be_told_apart_are_refused(name):
    with pytest.raises(ConfigError, match="stage: a name has"):
        RoadOwner([name])
