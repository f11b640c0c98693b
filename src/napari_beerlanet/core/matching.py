"""Found boxes against true ones: which overlap by how much, and which is which.

The overlaps are computed once, only for boxes that touch. What is found is then matched anew for
each threshold and each level of overlap, in a millisecond for ten thousand boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from .geometry import Boxes, check_boxes
from .nms import GRID, ROW, SLACK, Grid, first_at

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

LEAST = 0.1
"""Intersection over union below which a pair is not kept."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Which found and true boxes overlap.

    Those of found box i are at `starts[i]` … `starts[i + 1]` − 1 of `true` (p,), the indices of
    the true boxes in ascending order, and of `iou` (p,), at least `LEAST`. `count` is the number
    of true boxes.
    """

    starts: Indices
    true: Indices
    iou: Values
    count: int

    @property
    def found(self) -> Indices:
        """(p,) the index of the found box of each pair."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def pairs_of(found: Boxes, true: Boxes) -> Pairs:
    """All pairs of found (n, 4) and true (m, 4) boxes that share at least `LEAST`."""
    mine, theirs = (check_boxes(boxes).astype(np.float64) for boxes in (found, true))
    if not len(mine) or not len(theirs):
        return Pairs(np.zeros(len(mine) + 1, np.int64), _none(), np.zeros(0), len(theirs))
    grid = Grid.of(theirs, np.zeros(len(theirs), np.int64))
    sorted_boxes = np.ascontiguousarray(theirs[grid.order])
    corner = theirs[:, :2].min(axis=0)
    ends, places, shares = _gather(
        mine, sorted_boxes, grid.keys, grid.starts, grid.levels, grid.cell, corner, LEAST
    )
    starts = np.concatenate([[0], ends])
    index = grid.order[places]
    order = np.lexsort((index, np.repeat(np.arange(len(mine)), np.diff(starts))))
    return Pairs(starts, index[order], shares[order], len(theirs))


def joined(parts: list[Pairs]) -> Pairs:
    """Pairs of several images as if all were one, boxes numbered on."""
    starts, true, passed, count = [np.zeros(1, np.int64)], [_none()], 0, 0
    for part in parts:
        starts.append(part.starts[1:] + passed)
        true.append(part.true + count)
        passed, count = passed + len(part.true), count + part.count
    shares = [np.zeros(0), *(part.iou for part in parts)]
    return Pairs(np.concatenate(starts), np.concatenate(true), np.concatenate(shares), count)


def assign(
    pairs: Pairs,
    turns: Indices,
    level: float,
    found_labels: npt.NDArray[Any] | None = None,
    true_labels: npt.NDArray[Any] | None = None,
    free: npt.NDArray[np.bool_] | None = None,
) -> Indices:
    """(n,) for each found box the true one that it is, or -1; each is taken once.

    In the order `turns` (indices of found boxes; those not in it stay -1) each takes the `free`
    box with which it shares most, if that is at least `level`. With both labels only boxes of one
    class match. This is what Ultralytics and COCO do, at one level.
    """
    if not LEAST <= level <= 1:
        raise ValueError(f"Boxes match from an overlap (IoU) of {LEAST} to 1, not {level}.")
    count = len(pairs.starts) - 1
    taken = np.full(count, -1, np.int64)
    open_ = np.ones(pairs.count, np.bool_) if free is None else free.copy()
    same = found_labels is None or true_labels is None
    mine = np.zeros(count, np.int64) if same else np.asarray(found_labels, np.int64)
    theirs = np.zeros(pairs.count, np.int64) if same else np.asarray(true_labels, np.int64)
    _take(
        pairs.starts, pairs.true, pairs.iou, np.asarray(turns, np.int64), level,
        mine, theirs, open_, taken,
    )  # fmt: skip
    return taken


def most_shared(pairs: Pairs, allowed: npt.NDArray[np.bool_] | None = None) -> Values:
    """(n,) how much each found box shares with the true box nearest to it, of `allowed` pairs."""
    best = np.zeros(len(pairs.starts) - 1)
    chosen = slice(None) if allowed is None else allowed
    np.maximum.at(best, pairs.found[chosen], pairs.iou[chosen])
    return best


def _none() -> Indices:
    return np.zeros(0, np.int64)


@njit(cache=True, nogil=True)
def _gather(found, boxes, keys, starts, levels, cell, corner, limit):
    """The pairs: ends (n,), places of true boxes in the grid's order (p,), overlaps (p,)."""
    ends = np.empty(len(found), np.int64)
    places, shares, used = np.empty(1024, np.int64), np.empty(1024, np.float64), 0
    for i in range(len(found)):
        x1, y1, x2, y2 = found[i]
        side = max(x2 - x1, y2 - y1)
        for level in range(levels):
            begin, end = starts[level], starts[level + 1]
            size = cell * 2.0**level  # this level's boxes are at least half as long
            too_small = size * SLACK < limit * side
            too_large = level > 0 and side * SLACK < limit * size / 2
            if begin == end or too_small or too_large:
                continue
            reach = size * SLACK
            left = min(max(int(np.floor((x1 - corner[0] - reach) / size)), 0), ROW - 1)
            right = max(min(int(np.floor((x2 - corner[0]) / size)), ROW - 1), -1)
            top = max(int(np.floor((y1 - corner[1] - reach) / size)), 0)
            bottom = min(int(np.floor((y2 - corner[1]) / size)), ROW - 1)
            every = bottom - top >= end - begin  # fewer boxes than rows: look at all of them
            if every:
                top = bottom
            for row in range(top, bottom + 1):
                low, high = begin, end
                if not every:
                    low = first_at(keys, begin, end, level * GRID + row * ROW + left)
                    high = first_at(keys, low, end, level * GRID + row * ROW + right + 1)
                if used + high - low > len(places):
                    room = 2 * (used + high - low)
                    places, shares = _longer(places, room), _longer(shares, room)
                for place in range(low, high):
                    share = _overlap(x1, y1, x2, y2, boxes[place])
                    if share >= limit:
                        places[used], shares[used] = place, share
                        used += 1
        ends[i] = used
    return ends, places[:used], shares[:used]


@njit(cache=True, nogil=True)
def _longer(values, length):
    new = np.empty(length, values.dtype)
    new[: len(values)] = values
    return new


@njit(cache=True, nogil=True)
def _overlap(x1, y1, x2, y2, box):
    width = min(x2, box[2]) - max(x1, box[0])
    height = min(y2, box[3]) - max(y1, box[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / ((x2 - x1) * (y2 - y1) + (box[2] - box[0]) * (box[3] - box[1]) - shared)


@njit(cache=True, nogil=True)
def _take(starts, true, iou, turns, level, mine, theirs, free, taken):
    for i in turns:
        best, most = -1, level
        for p in range(starts[i], starts[i + 1]):
            j = true[p]
            if (
                free[j]
                and mine[i] == theirs[j]
                and (iou[p] > most or (best < 0 and iou[p] >= most))
            ):
                best, most = j, iou[p]
        if best >= 0:
            taken[i] = best
            free[best] = False
