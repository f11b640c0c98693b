"""Tissue mask of a slide: tissue, background, pen marks and the scanner's black border.

Computed on a thumbnail, so it costs nothing beside the slide. What is doubtful counts as tissue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# scipy.ndimage is imported where it is used: it takes half a second, and few commands need it.
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.images import NonTissue
from napari_beerlanet.core.images.pyramid import read_thumbnail
from napari_beerlanet.core.images.rgb import clip_floats, to_uint8

BACKGROUND, TISSUE, PEN, BORDER = range(4)
NON_TISSUE_CODES: dict[str, int] = {"glass": BACKGROUND, "pen": PEN, "border": BORDER}

_OD_THRESHOLD_RANGE = (0.05, 0.14)  # optical density where background ends and tissue begins
_TISSUE_MARGIN = 2  # cells around tissue that count as tissue: they show the illumination
_MAX_BLACK_LEVEL = 50  # grey level below which nothing but a border or a black pen is
_MAX_GREY_CHROMA = 28  # levels between the strongest and weakest channel of grey
_MIN_STROKE_FRACTION = 1e-4  # of the slide: pen strokes are larger
_TRANSPARENT = 0  # alpha of what is not there


@dataclass(frozen=True, eq=False)
class TissueMask:
    """`kind` (h, w) uint8: what each cell of a grid over an image of `shape` (H, W) is."""

    kind: npt.NDArray[np.uint8]
    shape: tuple[int, int]

    @property
    def fraction(self) -> float:
        """The fraction of the slide that is tissue."""
        return float((self.kind == TISSUE).mean())

    def included(self, leave_out: Iterable[NonTissue]) -> npt.NDArray[np.bool_]:
        """(h, w): which cells are none of the kinds to leave out."""
        out = [NON_TISSUE_CODES[name] for name in leave_out]
        return np.asarray(~np.isin(self.kind, out))

    def has_tissue(self, region: Rectangle) -> bool:
        """Whether there is tissue in a region of the image."""
        rows, columns = (
            self._cells(region.top, region.bottom, 0),
            self._cells(region.left, region.right, 1),
        )
        here = self.kind[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        return bool((here == TISSUE).any())

    def fractions(self, side: float, grid: tuple[int, int]) -> npt.NDArray[np.float64]:
        """`grid` (rows, columns): the part of each square of `side` pixels that is tissue.

        Squares follow each other from the image's corner on; what lies beyond it is no tissue.
        """
        along = [
            _overlaps(count, side, length, cells)
            for count, length, cells in zip(grid, self.shape, self.kind.shape, strict=True)
        ]
        return np.asarray(along[0] @ (self.kind == TISSUE) @ along[1].T)

    def mask(self, included: npt.NDArray[np.bool_], region: Rectangle) -> npt.NDArray[np.bool_]:
        """(h, w) for the pixels of a region: what `included` says of the cells that they lie in."""
        rows, columns = (
            self._cells(region.top, region.bottom, 0),
            self._cells(region.left, region.right, 1),
        )
        return included[rows[:, None], columns]

    def _cells(self, begin: int, end: int, axis: int) -> npt.NDArray[np.int64]:
        """The cell of each pixel from `begin` to `end` − 1 along an axis."""
        pixels = np.arange(begin, end, dtype=np.int64)
        return np.asarray(pixels * self.kind.shape[axis] // self.shape[axis])


def _overlaps(count: int, side: float, length: int, cells: int) -> npt.NDArray[np.float64]:
    """(count, cells): the part of each interval of `side` that lies in each cell of a length."""
    edges = np.arange(cells + 1) * (length / cells)
    starts = np.arange(count)[:, None] * side
    shared = np.minimum(starts + side, edges[1:]) - np.maximum(starts, edges[:-1])
    return np.asarray(np.clip(shared, 0, None) / side)


def find_tissue(levels: Sequence[Any]) -> TissueMask:
    """What is what in a slide, by its pyramid `levels`, the finest first."""
    small = to_uint8(clip_floats(read_thumbnail(levels)))
    return TissueMask(classify_thumbnail(small), (int(levels[0].shape[0]), int(levels[0].shape[1])))


def classify_thumbnail(small: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(h, w) uint8 of a thumbnail (h, w, 3 or 4): BACKGROUND, TISSUE, PEN or BORDER."""
    from scipy import ndimage

    rgb = small[..., :3].astype(np.int16)
    hidden = np.zeros(rgb.shape[:2], bool) if small.shape[2] == 3 else small[..., 3] == _TRANSPARENT
    border = _find_border(rgb) | hidden
    pen = _find_pen(rgb) & ~border
    stained = (_density_above_threshold(rgb, border | pen) > 0) & ~border & ~pen
    kind = np.full(rgb.shape[:2], BACKGROUND, np.uint8)
    kind[ndimage.binary_dilation(stained, iterations=_TISSUE_MARGIN)] = TISSUE
    kind[pen] = PEN
    kind[border] = BORDER
    return kind


def _density_above_threshold(
    rgb: npt.NDArray[np.int16], ignore: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """(h, w): by how much the optical density of each pixel exceeds that of background."""
    seen = rgb[~ignore]
    if not len(seen):
        return np.zeros(rgb.shape[:2])
    white = np.maximum(np.percentile(seen, 99, axis=0), 1.0)
    strongest = np.log(white / np.maximum(rgb, 1)).max(axis=2)
    return np.asarray(strongest - _background_threshold(strongest[~ignore]))


def _background_threshold(od: npt.NDArray[np.float64]) -> float:
    """The rarest density between background and tissue, where both are there."""
    low, high = _OD_THRESHOLD_RANGE
    counts, edges = np.histogram(od, bins=24, range=(0.0, 2 * high))
    middle = (edges[1:] + edges[:-1]) / 2
    between = (middle >= low) & (middle <= high)
    return float(middle[between][np.argmin(counts[between])])


def _find_border(rgb: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """What is black and reaches the image's edge."""
    from scipy import ndimage

    black = (rgb.max(axis=2) < _MAX_BLACK_LEVEL) & (np.ptp(rgb, axis=2) < _MAX_GREY_CHROMA)
    numbered, count = ndimage.label(black)
    if not count:
        return np.asarray(black)
    edge = np.concatenate([numbered[0], numbered[-1], numbered[:, 0], numbered[:, -1]])
    touching = np.unique(edge[edge > 0])
    inside = np.isin(numbered, touching)
    return np.asarray(ndimage.binary_dilation(inside, iterations=1) if inside.any() else inside)


def _find_pen(rgb: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Ink: green, blue with more green than red, red without blue, or black; in strokes."""
    from scipy import ndimage

    red, green, blue = np.moveaxis(rgb, 2, 0)
    strong = np.ptp(rgb, axis=2) > 60
    ink = strong & (green > red + 20) & (green > blue + 5)
    ink |= strong & (blue > green + 25) & (green > red + 12) & (red < 130)
    ink |= (red > 120) & (green < 75) & (blue < 80) & (np.abs(green - blue) < 25)
    ink |= (rgb.max(axis=2) < _MAX_BLACK_LEVEL) & (np.ptp(rgb, axis=2) < _MAX_GREY_CHROMA)
    ink = ndimage.binary_opening(ink, iterations=1)
    numbered, count = ndimage.label(ink)
    if not count:
        return np.asarray(ink)
    sizes = np.bincount(numbered.ravel())
    large = np.flatnonzero(sizes >= max(_MIN_STROKE_FRACTION * ink.size, 9))
    strokes = np.isin(numbered, large[large > 0])
    return np.asarray(ndimage.binary_dilation(strokes, iterations=2))
