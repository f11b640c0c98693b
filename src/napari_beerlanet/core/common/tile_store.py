"""Results of a slide's tiles in an SQLite file that grows tile by tile and survives a kill.

Every tile is a transaction: after a kill or a full disk at any moment, all tiles that were added
are there. Needs no torch: a viewer looks for such files when an image is chosen.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import sqlite3
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.locking import try_lock
from napari_beerlanet.core.common.messages import error_detail, system_reason
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.rectangle import Focus, pop_nearest
from napari_beerlanet.core.common.storage import FileError, regular_file

SUFFIX = ".tiles"
"""What the name of such a file ends in."""

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[Any]]

_APPLICATION_ID, _VERSION = 0x424C4E54, 3  # "BLNT"
_TABLES = {
    "run": "CREATE TABLE run (header TEXT, arrays BLOB, checksum INTEGER)",
    "tile": "CREATE TABLE tile (number INTEGER PRIMARY KEY, boxes BLOB, checksum INTEGER)",
}
_SCHEMA = f"""
    PRAGMA application_id = {_APPLICATION_ID};
    PRAGMA user_version = {_VERSION};
    {";".join(_TABLES.values())};
"""
_FILES = ("", "-wal", "-shm", "-journal")  # endings of those that make up a database
_NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")  # at the end of a journal
_BUSY_TIMEOUT_S = 5.0
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_IDENTITY_WORDS = {
    "model": "the model",
    "source": "the image file",
    "shape": "the image size",
    "object_size": "the cell size",
    "tile": "the tile size",
    "pixel_size": "the pixel size",
    "iou": "the overlap",
    "patch": "the patch size",
    "step": "the distance of patches",
    "fit": "where stains are fitted",
    "min_tissue": "the least share of tissue",
}


def tile_store_path(source: Path, suffix: str = SUFFIX) -> Path:
    """Where a slide's tiles are stored: beside it, or in the user's cache if that is read-only.

    A file that is there already is resumed, wherever it is. What is found in other ways has a
    suffix of its own.
    """
    from platformdirs import user_cache_path

    beside = source.with_name(source.name + suffix)
    digest = hashlib.sha256(os.path.abspath(source).encode("utf-8", "surrogateescape"))
    cache = user_cache_path("napari-beerlanet") / "tiles"
    cached = cache / f"{source.name}-{digest.hexdigest()[:12]}{suffix}"
    if beside.exists() or cached.exists():
        return beside if beside.exists() else cached
    if os.access(source.parent, os.W_OK):
        return beside
    with suppress(OSError):  # whoever writes to it is told
        cache.mkdir(parents=True, exist_ok=True)
    return cached


def read_summary(path: Path) -> tuple[dict[str, Any], int] | None:
    """Return the header of a file and how many tiles are in it, None where there is no such file.

    A file that cannot be read just now, as another program has locked it or its drive fails, is a
    `FileError`. May be called while another process, or another thread of this one, adds tiles.
    """
    if not path.is_file():
        return None
    with suppress(_DamagedError), _sqlite_errors(path), closing(_connect(path, True)) as connection:
        header = _read_header(connection)
        (count,) = connection.execute("SELECT count(*) FROM tile").fetchone()
        return header, count
    return None


def remove_tiles(path: Path) -> None:
    """Remove a file of tiles, so that all are done again; unless a search writes to it."""
    if path.exists():
        lock = _acquire(path)
        _unlink(path)
        _release(path, lock)


def describe_changes(path: Path, identity: Mapping[str, Any]) -> list[str]:
    """In what the run that a file is of differs from one of this identity, in words."""
    summary = read_summary(path)
    before = summary[0].get("identity") if summary else None
    if not isinstance(before, dict):
        return []
    now = _as_json(identity)
    return [word for key, word in _IDENTITY_WORDS.items() if before.get(key) != now.get(key)]


class TileStore(Generic[T]):
    """Results by tile, in memory and in a file that is open for adding.

    `header` (plain JSON values, with the `identity` of the run) and `arrays` are written once. A
    subclass says how the result of a tile is stored. Where the file cannot be written to, results
    are in memory alone. `notes` are sentences on that, and on a damaged file that was in the way.
    """

    def __init__(self, path: Path, header: dict[str, Any], arrays: Arrays) -> None:
        """In memory alone; see `create` and `resume`."""
        self.path, self.header, self.arrays = path, header, arrays
        self.tiles: dict[int, T] = {}
        self.notes: list[str] = []
        self._connection: sqlite3.Connection | None = None
        self._lock: IO[bytes] | None = None

    @staticmethod
    def pack(result: T) -> bytes:
        """The result of a tile as it is stored."""
        raise NotImplementedError

    @staticmethod
    def unpack(stored: bytes) -> T:
        """The inverse of `pack`."""
        raise NotImplementedError

    @classmethod
    def resume_or_explain(
        cls, path: Path | None, identity: Mapping[str, Any]
    ) -> tuple[Self | None, list[str]]:
        """The file of this identity, or in what the one that is there differs, in words."""
        earlier = None if path is None else cls.resume(path, identity)
        if path is None or earlier is not None:
            return earlier, []
        return None, describe_changes(path, identity)

    @classmethod
    def create_or_hold(cls, path: Path | None, header: Mapping[str, Any], arrays: Arrays) -> Self:
        """Start a file, or keep results in memory alone where there is none to be, or can be."""
        held = cls(Path(), dict(header), arrays)
        if path is None:
            return held
        try:
            return cls.create(path, header, arrays)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            held.notes.append(_unsaved_message(path, error))
            return held

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], arrays: Arrays) -> Self:
        """Start a file; another run's that is there is replaced, unless a search writes to it.

        A damaged one is renamed.
        """
        store = cls(path, _as_json(header), arrays)
        store._lock = _acquire(path)
        try:
            store.notes += _make_way(path, store.header.get("identity"))
            with _sqlite_errors(path):
                with closing(_connect(path)) as connection:
                    _initialise(connection, store.header, arrays)
                store._open()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def resume(cls, path: Path, identity: Mapping[str, Any]) -> Self | None:
        """Resume a file of this identity; None where there is none, or it is damaged.

        One that cannot be read just now is a `FileError`.
        """
        with suppress(_DamagedError):
            _roll_back(path)
        summary = read_summary(path)
        if summary is None or summary[0].get("identity") != _as_json(identity):
            return None
        store = cls(path, {}, {})
        try:
            store._lock = _acquire(path)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            store.notes.append(_unsaved_message(path, error))
        try:
            with _sqlite_errors(path):
                store._load()
                if store._lock is not None:
                    store._open()
        except _DamagedError:
            store.close()
            return None
        except BaseException:
            store.close()
            raise
        return store

    def add(self, tile: int, result: T) -> None:
        """Write the result of a tile; when this returns, a kill does not lose it."""
        if self._connection is not None:
            with _sqlite_errors(self.path), self._connection:
                _insert(self._connection, tile, self.pack(result))
        self.tiles[tile] = result

    def close(self) -> None:
        """To the disk; the file is then complete by itself."""
        if self._connection is not None:
            with suppress(sqlite3.OperationalError):  # a reader is looking at it: next time
                self._connection.execute("PRAGMA journal_mode = DELETE")
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            _release(self.path, self._lock)
            self._lock = None

    def _load(self) -> None:
        """Read the file; a `sqlite3.DatabaseError` where it is damaged."""
        with closing(_connect(self.path, read_only=True)) as connection:
            self.header = _read_header(connection)
            (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            (arrays, checksum) = connection.execute("SELECT arrays, checksum FROM run").fetchone()
            if not _is_whole(arrays, checksum):
                raise sqlite3.DatabaseError("its checksum differs")
            self.arrays = _unpack_arrays(arrays)
            for number, boxes, checksum in connection.execute("SELECT * FROM tile"):
                if _is_whole(boxes, checksum):  # else bits have flipped: it is done again
                    try:
                        self.tiles[number] = self.unpack(boxes)
                    except ValueError as error:  # nothing that was packed
                        raise sqlite3.DatabaseError(f"tile {number} is damaged") from error

    def _open(self) -> None:
        """Open the file for adding."""
        self._connection = _connect(self.path)
        # Readers and the writer do not wait for each other; where a network drive cannot do
        # that, SQLite keeps to its other journal.
        with suppress(sqlite3.OperationalError):
            self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")


class TileRun(Generic[T]):
    """A run over the tiles of a slide: in any order, resumed from the file of its `store`.

    A subclass sets `_store`, names the `tiles` to run and where they are (`_centres`), and says how
    some of them are read (`_read_tiles`, a few ahead in a thread of its own) and worked on
    (`_infer`). `changed` lists in words in what a file of another run, which is replaced, differs.
    """

    _store: TileStore[T]
    changed: list[str]

    @property
    def tiles(self) -> list[int]:
        """Numbers of the tiles to run."""
        raise NotImplementedError

    def _centres(self) -> npt.NDArray[np.float64]:
        """(n, 2): y and x of the middle of each tile, also of those that are not run."""
        raise NotImplementedError

    def _read_tiles(self, numbers: list[int]) -> Any:
        """The pixels of some tiles."""
        raise NotImplementedError

    def _infer(self, pixels: Any, numbers: list[int]) -> Sequence[T]:
        """What is found in these tiles."""
        raise NotImplementedError

    @property
    def resumed(self) -> int:
        """How many tiles are done; before the run, how many an earlier one had done."""
        return len(self._store.tiles)

    def count_done(self, tiles: Iterable[int]) -> int:
        """How many of these tiles are done."""
        return sum(k in self._store.tiles for k in tiles)

    @property
    def finished(self) -> bool:
        """Whether every tile is done."""
        return self.count_done(self.tiles) == len(self.tiles)

    def _run_tiles(
        self,
        focus: Focus,
        order: Sequence[int] | None,
        count: int,
        doing: str,
        report: Report | None,
    ) -> Generator[tuple[int, T, int, int]]:
        """Run the tiles that are not done: nearest to `focus` (y, x) first, or those in `order`.

        `count` at a time; a `focus` that is a function is called again before each batch. Yields
        the number of a tile, its result, which is stored, and how many of how many are done.
        """
        wanted = list(self.tiles if order is None else order)
        left = [k for k in wanted if k not in self._store.tiles]
        total, done = len(wanted), len(wanted) - len(left)
        centres = self._centres()
        with ThreadPoolExecutor(1, "beerlanet-tiles") as reader:
            numbers = pop_nearest(centres, left, focus, count)
            reading = reader.submit(self._read_tiles, numbers)
            while numbers:
                report_progress(report, done, total, doing)
                pixels = reading.result()
                next_numbers = pop_nearest(centres, left, focus, count)
                reading = reader.submit(self._read_tiles, next_numbers)
                for number, result in zip(numbers, self._infer(pixels, numbers), strict=True):
                    self._store.add(number, result)
                    done += 1
                    yield number, result, done, total
                numbers = next_numbers
        report_progress(report, 1, 1, doing)

    def close(self) -> None:
        """Close the results file; what is in it stays."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()


