"""The blocks of a large image that its stains are counted by, picked up on the way through it.

`auto.block_means` takes 1024 blocks of 8 × 8 pixels at seeded places. Side by side they make a
small image of which it takes those very blocks, so that a slide's stains are counted as if it were
in memory. Which blocks those are depends on nothing but the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .lazy import Part, in_threads, put_every, read
from .palette import Palette, encode
from .tissue import Tissue

BLOCK, BLOCKS = 8, 1024
"""Side of the blocks that stains are counted by, and how many of them: as `auto` has it."""

_ROW = 32  # blocks beside each other in the mosaic

Corners = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Kept:
    """Which pixels of a level of `shape` (H, W) count, by `cells` of a tissue map."""

    tissue: Tissue
    cells: npt.NDArray[np.bool_]
    shape: tuple[int, int]

    def mask(self, part: Part) -> npt.NDArray[np.bool_]:
        """(h, w) for the pixels of a part."""
        return replace(self.tissue, shape=self.shape).mask(self.cells, part)

    def whole(self, corners: Corners) -> Corners:
        """Those of the blocks at corners (n, 2) that lie in kept cells."""
        inside = np.ones(len(corners), bool)
        for dy in (0, BLOCK - 1):
            for dx in (0, BLOCK - 1):
                y, x = (np.add(corners, (dy, dx)) * self.cells.shape // self.shape).T
                inside &= self.cells[y, x]
        return corners[inside] if inside.any() else corners

    def corners(self, seed: int) -> Corners:
        """(≤ 1024, 2): blocks at random places in kept cells."""
        rng = np.random.default_rng(seed)
        rows, columns = np.nonzero(self.cells)
        pick = rng.integers(len(rows), size=8 * BLOCKS)
        place = np.stack([rows[pick], columns[pick]], 1) + rng.random((len(pick), 2))
        scale = np.array(self.shape) / np.array(self.cells.shape)
        most = np.array(self.shape) // BLOCK - 1
        corners = np.clip((place * scale).astype(np.int64) // BLOCK, 0, most) * BLOCK
        return self.whole(corners)[:BLOCKS]


def enough_blocks(shape: Sequence[int]) -> bool:
    """Whether an image (H, W) has more blocks of full size than stains are counted by."""
    height, width = int(shape[0]), int(shape[1])
    full = min(height, width) >= BLOCK * BLOCK
    return full and (height // BLOCK) * (width // BLOCK) > BLOCKS


def block_corners(shape: Sequence[int]) -> Corners:
    """(1024, 2): the blocks that `auto.block_means` takes of an image (H, W) without holes."""
    rows, columns = int(shape[0]) // BLOCK, int(shape[1]) // BLOCK
    pick = np.random.default_rng(0).choice(rows * columns, BLOCKS, replace=False)
    return np.stack(np.divmod(pick, columns), 1).astype(np.int64) * BLOCK


def corners_in(parts: Sequence[Part], seed: int, kept: Kept | None) -> Corners:
    """(≤ 1024, 2): blocks at random places within some tiles, of kept cells."""
    rng = np.random.default_rng(seed)
    pick = rng.integers(len(parts), size=8 * BLOCKS)
    low = np.array([(p.top, p.left) for p in parts])[pick]
    size = np.array([(p.bottom - p.top, p.right - p.left) for p in parts])[pick]
    places = rng.random((len(pick), 2)) * np.maximum(size - BLOCK + 1, 1)
    corners = low + places.astype(np.int64)
    return (corners if kept is None else kept.whole(corners))[:BLOCKS]


class Mosaic:
    """Blocks at `corners` (n, 2) of a level, and what else is wanted of it; filled by `see`."""

    def __init__(self, level: Any, corners: Corners, step: int = 0, holes: bool = False) -> None:
        """`step`: keep every so many-th pixel as `small`; `holes`: note transparent blocks."""
        self.corners = corners
        self.blocks = np.zeros((len(corners), BLOCK, BLOCK, level.shape[2]), level.dtype)
        self.step = step
        self.small: npt.NDArray[Any] | None = None
        if step:
            size = (-(-int(n) // step) for n in level.shape[:2])
            self.small = np.zeros((*size, level.shape[2]), level.dtype)
        self.holes: npt.NDArray[np.bool_] | None = None
        if holes:
            self.holes = np.zeros(tuple(int(n) // BLOCK for n in level.shape[:2]), bool)

    def see(self, pixels: npt.NDArray[Any], part: Part) -> None:
        """Take what is wanted of a part."""
        for k in np.flatnonzero(self._in(part)):
            self._take(int(k), pixels, part)
        if self.small is not None:
            put_every(self.small, pixels, part, self.step)
        if self.holes is not None:
            y, x = np.nonzero(pixels[..., 3] == 0)
            rows, columns = (y + part.top) // BLOCK, (x + part.left) // BLOCK
            inside = (rows < self.holes.shape[0]) & (columns < self.holes.shape[1])
            self.holes[rows[inside], columns[inside]] = True

    def fill_again(self, level: Any, parts: Sequence[Part], threads: int | None) -> None:
        """Of blocks without holes, as `auto` has it; only now it is known which those are."""
        if self.holes is None or not self.holes.any() or self.holes.all():
            return
        free = np.flatnonzero(~self.holes.ravel())
        if len(free) > BLOCKS:
            free = free[np.random.default_rng(0).choice(len(free), BLOCKS, replace=False)]
        corners = np.stack(np.divmod(free, self.holes.shape[1]), 1) * BLOCK
        again = Mosaic(level, corners)
        wanted = [part for part in parts if again._in(part).any()]
        for _ in in_threads(lambda part: again.see(read(level, part), part), wanted, threads):
            pass
        self.corners, self.blocks = again.corners, again.blocks

    def picture(self, palette: Palette) -> npt.NDArray[np.uint8]:
        """(256, 256, 3 or 4): the blocks side by side; what is missing or not counted is hidden."""
        colours = self.blocks[..., :3].reshape(-1, 3)
        codes = encode(colours)
        rows = np.minimum(np.searchsorted(palette.codes, codes), len(palette) - 1)
        known = palette.codes[rows] == codes
        whole = np.zeros((BLOCKS * BLOCK * BLOCK, 4), np.uint8)
        whole[:, :3] = palette.colours[np.argmax(palette.counts)]
        whole[: len(colours)][known] = np.insert(colours[known], 3, 255, axis=1)
        if not known.any():
            whole[:, 3] = 255
        grid = whole.reshape(-1, _ROW, BLOCK, BLOCK, 4).swapaxes(1, 2)
        image = grid.reshape(-1, _ROW * BLOCK, 4)
        return np.ascontiguousarray(image if (image[..., 3] == 0).any() else image[..., :3])

    def _in(self, part: Part) -> npt.NDArray[np.bool_]:
        y, x = self.corners.T
        down = (y < part.bottom) & (y + BLOCK > part.top)
        return np.asarray(down & (x < part.right) & (x + BLOCK > part.left))

    def _take(self, k: int, pixels: npt.NDArray[Any], part: Part) -> None:
        y, x = (int(v) for v in self.corners[k])
        top, bottom = max(y, part.top), min(y + BLOCK, part.bottom)
        left, right = max(x, part.left), min(x + BLOCK, part.right)
        inner = pixels[top - part.top : bottom - part.top, left - part.left : right - part.left]
        self.blocks[k, top - y : bottom - y, left - x : right - x] = inner
