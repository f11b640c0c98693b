"""Files on disk: hashes of pixels, writes that are whole or not at all, YAML."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from napari_beerlanet.core.common import storage
from napari_beerlanet.core.common.messages import error_message
from napari_beerlanet.core.common.storage import (
    FileError,
    atomic_path,
    pixel_digest,
    pixel_hash,
    read_yaml,
    staged_folder,
)


def test_an_image_is_known_by_its_content():
    a = np.zeros((4, 5, 3), np.uint8)
    b = a.copy()
    b[0, 0, 0] = 1
    assert pixel_hash(a) == pixel_hash(a.copy())
    assert len({pixel_hash(a), pixel_hash(b), pixel_hash(a.reshape(5, 4, 3))}) == 3


def test_the_hash_does_not_depend_on_how_the_pixels_lie():
    import dask.array as da

    rgb = np.random.default_rng(0).integers(0, 255, (700, 90, 3), dtype=np.uint8)
    assert pixel_hash(rgb) == pixel_hash(np.asfortranarray(rgb))
    assert pixel_hash(rgb) == pixel_hash(da.from_array(rgb, chunks=(100, 90, 3)))
    assert pixel_digest(rgb) == f"sha256:{pixel_hash(rgb)}"


def test_hashes_are_those_of_files_written_before():
    rgb = np.arange(300 * 4 * 3, dtype=np.uint16).reshape(300, 4, 3)
    expected = "3205cdee6cfdfe381958c93766921b9c03f616861cbdbd94e86dcaf001f76577"
    assert pixel_hash(rgb) == expected


# --- what a kill leaves --------------------------------------------------------------------------

WRITERS = {
    "file": (
        "with storage.atomic_path(place / 'a.bin') as unfinished:\n"
        "    unfinished.write_bytes(b'half')\n"
        "    wait()\n"
    ),
    "folder": (
        "with storage.atomic_path(place / 'a.zarr') as unfinished:\n"
        "    (unfinished / 'c').mkdir(parents=True)\n"
        "    (unfinished / 'c' / '0').write_bytes(b'half')\n"
        "    wait()\n"
    ),
    "files": (
        "with storage.staged_folder(place) as stage:\n"
        "    (stage / 'a.bin').write_bytes(b'half')\n"
        "    wait()\n"
    ),
}


def start_writer(place, kind):
    """A process that has written half of something, and waits."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from napari_beerlanet.core.common import storage\n"
        "place = Path(sys.argv[1])\n"
        "def wait():\n    print('half', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script + WRITERS[kind], str(place)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "half\n"
    return writer


def write_file(place):
    with atomic_path(place / "b.txt") as unfinished:
        unfinished.write_text("b")


def write_folder(place):
    with staged_folder(place) as stage:
        (stage / "b.txt").write_text("b")


@pytest.mark.parametrize("write", [write_file, write_folder])
@pytest.mark.parametrize("kind", WRITERS)
def test_the_next_write_clears_what_a_kill_has_left_and_nothing_of_the_living(
    tmp_path, kind, write
):
    (tmp_path / ".mine.partial").write_text("of somebody else")
    living, dying = start_writer(tmp_path, kind), start_writer(tmp_path, kind)
    with living, dying:
        write(tmp_path)
        assert len(list(tmp_path.glob(".*.partial*"))) == 3, "all live"
        dying.send_signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
        dying.wait()
        write(tmp_path)
        left = {path.name for path in tmp_path.iterdir()} - {"b.txt", ".mine.partial"}
        assert len(left) == 1, "of the writer that lives"
        living.communicate("")
    assert living.returncode == 0
    names = {path.name for path in tmp_path.iterdir()} - {"a.bin", "a.zarr"}
    assert names == {"b.txt", ".mine.partial"}
    assert (tmp_path / "a.zarr/c/0" if kind == "folder" else tmp_path / "a.bin").exists()


def test_writes_of_one_process_at_the_same_time_leave_each_other_alone(tmp_path):
    with atomic_path(tmp_path / "a.bin") as one:
        one.write_bytes(b"a")
        write_file(tmp_path)
        write_folder(tmp_path)
        assert one.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "b.txt"}


def test_what_another_computer_writes_is_left_alone(tmp_path, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(storage, "_computer", lambda: "0" * 8)
        elsewhere.setattr(os, "getpid", lambda: 2**22 + 1)  # no process of this one
        name = storage._partial_name(".bin")
    (tmp_path / name).touch()
    write_file(tmp_path)
    assert (tmp_path / name).exists()


def test_what_a_process_of_the_same_number_has_left_before_is_cleared(tmp_path, monkeypatch):
    """As after a restart of the computer."""
    monkeypatch.setattr(storage, "_PROCESS", "0" * 8)
    (tmp_path / storage._partial_name(".bin")).touch()
    monkeypatch.undo()
    write_file(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"b.txt"}


@pytest.mark.parametrize(
    "text",
    ["names: [!!bool maybe]", "names: !!timestamp x", "names: !!set {a, b}", "!!merge x: 1"],
)
def test_a_yaml_file_with_a_type_of_its_own(tmp_path, text):
    (path := tmp_path / "data.yaml").write_text(text)
    with pytest.raises(FileError, match=r"data\.yaml: a tag \(!!\w+\), which is not read; write"):
        read_yaml(path)
    path.write_text("names: [!!str 5, ! b, 'c']")
    assert read_yaml(path) == {"names": ["5", "b", "c"]}


@pytest.mark.parametrize("writing", [atomic_path, staged_folder])
def test_a_full_disk_is_told_with_the_place(tmp_path, writing):
    """What writes to an open file says no name."""

    def fill(place):
        with writing(place):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as full:
        fill(tmp_path / "results")
    assert error_message(full.value) == f"{tmp_path / 'results'}: no space left on device."