def _connect(path: Path, read_only: bool = False) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)


def _roll_back(path: Path) -> None:
    """Undo what a kill has left half-written, where SQLite kept a journal of it.

    Not where the journal names another one, which SQLite would delete: ours never do.
    """
    journal = Path(f"{path}-journal")
    if path.is_file() and journal.is_file() and not journal.is_symlink():
        with journal.open("rb") as file:
            file.seek(max(journal.stat().st_size - len(_NAMES_ANOTHER), 0))
            names_another = file.read() == _NAMES_ANOTHER
        if not names_another:
            with _sqlite_errors(path), closing(_connect(path)) as connection:
                connection.execute("PRAGMA schema_version").fetchone()


def _read_header(connection: sqlite3.Connection) -> dict[str, Any]:
    """The header; `sqlite3.DatabaseError` where it is another database, or not of this version."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    row = None
    # Views, triggers and computed columns are programs, and may take for ever.
    found = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    ours = sorted(found) == [("table", name, sql) for name, sql in _TABLES.items()]
    if ours and (application, version) == (_APPLICATION_ID, _VERSION):
        row = connection.execute("SELECT header FROM run").fetchone()
    header = None
    with suppress(ValueError, RecursionError):
        header = json.loads(row[0]) if row and isinstance(row[0], str) else None
    if not isinstance(header, dict):
        raise sqlite3.DatabaseError("not a file of tiles")
    return header


def _make_way(path: Path, identity: Any) -> list[str]:
    """Remove another run's file, rename one that is damaged; what is to be said of it."""
    summary = read_summary(path)
    if not os.path.lexists(path) or (summary and summary[0].get("identity") != identity):
        _unlink(path)
        return []
    numbers = itertools.chain([""], itertools.count(2))
    names = (path.with_name(f"{path.name}.damaged{number}") for number in numbers)
    aside = next(name for name in names if not os.path.lexists(name))
    for ending in _FILES:
        with suppress(FileNotFoundError):
            os.replace(f"{path}{ending}", f"{aside}{ending}")
    return [f"{path}: damaged, so it was renamed to {aside.name}, and the search started anew."]


