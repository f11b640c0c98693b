"""Files of a slide's tiles: nothing is lost by a kill, a full disk or a lock."""

import errno
import io
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import zipfile
import zlib
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from napari_beerlanet.core.boxes.detections import DetectionTiles, RawDetections
from napari_beerlanet.core.common import tile_store
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.common.tile_store import (
    describe_changes,
    read_summary,
    tile_store_path,
)

HEADER = {"identity": {"a": 1, "iou": 0.7}, "name": "tiny", "wanted": 9}
TWO = RawDetections(
    np.arange(8, dtype=np.float32).reshape(2, 4), np.array([0, 1]), np.array([0.5, 1], np.float32)
)
NONE = TWO[:0]


def made(path, tiles=(3, 0)):
    store = DetectionTiles.create(path, HEADER, {"x": np.ones(3), "word": np.array("log")})
    for k in tiles:
        store.add(k, TWO if k else NONE)
    return store


def check(store, tiles):
    assert set(store.tiles) == set(tiles)
    assert store.header["name"] == "tiny"
    assert str(store.arrays["word"]) == "log"
    for k in tiles:
        right = TWO if k else NONE
        np.testing.assert_array_equal(store.tiles[k].xyxy, right.xyxy)
        np.testing.assert_array_equal(store.tiles[k].labels, right.labels)
        np.testing.assert_array_equal(store.tiles[k].scores, right.scores)


def test_what_was_added_comes_back(tmp_path):
    path = tmp_path / "ünï 100% #?.tiles"
    made(path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name], "one file, complete by itself"
    assert read_summary(path)[1] == 2
    with closing(DetectionTiles.resume(path, HEADER["identity"])) as store:
        check(store, [0, 3])
        store.add(5, TWO)
    with closing(DetectionTiles.resume(path, HEADER["identity"])) as store:
        check(store, [0, 3, 5])


def test_another_identity_is_not_resumed(tmp_path):
    path = tmp_path / "a.tiles"
    made(path).close()
    other = {"a": 1, "iou": 0.5}
    assert DetectionTiles.resume(path, other) is None
    assert describe_changes(path, other) == ["the overlap"]
    assert describe_changes(path, HEADER["identity"]) == []
    assert DetectionTiles.resume(tmp_path / "none", other) is None


@pytest.mark.parametrize("content", [b"", b"words\n", b"{}\n", b'{"kind": 1}', b"\0" * 5000])
def test_other_files_are_not_resumed(tmp_path, content):
    path = tmp_path / "a.tiles"
    path.write_bytes(content)
    assert read_summary(path) is None
    assert DetectionTiles.resume(path, HEADER["identity"]) is None
    with closing(made(path)) as store:
        check(store, [0, 3])


def test_another_database_is_not_resumed(tmp_path):
    path = tmp_path / "a.tiles"
    with closing(sqlite3.connect(path)) as other:
        other.executescript("CREATE TABLE run (header); INSERT INTO run VALUES ('{}');")
    assert read_summary(path) is None
    assert DetectionTiles.resume(path, HEADER["identity"]) is None


def test_the_summary_is_read_while_tiles_are_added(tmp_path):
    path = tmp_path / "a.tiles"
    with closing(made(path)) as store:
        assert read_summary(path) == (HEADER, 2)
        code = (
            "import sys; from pathlib import Path; from napari_beerlanet.core.common.tile_store "
            "import read_summary; print(read_summary(Path(sys.argv[1]))[1])"
        )
        ran = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True)
        assert ran.stdout.strip() == b"2"
        store.add(7, TWO)
        assert read_summary(path) == (HEADER, 3)


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "a.tiles"
    with closing(made(path)):
        for attempt in (
            lambda: DetectionTiles.resume(path, HEADER["identity"]),
            lambda: made(path),
        ):
            with pytest.raises(FileError, match=r"a\.tiles: another search writes to it"):
                attempt()
    with closing(DetectionTiles.resume(path, HEADER["identity"])) as store:
        check(store, [0, 3])


