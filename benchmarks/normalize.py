"""How fast normalizers are, and what they make of every kind of image at hand.

    python benchmarks/normalize.py [--repeats 3] [--cpu] [--shared ../shared]
    python benchmarks/normalize.py --sheet docs/normalization.jpg

The first prints a table: each method on an image of 13 megapixels (four smears side by side)
against reading that image from a JPEG file, and Vahadane on 2500 x 2500 pixels against the same
solver with one column per pixel: written plainly, with care, and with the stains of a sample of the
pixels alone; best of several. With --cpu it is the time that the processors
worked, which a busy machine hardly changes. The second writes a sheet of pictures to look at.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from napari_beerlanet.core.common.threads import thread_count
from napari_beerlanet.core.figures.drawing import GREY, draw_text, thumbnail
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.normalization.methods import METHODS, fitted_normalizer
from napari_beerlanet.core.normalization.normalizer import log_intensity
from napari_beerlanet.core.normalization.vahadane import (
    separate_stains,
    sparse_densities,
    start_stains,
)
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.core.stains.solver.converge import ColourCells
from napari_beerlanet.samples import blood_smear, he_field

LARGE, MIDDLE = (3360, 3840), (2500, 2500)
SAMPLE = 100_000  # pixels that an implementation for pixels may learn stains from
SHEET_METHODS = ("reinhard", "macenko", "macenko-multi", "vahadane", "beerlanet", "grey")
ROWS = (
    ("he/he_1024_b.tif", "H&E, scanner B", "he/he_1024_a.tif"),
    ("he/hgsc_stromal_1500.jpg", "H&E, ovarian stroma", "he/he_1024_a.tif"),
    ("slide/CMU-1-Small-Region.svs", "H&E, whole-slide scanner", "he/he_1024_a.tif"),
    ("tumour-patches/lc25000/tumour", "H&E, colon tumour", "he/he_1024_a.tif"),
    ("malaria/images/1405022890-0002-R.jpg", "Giemsa, P. falciparum", "bccd"),
    ("other-lab/images/0184a270", "smear of another lab", "bccd"),
    ("bccd/JPEGImages/BloodImage_00003.jpg", "Wright smear, BCCD", "other-lab"),
)
TEMPLATES = {
    "bccd": ("bccd/JPEGImages/BloodImage_00010.jpg", "bccd/JPEGImages/BloodImage_00003.jpg"),
    "other-lab": ("other-lab/images/0184a270", "other-lab/images/2dd72026"),
    "he/he_1024_a.tif": ("he/he_1024_a.tif", "he/hgsc_stromal_1500.jpg"),
}
TILE, GAP, CAPTION = (220, 165), 6, 22
clock = time.perf_counter


def best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run; the first, which compiles, does not count."""
    run()
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def find(shared: Path, name: str) -> Path:
    """The file of a name, of which the end may be missing, or the first in a folder."""
    path = shared / "data" / name
    if path.is_file():
        return path
    inside = path.iterdir() if path.is_dir() else path.parent.glob(f"{path.name}*")
    return min(file for file in inside if not file.name.startswith("."))


def mosaic(shape: tuple[int, int], shared: Path) -> np.ndarray:
    """Real smears side by side, or a synthetic one."""
    files = sorted((shared / "data" / "malaria" / "images").glob("*.jpg"))[:4]
    if not files:
        return blood_smear(shape, seed=1).image
    tiles = [read_image(file).pixels for file in files]
    tiles = [tile[: tiles[0].shape[0], : tiles[0].shape[1]] for tile in tiles]
    rows = [np.concatenate(tiles[:2], axis=1), np.concatenate(tiles[2:], axis=1)]
    return np.ascontiguousarray(np.concatenate(rows)[: shape[0], : shape[1]])


