"""The blood smears of ../shared as datasets that YOLO reads.

BCCD's boxes are loose by about a tenth, and most cells that touch the border are not labelled. A
detector learns both, and other laboratories' labels punish it. So, for training, margins are cut
off and boxes of red and white cells are drawn tight: every side moves in, by at most 15 %, to where
the cell begins. Platelets are too small and pale for that and stay as they are.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

NAMES = ("RBC", "WBC", "Platelets")
MARGIN = 40  # pixels: most of a red cell's radius
_LIMIT = 0.15  # of a box's side, by which it may move in
_FILLED = 0.12  # of a box's row or column that is cell where the cell begins
_VISIBLE = 0.12  # of a box that must be left when margins are cut
_SPLITS = ("train", "val", "test")


def write_bccd(shared: Path, folder: Path, *, tight: bool = True, together: bool = False) -> Path:
    """BCCD in YOLO's layout; returns its data.yaml.

    `tight` cuts margins and tightens boxes of train and val; test is always as it was labelled.
    `together` trains on train and val, with test in the place of val.
    """
    source = shared / "data" / "bccd"
    for split in _SPLITS:
        for stem in (source / "ImageSets" / "Main" / f"{split}.txt").read_text().split():
            pixels = np.asarray(Image.open(source / "JPEGImages" / f"{stem}.jpg").convert("RGB"))
            labels, boxes = read_voc(source / "Annotations" / f"{stem}.xml", pixels.shape[:2])
            if tight and split != "test":
                pixels, labels, boxes = tightened(pixels, labels, boxes)
            _write(folder, split, stem, pixels, labels, boxes)
    train = ["images/train", "images/val"] if together else ["images/train"]
    return _write_yaml(folder, train, "images/test" if together else "images/val", "images/test")


def write_other_lab(shared: Path, folder: Path) -> Path:
    """The other laboratory's smears; returns their data.yaml. They are for measuring only."""
    source = shared / "data" / "other-lab"
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for path in (source / kind).iterdir():
            (folder / kind / path.name).write_bytes(path.read_bytes())
    return _write_yaml(folder, ["images"], "images", "images")


def read_voc(path: Path, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Labels (n,) and boxes (n, 4), clipped to the image; those without area are left out."""
    labels, boxes = [], []
    for found in ElementTree.parse(path).getroot().iter("object"):
        corners = [float(found.findtext(f"bndbox/{k}")) for k in ("xmin", "ymin", "xmax", "ymax")]
        x1, y1, x2, y2 = np.clip(corners, 0, (*shape[::-1], *shape[::-1]))
        if x2 > x1 and y2 > y1:
            labels.append(NAMES.index(found.findtext("name")))
            boxes.append((x1, y1, x2, y2))
    return np.array(labels, int), np.array(boxes, float).reshape(-1, 4)


def tightened(
    pixels: np.ndarray, labels: np.ndarray, boxes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The image without its margins, and its boxes drawn tight."""
    cells = cell_mask(pixels)
    tight = np.array(
        [box if k == 2 else tighten(box, cells) for k, box in zip(labels, boxes, strict=True)]
    ).reshape(-1, 4)
    height, width = pixels.shape[0] - 2 * MARGIN, pixels.shape[1] - 2 * MARGIN
    inside = np.clip(tight - MARGIN, 0, (width, height, width, height))
    sides = inside[:, 2:] - inside[:, :2]
    whole = np.prod(tight[:, 2:] - tight[:, :2], axis=1)
    keep = (sides >= 6).all(1) & (sides.prod(1) >= _VISIBLE * whole)
    middle = pixels[MARGIN : MARGIN + height, MARGIN : MARGIN + width]
    return middle, labels[keep], inside[keep]


def cell_mask(pixels: np.ndarray) -> np.ndarray:
    """(H, W) bool: where the strongest absorbed channel is above half of Otsu's threshold."""
    X = np.log(np.maximum(pixels, 1) / 255)
    density = np.clip(np.percentile(X.reshape(-1, 3), 95, axis=0) - X, 0, None).max(2)
    smooth = ndimage.gaussian_filter(density, 1.0)
    return smooth > 0.5 * otsu(smooth)


def otsu(values: np.ndarray) -> float:
    """The threshold between 0 and 1 that parts two classes best."""
    counts, edges = np.histogram(values, 128, (0, 1))
    share, centre = counts / max(counts.sum(), 1), (edges[1:] + edges[:-1]) / 2
    weight, mean = np.cumsum(share), np.cumsum(share * centre)
    return float(
        centre[((mean[-1] * weight - mean) ** 2 / (weight * (1 - weight) + 1e-12)).argmax()]
    )


def tighten(box: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """A box whose sides moved in to where the cell begins, each by at most 15 %."""
    x1, y1, x2, y2 = box
    part = cells[int(y1) : int(np.ceil(y2)), int(x1) : int(np.ceil(x2))]
    if min(part.shape) < 8:
        return box
    height, width = part.shape
    columns = part[int(0.2 * height) : int(0.8 * height) + 1].mean(0) > _FILLED
    rows = part[:, int(0.2 * width) : int(0.8 * width) + 1].mean(1) > _FILLED
    if not (columns.any() and rows.any()):
        return box
    moves = [columns.argmax(), rows.argmax(), columns[::-1].argmax(), rows[::-1].argmax()]
    sides = [x2 - x1, y2 - y1, x2 - x1, y2 - y1]
    left, top, right, bottom = (
        move if move <= _LIMIT * side else 0 for move, side in zip(moves, sides, strict=True)
    )
    return np.array([x1 + left, y1 + top, x2 - right, y2 - bottom])


def _write(
    folder: Path, split: str, stem: str, pixels: np.ndarray, labels: np.ndarray, boxes: np.ndarray
) -> None:
    images, texts = folder / "images" / split, folder / "labels" / split
    for place in (images, texts):
        place.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(images / f"{stem}.png", compress_level=1)
    size = np.array(pixels.shape[1::-1] * 2)
    shares = np.hstack([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]]) / size
    lines = [
        f"{k} " + " ".join(f"{v:.6f}" for v in row) for k, row in zip(labels, shares, strict=True)
    ]
    (texts / f"{stem}.txt").write_text("\n".join(lines) + "\n")


def _write_yaml(folder: Path, train: list[str], val: str, test: str) -> Path:
    path = folder / "data.yaml"
    names = ", ".join(f"{k}: {name}" for k, name in enumerate(NAMES))
    text = f"path: {folder.resolve()}\ntrain: [{', '.join(train)}]\nval: {val}\ntest: {test}\n"
    path.write_text(f"{text}names: {{{names}}}\n")
    return path
