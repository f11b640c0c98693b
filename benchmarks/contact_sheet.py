"""Every kind of image we have, decomposed with default settings, on one sheet to look at.

    python benchmarks/contact_sheet.py [--out docs/contact_sheet.jpg] [--shared ../shared]

Each image is followed by the densities of its stains, the largest share first, each in its own
colour. With --all, every image of the folders is decomposed and the number of stains that were
found is counted instead.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import napari_beerlanet as nb
from napari_beerlanet.core.figures.drawing import GREY, draw_text, thumbnail, tint
from napari_beerlanet.core.images.files import read_image

FOLDERS = ("he", "slide", "malaria/images", "bccd/JPEGImages", "other-lab/images")
SHOWN = (
    ("he/he_1024_a.tif", "H&E, scanner A"),
    ("he/he_1024_b.tif", "H&E, scanner B"),
    ("he/hgsc_stromal_1500.jpg", "H&E, ovarian stroma"),
    ("slide/CMU-1-Small-Region.svs", "H&E, whole-slide scanner"),
    ("malaria/images/1405022890-0002-R.jpg", "Giemsa smear, P. falciparum"),
    ("malaria/images/1704282807-0002-R.jpg", "Giemsa smear with uneven light"),
    ("bccd/JPEGImages/BloodImage_00003.jpg", "blood smear, BCCD"),
    ("bccd/JPEGImages/BloodImage_00010.jpg", "blood smear, BCCD, eosinophils"),
    ("other-lab/images/0184a270-648e-5e6d-bc61-a9e8f7b0f6e4.jpg", "blood smear, another lab"),
    ("other-lab/images/2dd72026-dad4-5ea9-", "blood smear, another lab"),
)
TILE, GAP, CAPTION, STAINS = (300, 225), 10, 30, 3


def row(path: Path, caption: str) -> Image.Image:
    """One image and its stains, side by side."""
    pixels = read_image(path).pixels
    found = nb.decompose(pixels, iterations="converge")
    sheet = Image.new("RGB", ((1 + STAINS) * (TILE[0] + GAP), TILE[1] + CAPTION + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    draw_text(draw, (0, CAPTION // 2), caption, 18)
    sheet.paste(
        Image.fromarray(_crop(thumbnail(pixels[..., :3], _size(pixels))).astype(np.uint8)),
        (0, CAPTION),
    )
    active = [i for i in np.argsort(-found.share) if found.active[i]]
    most = max(np.percentile(found.densities[i], 99.5) for i in active)
    for place, i in enumerate(active[:STAINS], start=1):
        density = _crop(thumbnail(found.densities[i], _size(pixels))) / most
        x = place * (TILE[0] + GAP)
        sheet.paste(
            Image.fromarray(tint(density, found.colours[i].astype(np.float32))), (x, CAPTION)
        )
        spectrum = " ".join(f"{v:.2f}" for v in found.spectra[:, i])
        draw_text(draw, (x, CAPTION // 2), f"{found.share[i]:.0%}  ({spectrum})", 15, GREY)
    return sheet


def _size(pixels: np.ndarray) -> tuple[int, int]:
    """(width, height) at which the image covers a tile."""
    factor = max(TILE[0] / pixels.shape[1], TILE[1] / pixels.shape[0])
    return round(pixels.shape[1] * factor), round(pixels.shape[0] * factor)


def _crop(picture: np.ndarray) -> np.ndarray:
    top, left = (picture.shape[0] - TILE[1]) // 2, (picture.shape[1] - TILE[0]) // 2
    return picture[top : top + TILE[1], left : left + TILE[0]]


def count_all(data: Path) -> None:
    print("| folder | images | stains found |\n|---|---|---|")
    for folder in FOLDERS:
        files = sorted(f for f in (data / folder).iterdir() if not f.name.startswith("LICENSE"))
        found = Counter(
            int(nb.decompose(read_image(f).pixels, iterations="converge").active.sum())
            for f in files
        )
        counts = ", ".join(f"{n} stains: {found[n]}" for n in sorted(found))
        print(f"| {folder} | {len(files)} | {counts} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/contact_sheet.jpg"))
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    data = options.shared / "data"
    if options.all:
        count_all(data)
        return
    rows = [row(next(data.glob(f"{name}*")), caption) for name, caption in SHOWN]
    width, height = rows[0].size
    half = -(-len(rows) // 2)
    sheet = Image.new("RGB", (2 * width + 30, half * height), "white")
    for k, one in enumerate(rows):
        sheet.paste(one, (k // half * (width + 30), k % half * height))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.resize((sheet.width * 2 // 3, sheet.height * 2 // 3), Image.LANCZOS).save(
        options.out, quality=85
    )
    print(options.out)


if __name__ == "__main__":
    main()
