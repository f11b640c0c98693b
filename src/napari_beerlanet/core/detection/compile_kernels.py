"""Compile the kernels in a process of its own, on a machine where that was never done.

numba keeps what it compiles on disk, for all processes. A first decomposition and a first detection
need some ten seconds of compiling; a window does not have to wait for that, nor share Python's lock
with it: `start_compiling` starts the process, and until it ends, NumPy serves (see
`core.common.threads.numpy_until_compiled`). A stamp in the user's cache folder tells the next start
that all is compiled. Only windows call it: batch workers and the command line compile what they
need, as they need it.

The process ends with the one that has started it, however that ends.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.locking import FolderLock, LockedError
from napari_beerlanet.core.common.storage import FileError, write_json
from napari_beerlanet.core.common.threads import set_being_compiled

DISABLED_BY = "NAPARI_BEERLANET_COMPILE"
"""Environment variable: "0" starts no process."""

NOTHING_KEPT = 3
"""Exit code where numba cannot keep what it compiles, as no folder can be written to."""

_MODULE = "napari_beerlanet.core.detection.compile_kernels"
_KERNEL_MODULES = (
    "core/boxes/matching.py",
    "core/detection/compile_kernels.py",
    "core/detection/stain_statistics.py",
    "core/stains/solver/unroll.py",
    "core/stains/solver/converged_kernels.py",
    "core/stains/solver/kernels.py",
    "core/stains/solver/step_kernels.py",
)
_VERSIONS = ("numba", "llvmlite", "numpy", "napari")
_NICENESS = 5  # the window goes first
_LOCK_POLL_S = 0.2
_LOCK_TIMEOUT_S = 300.0  # after which one that holds the lock is taken to be stuck
_process: subprocess.Popen[bytes] | None = None
_start_lock = threading.Lock()


# --- in the process of the window -----------------------------------------------------------------


def start_compiling(also: str = "") -> bool:
    """Compile the kernels in a process, unless that was done; whether one is running.

    `also` names another function that the process calls in the end, "package.module:function".
    """
    global _process
    with _start_lock:
        if _process is not None:
            return _is_running()
        if os.environ.get(DISABLED_BY) == "0" or is_compiled(also):
            return False
        command = [sys.executable, "-m", _MODULE, also]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if sys.platform == "win32":
            flags = subprocess.CREATE_NO_WINDOW | subprocess.BELOW_NORMAL_PRIORITY_CLASS
            quiet["creationflags"] = flags
        try:
            _process = subprocess.Popen(command, stdin=subprocess.PIPE, **quiet)
        except OSError:
            return False
        atexit.register(stop_compiling)
        set_being_compiled(_is_running)
        return True


def stop_compiling() -> None:
    """End the process; what it has compiled is kept."""
    global _process
    with _start_lock:
        process, _process = _process, None
        set_being_compiled(None)
        atexit.unregister(stop_compiling)
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _is_running() -> bool:
    process = _process
    return process is not None and process.poll() is None


def is_compiled(also: str = "") -> bool:
    """Whether all was compiled before: for these sources, by these versions, on this machine."""
    try:
        kept = json.loads(_stamp_path(also).read_text(encoding="utf-8"))["kept"]
        return bool(kept) and all(Path(path).is_file() for path in kept)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _stamp_path(also: str) -> Path:
    """A file by the name of all that numba's files depend on."""
    from platformdirs import user_cache_path

    package = Path(__file__).parents[2]
    facts: list[Any] = [sys.version, platform.node(), str(package), also]
    for name in _KERNEL_MODULES:
        status = (package / name).stat()
        facts.append([name, status.st_mtime_ns, status.st_size])
    for name in _VERSIONS:
        with suppress(PackageNotFoundError):
            facts.append([name, version(name)])
    facts.append(sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_")))
    digest = hashlib.sha256(json.dumps(facts).encode("utf-8", "surrogateescape")).hexdigest()
    return user_cache_path("napari-beerlanet") / "kernels" / f"{digest[:16]}.json"


# --- in the process that compiles -----------------------------------------------------------------


def main(also: str = "") -> int:
    """Compile all, after others that do so, and leave a stamp; returns the exit code.

    It waits for others no longer than they can need: until it ends, NumPy serves.
    """
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    kept = kernel_files()
    if not kept:
        return NOTHING_KEPT
    stamp, lock = _stamp_path(also), None
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while lock is None and time.monotonic() < deadline:
        try:
            lock = FolderLock(stamp.parent / "compiling.lock")
        except LockedError:
            time.sleep(_LOCK_POLL_S)
        except (OSError, FileError):  # no folder for it: then all may compile the same
            break
    try:
        compile_for_decomposition()
        compile_for_detection()
        if also:
            resolve_name(also)()
        compile_the_rest()
        with suppress(OSError, FileError):
            write_json(stamp, {"kept": kept})
    finally:
        if lock is not None:
            lock.release()
    return 0


def kernel_files() -> list[str]:
    """The files in which numba lists what it keeps of the first kernels; [] where it keeps none."""
    from napari_beerlanet.core.boxes import matching
    from napari_beerlanet.core.stains.solver import converged_kernels, kernels, step_kernels

    found = []
    for kernel in (
        converged_kernels.advance,
        kernels.look_up_pixels,
        step_kernels.density_step,
        matching._suppress_in_order,
    ):
        files = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
        if files is None:
            return []
        found.append(str(files._index_path))
    return found


def _pixels() -> npt.NDArray[np.uint8]:
    """An image (48, 64, 3) of two stains on a bright background."""
    random, shape = np.random.default_rng(0), (48, 64)
    spectra = np.array([[0.65, 0.7, 0.29], [0.07, 0.99, 0.11]])
    densities = random.gamma(1.0, 0.3, (*shape, 2)) * (random.random((*shape, 1)) < 0.5)
    light: npt.NDArray[np.float64] = 240 * np.exp(-densities @ spectra)
    return light.round().astype(np.uint8)


def compile_for_decomposition() -> None:
    """What a first decomposition needs, with the number of stains found or given."""
    from napari_beerlanet.core.stains.decompose import decompose

    decompose(_pixels(), iterations="converge")
    decompose(_pixels(), 4, iterations="converge", lam=0.1, gamma=0.01)


def compile_for_detection() -> None:
    """What a first detection needs, but for the network."""
    from napari_beerlanet.core.boxes.matching import match_boxes, non_max_suppression
    from napari_beerlanet.core.detection.stain_statistics import measure_boxes
    from napari_beerlanet.core.images.rgb import to_columns
    from napari_beerlanet.core.stains.palette import (
        decode,
        distinct_rows,
        look_up_rows,
        palette_of,
    )
    from napari_beerlanet.core.stains.solver.kernels import mix_to_rows
    from napari_beerlanet.core.stains.solver.spectra import default_spectra
    from napari_beerlanet.core.stains.solver.unroll import MapChain, unroll

    pixels = _pixels()
    palette_of(pixels.reshape(-1, 3))
    codes, rows = distinct_rows(pixels.reshape(-1, 3))
    X = to_columns(decode(codes, np.uint8), "log")
    w, start = np.ones(len(codes)), default_spectra(3)
    done = unroll(X, w, start, 0.1, 0.01, iterations=2, unit_spectra=True)
    D, mixed = MapChain(done.maps, done.scale)(X), np.empty((len(codes), 3), np.float32)
    constants = np.ones(3), np.ones((3, 3)), np.zeros(3), True, 0.0, 0.0
    mix_to_rows(X, D, *constants, mixed, np.empty((3, len(codes))))
    table = np.ascontiguousarray(D.T, dtype=np.float32)
    look_up_rows(rows, table)
    place = rows.reshape(pixels.shape[:2])
    boxes = np.array([[1, 1, 20, 20], [2, 2, 21, 21]], np.float32)
    measure_boxes(lambda y, x: (place[y, x], table), pixels.shape[:2], 3, boxes)
    non_max_suppression(boxes, np.array([0.9, 0.8], np.float32), np.zeros(2, np.int64), 0.5)
    match_boxes(boxes, boxes, 0.5)


def compile_the_rest() -> None:
    """What is needed soon after: K steps, fixed spectra, and pixels that are not of 8 bits."""
    from napari_beerlanet.core.stains.decompose import decompose
    from napari_beerlanet.core.stains.solver.spectra import default_spectra

    decompose(_pixels(), 3, iterations=3)
    decompose(_pixels(), spectra=default_spectra(3), fixed_spectra=True)
    decompose(_pixels() / 255, 3, iterations="converge", lam=0.1, gamma=0.01)


def _end_with_parent() -> None:
    """Its end of the pipe is closed when it ends, whatever ends it."""
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(*sys.argv[1:2]))