def test_a_full_disk_loses_nothing_that_was_written(tmp_path):
    path = tmp_path / "a.tiles"
    store = made(path)
    store._connection.execute("PRAGMA max_page_count = 1")  # no more pages than there are
    many = TWO[np.zeros(10_000, int)]
    with pytest.raises(OSError, match="No space") as caught:
        store.add(4, many)
    assert caught.value.errno == errno.ENOSPC
    store.close()
    with closing(DetectionTiles.resume(path, HEADER["identity"])) as again:
        check(again, [0, 3])


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
@pytest.mark.parametrize("moment", range(4))
def test_a_kill_loses_no_tile_that_was_added(tmp_path, moment):
    path = tmp_path / "a.tiles"
    code = """
import sys
from pathlib import Path
import numpy as np
from napari_beerlanet.core.boxes.detections import DetectionTiles, RawDetections
two = RawDetections(np.arange(8, dtype=np.float32).reshape(2, 4), np.array([0, 1]),
                    np.array([0.5, 1], np.float32))
header = {"identity": {"a": 1, "iou": 0.7}, "name": "tiny", "wanted": 9}
store = DetectionTiles.create(Path(sys.argv[1]), header, {"word": np.array("log")})
for k in range(1, 10**6):
    store.add(k, two)
    print(k, flush=True)
"""
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for _ in range(1 + 13 * moment):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    reported = max([1 + 13 * moment, *map(int, rest)])
    assert read_summary(path)[1] >= reported
    with closing(DetectionTiles.resume(path, HEADER["identity"])) as store:
        assert len(store.tiles) in (reported, reported + 1)
        check(store, range(1, len(store.tiles) + 1))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@contextmanager
def locked(path):
    """As by a program that copies or repairs databases."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def unreadable(path):
    """As on a drive that fails just now."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_READ"
    with patch.object(tile_store, "_connect", side_effect=error):
        yield


@pytest.mark.parametrize(
    ("hindered", "words"),
    [(locked, "another program .* close that program"), (unreadable, "disk I/O error")],
)
@pytest.mark.parametrize("kept", [HEADER["identity"], {"a": 2}])
def test_a_file_that_cannot_be_read_just_now_is_left_as_it_is(
    tmp_path, monkeypatch, hindered, words, kept
):
    monkeypatch.setattr(tile_store, "_BUSY_TIMEOUT_S", 0.01, raising=False)
    path = tmp_path / "a.tiles"
    made(path).close()
    with hindered(path):
        for attempt in (
            lambda: read_summary(path),
            lambda: DetectionTiles.resume_or_explain(path, kept),
            lambda: made(path),
        ):
            with pytest.raises(FileError, match=rf"a\.tiles: .*{words}"):
                attempt()
    with closing(DetectionTiles.resume(path, HEADER["identity"])) as store:
        check(store, [0, 3])


def test_a_lock_that_comes_while_a_file_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(tile_store, "_BUSY_TIMEOUT_S", 0.01, raising=False)
    path, load = tmp_path / "a.tiles", DetectionTiles._load
    made(path).close()

    def late(self):
        with locked(path):
            load(self)

    with monkeypatch.context() as patched:
        patched.setattr(DetectionTiles, "_load", late)
        with pytest.raises(FileError, match="another program"):
            DetectionTiles.resume(path, HEADER["identity"])
    with closing(DetectionTiles.resume(path, HEADER["identity"])) as store:
        check(store, [0, 3])


def test_a_damaged_file_is_kept_under_another_name(tmp_path):
    path = tmp_path / "a.tiles"
    for k in range(2):
        path.unlink(missing_ok=True)
        made(path).close()
        damaged = path.read_bytes()[:-3000] + bytes([k])
        path.write_bytes(damaged)
        assert DetectionTiles.resume(path, HEADER["identity"]) is None
        with closing(made(path, [k])) as store:
            check(store, [k])
            (note,) = store.notes
        (kept,) = (p for p in tmp_path.iterdir() if p.read_bytes() == damaged)
        assert kept.name in note
        assert "damaged" in note
    with closing(DetectionTiles.create(path, {"identity": {"a": 2}}, {})) as store:
        assert not store.notes
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["a.tiles", "a.tiles.damaged", "a.tiles.damaged2"], "another run's is replaced"


