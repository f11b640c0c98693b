"""How much stain is in a box: mean and integrated optical density of each component."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba import njit

from .threads import run_all, slices

_BLOCK = 1024
_BAND = 64  # rows per task: fixed, so that sums do not depend on the number of threads

Coloured = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def densities_in_boxes(
    read: Callable[[slice, slice], Coloured],
    shape: tuple[int, int],
    components: int,
    xyxy: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean and sum, (n, r) each, of the densities over the pixels of boxes (n, 4).

    `read(rows, columns)` gives a part of the image as the row (h, w) of each pixel's colour in a
    table (u, r) of densities; memory is bounded by a block of 1024². A box has the pixels whose
    centres it covers, and at least one.
    """
    height, width = shape
    x1, x2 = _pixels(xyxy[:, 0], xyxy[:, 2], width)
    y1, y2 = _pixels(xyxy[:, 1], xyxy[:, 3], height)
    total = np.zeros((len(xyxy), components))
    for rows in slices(height, _BLOCK):
        for columns in slices(width, _BLOCK):
            top, bottom, left, right = rows.start, rows.stop, columns.start, columns.stop
            here = np.flatnonzero((x1 < right) & (x2 > left) & (y1 < bottom) & (y2 > top))
            if len(here):
                across = np.clip(np.stack([x1[here], x2[here]]) - left, 0, right - left)
                down = np.clip(np.stack([y1[here], y2[here]]) - top, 0, bottom - top)
                total[here] += _sums(*read(rows, columns), across, down)
    area = ((x2 - x1) * (y2 - y1))[:, None]
    return (total / area).astype(np.float32), total.astype(np.float32)


def _pixels(
    low: npt.NDArray[np.float32], high: npt.NDArray[np.float32], length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First pixel, and the one after the last, whose centres lie between two edges."""
    first = np.clip(np.ceil(low - 0.5), 0, length - 1).astype(np.int64)
    last = np.clip(np.ceil(high - 0.5), 0, length).astype(np.int64)
    return first, np.maximum(last, first + 1)


def _sums(
    rows: npt.NDArray[np.int32],
    table: npt.NDArray[np.float32],
    across: npt.NDArray[np.int64],
    down: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """(n, r) float64: sums over columns and rows from `across` and `down` [0] up to [1]."""

    def band(part: slice) -> npt.NDArray[np.float64]:
        sums = np.zeros((across.shape[1], table.shape[1]))
        _add_rows(rows, table, across, down, part.start, part.stop, sums)
        return sums

    parts = run_all([lambda part=part: band(part) for part in slices(len(rows), _BAND)])  # type: ignore[misc]
    return np.asarray(sum(parts), dtype=np.float64)


@njit(cache=True, nogil=True)
def _add_rows(rows, table, across, down, first, last, sums):  # type: ignore
    """Add what boxes have in rows first … last − 1 to sums (n, r), by each row's running sum."""
    width, r = rows.shape[1], table.shape[1]
    running = np.zeros((width + 1, r))
    for y in range(first, last):
        for x in range(width):
            colour = rows[y, x]
            for k in range(r):
                running[x + 1, k] = running[x, k] + table[colour, k]
        for box in range(across.shape[1]):
            if down[0, box] <= y < down[1, box]:
                for k in range(r):
                    sums[box, k] += running[across[1, box], k] - running[across[0, box], k]
