"""A rectangle of whole pixels: a window, region or tile of an image; tiles, and their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Point = tuple[float, float]
Focus = Point | Callable[[], Point | None] | None
"""(y, x) in pixels of the finest level, or a function that gives it, the centre of the viewport."""


@dataclass(frozen=True)
class Rectangle:
    """Columns x … x + width − 1 and rows y … y + height − 1 of an image."""

    x: int
    y: int
    width: int
    height: int

    @classmethod
    def from_edges(cls, left: int, top: int, right: int, bottom: int) -> Rectangle:
        """Columns left … right − 1 and rows top … bottom − 1."""
        return cls(left, top, right - left, bottom - top)

    @property
    def left(self) -> int:
        """The first column."""
        return self.x

    @property
    def top(self) -> int:
        """The first row."""
        return self.y

    @property
    def right(self) -> int:
        """The column after the last."""
        return self.x + self.width

    @property
    def bottom(self) -> int:
        """The row after the last."""
        return self.y + self.height

    @property
    def corners(self) -> tuple[int, int, int, int]:
        """x1, y1, x2, y2."""
        return self.x, self.y, self.right, self.bottom

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns, to index an array with."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def touches(self, other: Rectangle, gap: int = 0) -> bool:
        """Whether they share a pixel, or would if each were `gap` pixels wider."""
        a, b = self.corners, other.corners
        return all(a[k] < b[k + 2] + gap and b[k] < a[k + 2] + gap for k in (0, 1))


def tile_starts(length: int, size: int, overlap: int) -> list[int]:
    """First pixels of the fewest tiles of `size` that cover `length`, spread evenly.

    Neighbours overlap by at least `overlap` pixels.
    """
    if size >= length:
        return [0]
    count = 1 + -(-(length - size) // max(size - overlap, 1))
    return [round(k * (length - size) / (count - 1)) for k in range(count)]


def pop_nearest(
    centres: npt.NDArray[np.float64], left: list[int], focus: Focus, count: int
) -> list[int]:
    """Pop up to `count` tiles from the numbers that are left: the nearest to the focus.

    `centres` (n, 2) are y and x of the middle of each tile.
    """
    point = focus() if callable(focus) else focus
    if point is None:
        taken = left[:count]
    else:
        off = ((centres[left] - np.array(point)) ** 2).sum(axis=1)
        taken = [left[k] for k in np.argsort(off, kind="stable")[:count]]
    for number in taken:
        left.remove(number)
    return taken