def killed_while_writing(path, killed):
    """A copy of a file and its journal in the middle of a transaction."""
    made(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.executescript("PRAGMA cache_size = 1; BEGIN")
        writer.execute("UPDATE run SET header = 'x'")
        writer.executemany("INSERT INTO tile VALUES (?, ?, 0)", [(k, b"2" * 9999) for k in (4, 5)])
        for ending in ("", "-journal"):
            shutil.copy(f"{path}{ending}", f"{killed}{ending}")


def test_what_a_kill_left_half_written_is_undone(tmp_path):
    """Where a network drive has no write-ahead log, there is a journal to roll back."""
    killed = tmp_path / "b.tiles"
    killed_while_writing(tmp_path / "a.tiles", killed)
    with closing(DetectionTiles.resume(killed, HEADER["identity"])) as store:
        check(store, [0, 3])


def test_a_journal_does_not_have_other_files_deleted(tmp_path):
    """SQLite deletes the file that a journal names as that of a transaction over many databases."""
    killed, other = tmp_path / "b.tiles", tmp_path / "thesis.txt"
    killed_while_writing(tmp_path / "a.tiles", killed)
    other.write_text("two years of work")
    name, journal = str(other).encode(), Path(f"{killed}-journal")
    lock_page = (1 << 30) // 4096 + 1
    tail = struct.pack(">II", len(name), sum(name)) + bytes.fromhex("d9d505f920a163d7")
    journal.write_bytes(journal.read_bytes() + struct.pack(">I", lock_page) + name + tail)
    for attempt in (
        lambda: read_summary(killed),
        lambda: DetectionTiles.resume(killed, HEADER["identity"]),
    ):
        with pytest.raises(FileError, match=r"b\.tiles"):
            attempt()
    assert other.exists()
    assert killed.exists()


def test_where_tiles_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache")
    slide = tmp_path / "a.svs"
    assert tile_store_path(slide) == tmp_path / "a.svs.tiles"
    monkeypatch.setattr(tile_store.os, "access", lambda *given: False)
    cached = tile_store_path(slide)
    assert cached.parent == tmp_path / "cache" / "tiles"
    assert cached != tile_store_path(tmp_path / "b" / "a.svs"), "another slide of that name"
    cached.touch()
    monkeypatch.undo()
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache")
    assert tile_store_path(slide) == cached


def test_looking_for_earlier_results_does_not_load_torch():
    """A viewer looks when an image is chosen, while another thread may be loading the model."""
    code = "import sys, napari_beerlanet.core.common.tile_store as f; f.read_summary(f.Path('a')); "
    code += "print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_database_that_is_a_program_is_not_resumed(tmp_path):
    """A view in place of a table may have no end: nothing is read from it."""
    path = tmp_path / "a.tiles"
    DetectionTiles.create(path, {"identity": {"a": 1}}, {}).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "DROP TABLE tile; CREATE VIEW tile AS SELECT 1 AS number, x'' AS boxes, 0 AS checksum"
        )
    assert read_summary(path) is None
    assert DetectionTiles.resume(path, {"a": 1}) is None


@pytest.mark.parametrize("header", ["[" * 100_000, 5, b"x", None])
def test_a_header_that_is_none(tmp_path, header):
    path = tmp_path / "a.tiles"
    DetectionTiles.create(path, {"identity": {"a": 1}}, {}).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE run SET header = ?", (header,))
    assert read_summary(path) is None
    assert DetectionTiles.resume(path, {"a": 1}) is None


def packed(compression=zipfile.ZIP_STORED, numbers=10):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive, archive.open("x.npy", "w") as file:
        np.lib.format.write_array(file, np.zeros(numbers))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "arrays", [packed(zipfile.ZIP_DEFLATED, 100_000), packed()[:-30], b"x", "x", None]
)
def test_arrays_that_are_none_or_grow(tmp_path, arrays):
    """Compressed ones, which we do not write, could fill the memory."""
    path = tmp_path / "a.tiles"
    DetectionTiles.create(path, {"identity": {"a": 1}}, {}).close()
    checksum = zlib.crc32(arrays) if isinstance(arrays, bytes) else 0
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE run SET arrays = ?, checksum = ?", (arrays, checksum))
    assert DetectionTiles.resume(path, {"a": 1}) is None
