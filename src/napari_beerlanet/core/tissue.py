"""What of a slide is tissue, and what glass, a pen's ink or the scanner's black border.

Looked at in a thumbnail, so it costs nothing beside the slide. Of whatever is doubtful, more is
taken for tissue than less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from .images import to_bytes, within_range
from .lazy import Part, thumbnail

Kind = Literal["glass", "pen", "border"]
GLASS, TISSUE, PEN, BORDER = range(4)
NUMBERS: dict[str, int] = {"glass": GLASS, "pen": PEN, "border": BORDER}

_FAINT = (0.05, 0.14)  # OD between which the limit of glass and tissue is looked for
_RIM = 2  # cells of glass about tissue that count as tissue: they show the light
_DARK = 50  # grey level below which nothing but a border or a black pen is
_COLOURLESS = 28  # levels between the strongest and weakest channel of grey
_SPECK = 1e-4  # of the slide: pen strokes are larger
_HIDDEN = 0  # alpha of what is not there


@dataclass(frozen=True)
class Tissue:
    """`kind` (h, w) uint8: what each cell of a grid over an image of `shape` (H, W) is."""

    kind: npt.NDArray[np.uint8]
    shape: tuple[int, int]

    @property
    def share(self) -> float:
        """How much of the slide is tissue."""
        return float((self.kind == TISSUE).mean())

    def kept(self, leave_out: Iterable[Kind]) -> npt.NDArray[np.bool_]:
        """(h, w): which cells are none of the kinds to leave out."""
        out = [NUMBERS[name] for name in leave_out]
        return np.asarray(~np.isin(self.kind, out))

    def has_tissue(self, part: Part) -> bool:
        """Whether there is tissue in a part of the image."""
        rows, columns = self._cells(part.top, part.bottom, 0), self._cells(part.left, part.right, 1)
        here = self.kind[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        return bool((here == TISSUE).any())

    def mask(self, kept: npt.NDArray[np.bool_], part: Part) -> npt.NDArray[np.bool_]:
        """(h, w) for the pixels of a part: what `kept` says of the cells that they lie in."""
        rows, columns = self._cells(part.top, part.bottom, 0), self._cells(part.left, part.right, 1)
        return kept[rows[:, None], columns]

    def _cells(self, begin: int, end: int, axis: int) -> npt.NDArray[np.int64]:
        """The cell of each pixel from `begin` to `end` − 1 along an axis."""
        pixels = np.arange(begin, end, dtype=np.int64)
        return np.asarray(pixels * self.kind.shape[axis] // self.shape[axis])


def find_tissue(levels: Sequence[Any]) -> Tissue:
    """What is what in a slide, by its pyramid `levels`, the finest first."""
    small = to_bytes(within_range(thumbnail(levels)))
    return Tissue(classify(small), (int(levels[0].shape[0]), int(levels[0].shape[1])))


def classify(small: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(h, w) uint8, GLASS, TISSUE, PEN or BORDER, for each pixel of a thumbnail (h, w, 3 or 4)."""
    rgb = small[..., :3].astype(np.int16)
    hidden = np.zeros(rgb.shape[:2], bool) if small.shape[2] == 3 else small[..., 3] == _HIDDEN
    border = _border(rgb) | hidden
    pen = _pen(rgb) & ~border
    stained = (_density(rgb, border | pen) > 0) & ~border & ~pen
    kind = np.full(rgb.shape[:2], GLASS, np.uint8)
    kind[ndimage.binary_dilation(stained, iterations=_RIM)] = TISSUE
    kind[pen] = PEN
    kind[border] = BORDER
    return kind


def _density(rgb: npt.NDArray[np.int16], ignore: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """(h, w): by how much the optical density of each pixel exceeds that of glass."""
    seen = rgb[~ignore]
    if not len(seen):
        return np.zeros(rgb.shape[:2])
    light = np.maximum(np.percentile(seen, 99, axis=0), 1.0)
    strongest = np.log(light / np.maximum(rgb, 1)).max(axis=2)
    return np.asarray(strongest - _limit(strongest[~ignore]))


def _limit(od: npt.NDArray[np.float64]) -> float:
    """The emptiest density between glass and tissue, where both are there."""
    low, high = _FAINT
    counts, edges = np.histogram(od, bins=24, range=(0.0, 2 * high))
    middle = (edges[1:] + edges[:-1]) / 2
    between = (middle >= low) & (middle <= high)
    return float(middle[between][np.argmin(counts[between])])


def _border(rgb: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """What is black and reaches the image's edge."""
    black = (rgb.max(axis=2) < _DARK) & (np.ptp(rgb, axis=2) < _COLOURLESS)
    numbered, count = ndimage.label(black)
    if not count:
        return np.asarray(black)
    edge = np.concatenate([numbered[0], numbered[-1], numbered[:, 0], numbered[:, -1]])
    touching = np.unique(edge[edge > 0])
    inside = np.isin(numbered, touching)
    return np.asarray(ndimage.binary_dilation(inside, iterations=1) if inside.any() else inside)


def _pen(rgb: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Ink: green, blue with more green than red, red without blue, or black; in strokes."""
    red, green, blue = np.moveaxis(rgb, 2, 0)
    strong = np.ptp(rgb, axis=2) > 60
    ink = strong & (green > red + 20) & (green > blue + 5)
    ink |= strong & (blue > green + 25) & (green > red + 12) & (red < 130)
    ink |= (red > 120) & (green < 75) & (blue < 80) & (np.abs(green - blue) < 25)
    ink |= (rgb.max(axis=2) < _DARK) & (np.ptp(rgb, axis=2) < _COLOURLESS)
    ink = ndimage.binary_opening(ink, iterations=1)
    numbered, count = ndimage.label(ink)
    if not count:
        return np.asarray(ink)
    sizes = np.bincount(numbered.ravel())
    large = np.flatnonzero(sizes >= max(_SPECK * ink.size, 9))
    strokes = np.isin(numbered, large[large > 0])
    return np.asarray(ndimage.binary_dilation(strokes, iterations=2))