def _unlink(path: Path) -> None:
    for ending in _FILES:
        Path(f"{path}{ending}").unlink(missing_ok=True)


def _initialise(connection: sqlite3.Connection, header: dict[str, Any], arrays: Arrays) -> None:
    """Schema, header and arrays, all or nothing."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    connection.executescript(f"BEGIN; {_SCHEMA}")
    row = (json.dumps(header), buffer.getvalue(), zlib.crc32(buffer.getbuffer()))
    connection.execute("INSERT INTO run VALUES (?, ?, ?)", row)
    connection.commit()


def _insert(connection: sqlite3.Connection, tile: int, stored: bytes) -> None:
    row = (tile, stored, zlib.crc32(stored))
    connection.execute("INSERT OR REPLACE INTO tile VALUES (?, ?, ?)", row)


def _is_whole(stored: Any, checksum: Any) -> bool:
    return isinstance(stored, bytes) and zlib.crc32(stored) == checksum


def _unpack_arrays(stored: bytes) -> Arrays:
    """The arrays as `_initialise` has packed them, or a `sqlite3.DatabaseError`."""
    try:
        with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
            # Stored as they are: what is compressed may fill all memory.
            if sum(part.file_size for part in arrays.zip.infolist()) > len(stored):
                raise ValueError("its arrays are larger than the file")
            return dict(arrays)
    except Exception as error:  # whatever damaged data raise
        raise sqlite3.DatabaseError(f"its arrays are damaged ({error_detail(error)})") from error


class _DamagedError(FileError):
    """A file is no database, or not one of ours."""


@contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    """SQLite's errors as those of a file, a `_DamagedError` where it can never be read."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise FileError(
                f"{path}: another program has it locked; close that program, or wait until it is "
                "done."
            ) from error
        damaged = not isinstance(error, sqlite3.OperationalError) or name == "SQLITE_ERROR"
        kind = _DamagedError if damaged else FileError
        reason = str(error).rstrip(".")
        raise kind(
            f"{path}: {reason}; look after the drive, or move the file away to search anew."
        ) from error


def _lock_path(path: Path) -> Path:
    # A file of its own: SQLite has locks of its own on the database.
    return path.with_name(f"{path.name}.lock")


def _acquire(path: Path) -> IO[bytes]:
    lock = regular_file(_lock_path(path)).open("ab")
    if try_lock(lock) == "taken":
        lock.close()
        raise FileError(
            f"{path}: another search writes to it; stop that one, or wait until it is done."
        )
    return lock


def _unsaved_message(path: Path, error: OSError) -> str:
    return (
        f"{path.parent} cannot be written to ({system_reason(error)}), so what is found is not "
        "saved there: a search that is stopped starts over."
    )


def _release(path: Path, lock: IO[bytes]) -> None:
    if os.name == "nt":  # an open file cannot be removed there
        lock.close()
    with suppress(OSError):
        _lock_path(path).unlink()
    lock.close()


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain
