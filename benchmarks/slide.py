"""Decompose a synthetic slide of up to a gigapixel, against merely reading and decompressing it.

`python benchmarks/slide.py --gigapixels 0.1 0.3 1` writes the slide once to a cache folder (zarr,
512 × 512 chunks; about 0.6 GB per gigapixel, says so where the disk has no room) and prints, for
each size, the best of some runs in turn: reading every chunk, decomposing, their ratio, and the
peak memory of a process that does nothing but decompose.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import zarr

CHUNK = 512
FIELD = 2048  # side of the fields that the slide is laid out with
BYTES = 3  # of a pixel, at worst


def make_slide(path: Path, gigapixels: float) -> None:
    """Fields of tissue with noise of their own, shifted light, and glass about them."""
    from napari_beerlanet.sample_data import he_field

    side = round((gigapixels * 1e9) ** 0.5 / FIELD) * FIELD or FIELD
    fields = [he_field((FIELD, FIELD), seed=seed).image for seed in range(4)]
    unfinished = path.with_suffix(".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    array = zarr.create_array(
        unfinished, shape=(side, side, 3), chunks=(CHUNK, CHUNK, 3), dtype=np.uint8
    )
    rng = np.random.default_rng(0)
    count = side // FIELD
    for row in range(count):
        for column in range(count):
            top, left = row * FIELD, column * FIELD
            glass = rng.random() < 0.4
            field = np.full((FIELD, FIELD, 3), 243, np.uint8) if glass else rng.choice(fields)
            noise = rng.integers(-2, 3, (FIELD, FIELD, 3), np.int8)
            tile = np.clip(field.astype(np.int16) + noise, 0, 255).astype(np.uint8)
            array[top : top + FIELD, left : left + FIELD] = tile
    unfinished.rename(path)


def read_all(path: Path) -> float:
    """Seconds to read and decompress every chunk, as fast as the decomposition may."""
    from napari_beerlanet.core.lazy import in_threads, parts_of, read

    array = zarr.open_array(path, mode="r")
    begun = time.perf_counter()
    for _ in in_threads(lambda part: read(array, part).shape, parts_of(array)):
        pass
    return time.perf_counter() - begun


def decompose(path: Path, iterations: str) -> tuple[float, int, int]:
    """Seconds, stains, distinct colours."""
    from napari_beerlanet.core.stream import decompose_slide

    steps = iterations if iterations == "converge" else int(iterations)
    array = zarr.open_array(path, mode="r")
    begun = time.perf_counter()
    found = decompose_slide(array, iterations=steps)
    return time.perf_counter() - begun, int(found.fit.active.sum()), len(found.palette)


def peak_memory(path: Path, iterations: str) -> float:
    """Most GB that a process of its own has in memory while it decomposes."""
    code = (
        "import resource, sys, pathlib; sys.path.insert(0, sys.argv[1]); import slide\n"
        "slide.decompose(pathlib.Path(sys.argv[2]), sys.argv[3])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here, str(path), iterations],
        capture_output=True,
        text=True,
        check=True,
    )
    unit = 1 if sys.platform == "darwin" else 1024
    return int(done.stdout.split()[-1]) * unit / 1e9


def slide_of(folder: Path, gigapixels: float) -> Path | None:
    path = folder / f"synthetic-{gigapixels:g}.zarr"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < 1.2 * BYTES * gigapixels * 1e9 + 2e9:
            print(f"{gigapixels:g} gigapixels: {free / 1e9:.0f} GB free in {folder}: too little.")
            return None
        make_slide(path, gigapixels)
    return path


def measure(path: Path, repeats: int, iterations: str) -> dict[str, float]:
    decompose(path, iterations)  # compiles
    reading, working, found = [], [], (0, 0)
    for _ in range(repeats):
        reading.append(read_all(path))
        seconds, *found = decompose(path, iterations)
        working.append(seconds)
    shape = zarr.open_array(path, mode="r").shape
    return {
        "gigapixels": shape[0] * shape[1] / 1e9,
        "read": min(reading),
        "decompose": min(working),
        "ratio": min(working) / min(reading),
        "memory": peak_memory(path, iterations),
        "stains": found[0],
        "colours": found[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigapixels", nargs="+", type=float, default=[0.1, 0.3, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", default="converge", help="a number, or converge (default)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "beerlanet-slide"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    print(
        "| gigapixels | read | decompose | ratio | s per gigapixel "
        "| peak memory | stains | colours |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for gigapixels in options.gigapixels:
        path = slide_of(options.folder, gigapixels)
        if path is None:
            continue
        row = measure(path, options.repeats, options.iterations)
        rows.append(row)
        print(
            f"| {row['gigapixels']:.2f} | {row['read']:.2f} s | {row['decompose']:.2f} s "
            f"| {row['ratio']:.2f} | {row['decompose'] / row['gigapixels']:.1f} "
            f"| {row['memory']:.2f} GB | {row['stains']} | {row['colours']:,} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
