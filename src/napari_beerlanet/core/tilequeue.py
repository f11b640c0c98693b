"""Which tile of a slide comes next, and which others it touches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .tiling import Plan

Centres = npt.NDArray[np.float64]
Point = tuple[float, float]
Focus = Point | Callable[[], Point | None] | None
"""(y, x) in pixels of the finest level, or a function that gives it, where someone looks."""


def centres_of(plan: Plan) -> Centres:
    """(n, 2): y and x of the middle of each tile."""
    first = plan.tiles[0]
    corners = np.array([(tile.y, tile.x) for tile in plan.tiles], np.float64)
    return np.asarray(corners + np.array([first.height / 2, first.width / 2]))


def take_next(centres: Centres, left: list[int], focus: Focus, count: int) -> list[int]:
    """Take up to `count` tiles out of the numbers that are left: the nearest to the focus."""
    point = focus() if callable(focus) else focus
    if point is None:
        taken = left[:count]
    else:
        off = ((centres[left] - np.array(point)) ** 2).sum(axis=1)
        taken = [left[k] for k in np.argsort(off, kind="stable")[:count]]
    for number in taken:
        left.remove(number)
    return taken


def neighbourhood(plan: Plan, number: int) -> tuple[list[int], Plan]:
    """Numbers of all tiles that overlap one, itself too, and a plan of them alone."""
    tiles, tile = plan.tiles, plan.tiles[number]
    columns = sum(t.y == tiles[0].y for t in tiles[: _row_length(plan)])
    rows = len(tiles) // columns
    down = [r for r in range(rows) if abs(tiles[r * columns].y - tile.y) < tile.height]
    across = [c for c in range(columns) if abs(tiles[c].x - tile.x) < tile.width]
    near = [r * columns + c for r in down for c in across]
    return near, Plan(plan.shape, [tiles[k] for k in near], plan.size)


def _row_length(plan: Plan) -> int:
    """More tiles than a row has."""
    return min(len(plan.tiles), plan.shape[1] + 1)