def speed_table(shared: Path, repeats: int) -> None:
    image = mosaic(LARGE, shared)
    colours = len(palette_of(image.reshape(-1, 3)))
    template = he_field((512, 512), seed=1).image
    print(
        f"{image.shape[1]} x {image.shape[0]} pixels, {colours} colours, {thread_count()} threads"
    )
    print("\n| | seconds | times reading |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "image.jpg"
        Image.fromarray(image).save(file, quality=90)
        pixels = read_image(file).pixels
        reading = best(lambda: read_image(file), repeats)
        print(f"| reading the JPEG | {reading:.2f} | 1 |")
        for name in METHODS:
            if name == "none" or not METHODS[name].colour_only:
                continue
            try:
                normalizer = fitted_normalizer(name, template)
            except ValueError:
                continue  # learned methods have no template
            if normalizer.apply(pixels).unchanged:
                normalizer = fitted_normalizer(name, pixels[:600, :600])
            seconds = best(lambda: normalizer.apply(pixels), repeats)  # noqa: B023
            note = " (unchanged)" if normalizer.apply(pixels).unchanged else ""
            print(f"| {name}{note} | {seconds:.2f} | {seconds / reading:.1f} |", flush=True)


def vahadane_per_pixel(image: np.ndarray) -> np.ndarray:
    """The same as on the palette with one column per pixel, all of it."""
    pixels = image.reshape(-1, 3).astype(float)
    bright = pixels.sum(axis=1)
    X = log_intensity(pixels)
    background = X[:, bright >= np.percentile(bright, 95)].mean(axis=1)
    cells = ColourCells(np.maximum(background[:, None] - X, 0.0), np.ones(len(pixels)))
    V, W = cells.X, separate_stains(cells, start_stains(cells, background))
    H = sparse_densities(V, W)
    np.percentile(H, 99, axis=1)
    return np.rint(255 * np.exp(background[:, None] - W @ H)).astype(np.uint8)


def vahadane_thrifty(image: np.ndarray, sampled: bool, seed: int = 0) -> np.ndarray:
    """With one column per pixel as well, written with care.

    Logarithms are looked up, the start is that of a sample, percentiles are selected, not sorted.
    `sampled`: the stains are those of the sample, too, so not the same as of all pixels.
    """
    pixels = image.reshape(-1, 3)
    chosen = np.random.default_rng(seed).choice(len(pixels), SAMPLE)
    levels = log_intensity(np.arange(256.0)[:, None].repeat(3, axis=1))[0]
    X = levels[pixels.T]
    bright = pixels.sum(axis=1, dtype=np.uint16)
    limit = np.searchsorted(np.cumsum(np.bincount(bright)), 0.95 * len(pixels))
    background = X[:, bright >= limit].mean(axis=1)
    V = np.maximum(background[:, None] - X, 0.0)
    some = ColourCells(np.ascontiguousarray(V[:, chosen]), np.ones(SAMPLE))
    start = start_stains(some, background)
    W = separate_stains(some if sampled else ColourCells(V, np.ones(len(pixels))), start)
    H = sparse_densities(V, W)
    np.partition(H, int(0.99 * len(pixels)), axis=1)
    return np.rint(255 * np.exp(background[:, None] - W @ H)).astype(np.uint8)


def vahadane_table(shared: Path, repeats: int) -> None:
    image = mosaic(MIDDLE, shared)
    section = read_image(find(shared, "he/hgsc_stromal_1500.jpg")).pixels
    section = np.ascontiguousarray(np.tile(section, (2, 2, 1))[: MIDDLE[0], : MIDDLE[1]])
    print(
        "\n| Vahadane, 2500 x 2500 pixels | palette | per pixel, plainly | per pixel, with care "
        f"| stains of {SAMPLE:,} pixels |\n|---|---|---|---|---|"
    )
    for name, pixels in (("smears", image), ("H&E", section)):
        normalizer = fitted_normalizer("vahadane", pixels[:800, :800])
        ours = best(lambda: normalizer.apply(pixels), repeats)  # noqa: B023
        cells = [f"{ours:.2f} s"]
        for other in (
            vahadane_per_pixel,
            lambda image: vahadane_thrifty(image, sampled=False),
            lambda image: vahadane_thrifty(image, sampled=True),
        ):
            start = clock()
            other(pixels)
            seconds = clock() - start
            cells.append(f"{seconds:.2f} s ({seconds / ours:.0f} times)")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def picture(pixels: np.ndarray) -> Image.Image:
    """The middle of an image in the shape of a tile."""
    height, width = pixels.shape[:2]
    scale = max(TILE[0] / width, TILE[1] / height)
    small = thumbnail(pixels[..., :3], (round(width * scale), round(height * scale)))
    small = np.asarray(small).astype(np.uint8)
    top, left = (small.shape[0] - TILE[1]) // 2, (small.shape[1] - TILE[0]) // 2
    return Image.fromarray(small[top : top + TILE[1], left : left + TILE[0]])


def sheet(shared: Path, out: Path) -> None:
    columns = ("image", *SHEET_METHODS, "template")
    width, height = TILE[0] + GAP, TILE[1] + CAPTION + GAP
    whole = Image.new("RGB", (len(columns) * width, len(ROWS) * height + CAPTION), "white")
    draw = ImageDraw.Draw(whole)
    for k, name in enumerate(columns):
        label = METHODS[name].label if name in METHODS else name
        draw_text(draw, (k * width, CAPTION // 2), label, 15)
    for row, (name, caption, template) in enumerate(ROWS):
        files = [find(shared, one) for one in TEMPLATES[template]]
        templates = [np.ascontiguousarray(read_image(one).pixels[..., :3]) for one in files]
        pixels = np.ascontiguousarray(read_image(find(shared, name)).pixels[..., :3])
        y = CAPTION + row * height
        for k, method in enumerate(columns):
            shown, text = pixels, caption
            if method == "template":
                shown, text = templates[0], ""
            elif method != "image":
                reference = templates if method == "macenko-multi" else templates[0]
                done = fitted_normalizer(method, reference).apply(pixels)
                shown, text = done.rgb, "unchanged" if done.unchanged else ""
                print(name, method, *done.notes)
            draw_text(draw, (k * width, y + CAPTION // 2), text, 14, GREY)
            whole.paste(picture(shown), (k * width, y + CAPTION))
    whole.save(out, quality=70, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--cpu", action="store_true", help="processor time, not elapsed time")
    parser.add_argument("--vahadane", action="store_true", help="only the second table")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="write pictures instead")
    options = parser.parse_args()
    global clock
    clock = time.process_time if options.cpu else time.perf_counter
    if options.sheet:
        sheet(options.shared, options.sheet)
        return
    if not options.vahadane:
        speed_table(options.shared, options.repeats)
    vahadane_table(options.shared, options.repeats)


if __name__ == "__main__":
    main()
