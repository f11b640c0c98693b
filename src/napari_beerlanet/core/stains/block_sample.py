"""A sample of pixel blocks that stands for a large image or a stack when its stains are counted.

`model_selection.block_means` takes 1024 blocks of 8 × 8 pixels at seeded positions. Side by side
they make a small image of which it takes those very blocks, so that a slide's stains are counted as
if it were in memory. Which blocks those are depends on nothing but the image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.arrays import load_array
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.threads import map_threads
from napari_beerlanet.core.images.pyramid import copy_subsampled, read_region
from napari_beerlanet.core.images.rgb import ImageError, RGBImage, check_rgb
from napari_beerlanet.core.images.tissue import TissueMask
from napari_beerlanet.core.stains.palette import Palette, encode, palette_of, palette_pays
from napari_beerlanet.core.stains.solver.model_selection import BLOCK_COUNT, BLOCK_SIDE

Corners = npt.NDArray[np.int64]

_BLOCKS_PER_ROW = 32
_MAX_STACK_SAMPLE_PIXELS = 2_000_000


@dataclass(frozen=True)
class PixelSelection:
    """Which pixels of a level of `shape` (H, W) count, by `cells` of a tissue map."""

    tissue: TissueMask
    cells: npt.NDArray[np.bool_]
    shape: tuple[int, int]

    def mask(self, part: Rectangle) -> npt.NDArray[np.bool_]:
        """(h, w) for the pixels of a part."""
        return replace(self.tissue, shape=self.shape).mask(self.cells, part)

    def blocks_inside(self, corners: Corners) -> Corners:
        """Those of the blocks at corners (n, 2) that lie in selected cells; all if none does."""
        inside = np.ones(len(corners), bool)
        for dy in (0, BLOCK_SIDE - 1):
            for dx in (0, BLOCK_SIDE - 1):
                y, x = (np.add(corners, (dy, dx)) * self.cells.shape // self.shape).T
                inside &= self.cells[y, x]
        return corners[inside] if inside.any() else corners

    def random_corners(self, seed: int) -> Corners:
        """(≤ 1024, 2): blocks at random positions in selected cells."""
        rng = np.random.default_rng(seed)
        rows, columns = np.nonzero(self.cells)
        pick = rng.integers(len(rows), size=8 * BLOCK_COUNT)
        position = np.stack([rows[pick], columns[pick]], 1) + rng.random((len(pick), 2))
        scale = np.array(self.shape) / np.array(self.cells.shape)
        last = np.array(self.shape) // BLOCK_SIDE - 1
        corners = np.clip((position * scale).astype(np.int64) // BLOCK_SIDE, 0, last) * BLOCK_SIDE
        return self.blocks_inside(corners)[:BLOCK_COUNT]


def has_enough_blocks(shape: Sequence[int]) -> bool:
    """Whether an image (H, W) has more blocks of full size than stains are counted by."""
    height, width = int(shape[0]), int(shape[1])
    full = min(height, width) >= BLOCK_SIDE * BLOCK_SIDE
    return full and (height // BLOCK_SIDE) * (width // BLOCK_SIDE) > BLOCK_COUNT


def block_corners(shape: Sequence[int]) -> Corners:
    """(1024, 2): the blocks that `block_means` takes of an image (H, W) without holes."""
    rows, columns = int(shape[0]) // BLOCK_SIDE, int(shape[1]) // BLOCK_SIDE
    pick = np.random.default_rng(0).choice(rows * columns, BLOCK_COUNT, replace=False)
    return np.stack(np.divmod(pick, columns), 1).astype(np.int64) * BLOCK_SIDE


def random_corners_in_tiles(
    parts: Sequence[Rectangle], seed: int, selection: PixelSelection | None
) -> Corners:
    """(≤ 1024, 2): blocks at random positions within some tiles, in selected cells."""
    rng = np.random.default_rng(seed)
    pick = rng.integers(len(parts), size=8 * BLOCK_COUNT)
    low = np.array([(p.top, p.left) for p in parts])[pick]
    size = np.array([(p.bottom - p.top, p.right - p.left) for p in parts])[pick]
    offset = rng.random((len(pick), 2)) * np.maximum(size - BLOCK_SIDE + 1, 1)
    corners = low + offset.astype(np.int64)
    return (corners if selection is None else selection.blocks_inside(corners))[:BLOCK_COUNT]


class BlockSample:
    """Blocks at `corners` (n, 2) of a level, and perhaps its thumbnail; filled by `add_tile`."""

    def __init__(
        self, level: Any, corners: Corners, step: int = 0, track_holes: bool = False
    ) -> None:
        """`step`: every `step`-th pixel makes the `thumbnail`; `track_holes`: of transparency."""
        self.corners = corners
        self.blocks = np.zeros((len(corners), BLOCK_SIDE, BLOCK_SIDE, level.shape[2]), level.dtype)
        self.step = step
        self.thumbnail: npt.NDArray[Any] | None = None
        if step:
            size = (-(-int(n) // step) for n in level.shape[:2])
            self.thumbnail = np.zeros((*size, level.shape[2]), level.dtype)
        self.holes: npt.NDArray[np.bool_] | None = None
        if track_holes:
            self.holes = np.zeros(tuple(int(n) // BLOCK_SIDE for n in level.shape[:2]), bool)

    def add_tile(self, pixels: npt.NDArray[Any], part: Rectangle) -> None:
        """Copy what is needed of a tile of the level."""
        for k in np.flatnonzero(self._touching(part)):
            self._copy_block(int(k), pixels, part)
        if self.thumbnail is not None:
            copy_subsampled(self.thumbnail, pixels, part, self.step)
        if self.holes is not None:
            y, x = np.nonzero(pixels[..., 3] == 0)
            rows, columns = (y + part.top) // BLOCK_SIDE, (x + part.left) // BLOCK_SIDE
            inside = (rows < self.holes.shape[0]) & (columns < self.holes.shape[1])
            self.holes[rows[inside], columns[inside]] = True

    def resample_without_holes(
        self, level: Any, parts: Sequence[Rectangle], threads: int | None
    ) -> None:
        """Sample blocks without holes, as `block_means` does; only now those are known."""
        if self.holes is None or not self.holes.any() or self.holes.all():
            return
        free = np.flatnonzero(~self.holes.ravel())
        if len(free) > BLOCK_COUNT:
            free = free[np.random.default_rng(0).choice(len(free), BLOCK_COUNT, replace=False)]
        corners = np.stack(np.divmod(free, self.holes.shape[1]), 1) * BLOCK_SIDE
        again = BlockSample(level, corners)
        wanted = [part for part in parts if again._touching(part).any()]
        for _ in map_threads(
            lambda part: again.add_tile(read_region(level, part), part), wanted, threads
        ):
            pass
        self.corners, self.blocks = again.corners, again.blocks

    def as_image(self, palette: Palette) -> npt.NDArray[np.uint8]:
        """(256, 256, 3 or 4): the blocks side by side; what is missing or not counted is hidden."""
        colours = self.blocks[..., :3].reshape(-1, 3)
        codes = encode(colours)
        rows = np.minimum(np.searchsorted(palette.codes, codes), len(palette) - 1)
        known = palette.codes[rows] == codes
        whole = np.zeros((BLOCK_COUNT * BLOCK_SIDE * BLOCK_SIDE, 4), np.uint8)
        whole[:, :3] = palette.colours[np.argmax(palette.counts)]
        whole[: len(colours)][known] = np.insert(colours[known], 3, 255, axis=1)
        if not known.any():
            whole[:, 3] = 255
        grid = whole.reshape(-1, _BLOCKS_PER_ROW, BLOCK_SIDE, BLOCK_SIDE, 4).swapaxes(1, 2)
        image = grid.reshape(-1, _BLOCKS_PER_ROW * BLOCK_SIDE, 4)
        return np.ascontiguousarray(image if (image[..., 3] == 0).any() else image[..., :3])

    def _touching(self, part: Rectangle) -> npt.NDArray[np.bool_]:
        y, x = self.corners.T
        down = (y < part.bottom) & (y + BLOCK_SIDE > part.top)
        return np.asarray(down & (x < part.right) & (x + BLOCK_SIDE > part.left))

    def _copy_block(self, k: int, pixels: npt.NDArray[Any], part: Rectangle) -> None:
        y, x = (int(v) for v in self.corners[k])
        top, bottom = max(y, part.top), min(y + BLOCK_SIDE, part.bottom)
        left, right = max(x, part.left), min(x + BLOCK_SIDE, part.right)
        inner = pixels[top - part.top : bottom - part.top, left - part.left : right - part.left]
        self.blocks[k, top - y : bottom - y, left - x : right - x] = inner


def sample_stack(
    planes: Iterable[Any], count: int, report: Report | None = None
) -> tuple[RGBImage, Palette | None]:
    """An image and a palette for `decompose` that stand for all `count` planes (H, W, 3 or 4).

    The palette has every colour of every plane, or is None where that does not pay; the image is a
    band of rows of each. Planes are taken one by one.
    """
    palette: Palette | None = None
    counting = True
    bands: list[npt.NDArray[Any]] = []
    for k, plane in enumerate(planes):
        report_progress(report, k, count, f"plane {k + 1} of {count}")
        pixels = _fill_transparent(check_rgb(load_array(plane)).pixels)
        if pixels is None:
            continue
        bands.append(_row_band(pixels, k, count))
        flat = pixels.reshape(-1, pixels.shape[-1])
        counting = counting and palette_pays(flat)
        if counting:
            colours = palette_of(flat)
            palette = colours if palette is None else palette + colours
    if not bands:
        raise ImageError("Every pixel of the stack is fully transparent.")
    return check_rgb(np.concatenate(bands)), palette if counting else None


def _fill_transparent(pixels: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """A plane whose hidden pixels have a colour that is seen elsewhere; None if all are hidden."""
    if pixels.shape[-1] == 3:
        return pixels
    hidden = pixels[..., 3] == 0
    if hidden.all():
        return None
    if hidden.any():
        pixels = pixels.copy()
        pixels[hidden, :3] = pixels[~hidden][0, :3]
    return pixels


def _row_band(pixels: npt.NDArray[Any], k: int, count: int) -> npt.NDArray[Any]:
    """Rows of one plane that stand for it among all; another part of each plane."""
    height, width = pixels.shape[:2]
    rows = min(height, max(8, _MAX_STACK_SAMPLE_PIXELS // (count * width)))
    top = (height - rows) * (k % 7) // 6
    return pixels[top : top + rows].copy()
