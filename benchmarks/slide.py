"""Decompose a synthetic slide of up to a gigapixel, against merely reading and decompressing it.

`python benchmarks/slide.py --gigapixels 0.1 0.3 1` writes the slide once to a cache folder (zarr,
512 × 512 chunks; about 0.6 GB per gigapixel, says so where the disk has no room) and prints, for
each size, the best of some runs in turn: reading every chunk, decomposing, their ratio by the clock
and in processor time (which other programs disturb less), and the peak memory of the process.

`python benchmarks/slide.py --stages` prints megapixels per second of one core for each stage of a
slide's way (docs/slides.md, "Scale on paper"): decoding a JPEG slide, counting its colours, looking
densities up, and detection by torch and by OpenVINO, each with one thread and in processor time.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import zarr

T = TypeVar("T")

CHUNK = 512
FIELD = 2048  # side of the fields that the slide is laid out with
BYTES = 3  # of a pixel, at worst
SLIDE = Path(__file__).resolve().parents[2] / "shared/data/slide/CMU-1-Small-Region.svs"


def make_slide(path: Path, gigapixels: float) -> None:
    """Fields of tissue with noise of their own, shifted light, and glass about them."""
    from napari_beerlanet.samples import he_field

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


def timed(work: Callable[[], T]) -> tuple[float, float, T]:
    """Seconds by the clock, seconds of processor time, and the result."""
    clock, processor = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - clock, time.process_time() - processor, result


def read_all(path: Path) -> None:
    """Read and decompress every chunk, with as many threads as the decomposition has."""
    from napari_beerlanet.core.common.threads import map_threads
    from napari_beerlanet.core.images.pyramid import chunk_aligned_regions, read_region

    array = zarr.open_array(path, mode="r")
    for _ in map_threads(lambda part: read_region(array, part).shape, chunk_aligned_regions(array)):
        pass


def decompose(path: Path, iterations: str) -> tuple[int, int]:
    """Stains and distinct colours."""
    from napari_beerlanet.core.stains.slide import decompose_slide

    steps = iterations if iterations == "converge" else int(iterations)
    found = decompose_slide(zarr.open_array(path, mode="r"), iterations=steps)
    return int(found.fit.active.sum()), len(found.palette)


def measure(path: Path, repeats: int, iterations: str) -> dict[str, float]:
    """In a process of its own, so that its peak memory is that of this slide."""
    from napari_beerlanet.core.stains.slide import decompose_slide

    rng = np.random.default_rng(0)
    small = rng.integers(0, 255, (512, 512, 3), np.uint8)
    decompose_slide(small, iterations="converge" if iterations == "converge" else int(iterations))
    reading, working, found = [], [], (0, 0)
    for _ in range(repeats):
        reading.append(timed(lambda: read_all(path))[:2])
        *seconds, found = timed(lambda: decompose(path, iterations))
        working.append(seconds)
    unit = 1 if sys.platform == "darwin" else 1024
    shape = zarr.open_array(path, mode="r").shape
    best = np.array(working).min(0) / np.array(reading).min(0)
    return {
        "gigapixels": shape[0] * shape[1] / 1e9,
        "read": min(r[0] for r in reading),
        "decompose": min(w[0] for w in working),
        "ratio": float(best[0]),
        "processor": min(w[1] for w in working),
        "processor_ratio": float(best[1]),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9,
        "stains": found[0],
        "colours": found[1],
    }


def stage_rates(slide: Path, repeats: int) -> dict[str, float]:
    """Megapixels per second of processor time, one thread."""
    import torch

    import napari_beerlanet as nb
    from napari_beerlanet.core.images.pyramid import chunk_aligned_regions, read_region
    from napari_beerlanet.core.stains.palette import ColourCounter, palette_of

    torch.set_num_threads(1)
    with nb.open_slide(slide) as opened:
        level = opened.levels[0]
        parts = chunk_aligned_regions(level)
        size = level.shape[0] * level.shape[1]
        decode = fastest(lambda: [read_region(level, part) for part in parts], repeats)
        pixels = np.asarray(level[: level.shape[0], : level.shape[1]])
    counter = ColourCounter()
    count = fastest(lambda: counter.add(pixels), repeats)
    flat = np.ascontiguousarray(pixels).reshape(-1, pixels.shape[2])
    palette = palette_of(flat)
    rates = {"decode (JPEG)": size / decode, "count colours": size / count}
    for r in (3, 8):
        table = np.random.default_rng(0).random((len(palette), r)).astype(np.float32)
        seconds = fastest(lambda table=table: palette.look_up(table, flat), repeats)
        rates[f"look up {r} densities"] = size / seconds

    model = nb.load_checkpoint("blood-cells", device="cpu")
    side = 640
    tile = np.ascontiguousarray(pixels[:side, :side, :3])
    from napari_beerlanet.core.stains.front_end import fit_stain

    fit = fit_stain(model.network, pixels[..., :3])
    mixing = fastest(lambda: fit.mix_tiles(model.network, tile[None]), repeats)
    rates["front end of a tile"] = side * side / mixing

    network = model.runner.network
    mixed = torch.rand(1, 3, side, side)
    with torch.inference_mode():
        last = mixed.to(memory_format=torch.channels_last)
        seconds = fastest(lambda: network.predict_mixed(last), repeats)
        rates["network, torch"] = side * side / seconds
    for precision in ("float32", "bfloat16"):
        converted = model.runner.openvino(precision, [], wait=True)
        if converted is not None and converted.precision == precision:
            seconds = fastest(lambda converted=converted: converted(mixed), repeats)
            rates[f"network, OpenVINO {precision}"] = side * side / seconds
    return {name: rate / 1e6 for name, rate in rates.items()}


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Seconds of processor time of the fastest of some runs, after one to warm up."""
    work()
    return min(timed(work)[1] for _ in range(repeats))


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


def apart(path: Path, repeats: int, iterations: str) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--one", str(path), "--repeats", str(repeats)]
    command += ["--iterations", iterations]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigapixels", nargs="+", type=float, default=[0.1, 0.3, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", default="converge", help="a number, or converge (default)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "beerlanet-slide"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--stages", action="store_true", help="rates of one core instead")
    parser.add_argument("--slide", type=Path, default=SLIDE, help="a JPEG slide, for --stages")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.repeats, options.iterations)))
        return
    if options.stages:
        os.environ["OMP_NUM_THREADS"] = "1"
        print("| stage | megapixels per second and core |\n|---|---|")
        for name, rate in stage_rates(options.slide, options.repeats).items():
            print(f"| {name} | {rate:.3g} |", flush=True)
        return
    print(
        "| gigapixels | read | decompose | ratio | of processor time | processor s per gigapixel "
        "| peak memory | stains | colours |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for gigapixels in options.gigapixels:
        path = slide_of(options.folder, gigapixels)
        if path is None:
            continue
        row = apart(path, options.repeats, options.iterations)
        rows.append(row)
        print(
            f"| {row['gigapixels']:.2f} | {row['read']:.2f} s | {row['decompose']:.2f} s "
            f"| {row['ratio']:.2f} | {row['processor_ratio']:.2f} "
            f"| {row['processor'] / row['gigapixels']:.1f} "
            f"| {row['memory']:.2f} GB | {row['stains']} | {row['colours']:,} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
