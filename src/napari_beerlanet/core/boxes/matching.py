"""Non-maximum suppression, and matching of detections with ground truth by IoU.

Boxes with a large IoU are of similar size. So boxes are sorted into grids by their upper left
corner, one for each class and each size (a level: sides up to the grid's cell, which doubles from
level to level), and each box looks only into the few cells where its partners can be. Overlaps are
computed once; matching anew at another threshold takes a millisecond for ten thousand boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.geometry import BoxArray, check_boxes, check_per_box
from napari_beerlanet.core.common.threads import in_numpy, kernels_being_compiled, njit

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

MIN_IOU = 0.1
"""Intersection over union below which a pair does not count as overlapping."""

_MAX_CELLS = 1 << 14  # along the longer side, at most; a row of the grid has twice as many numbers
_ROW_STRIDE = 1 << 15
_GRID_STRIDE = 1 << 30
_MAX_PAIRS_IN_NUMPY = 1 << 22  # of all with all; with more, compiling takes less time
_ROUNDING_SLACK = 1 + 1e-9  # rounding must never hide a neighbour


def non_max_suppression(
    xyxy: BoxArray,
    scores: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    iou: float,
    first: npt.NDArray[np.bool_] | None = None,
) -> Indices:
    """Indices of the boxes that remain, the highest score first.

    Greedy: the best box stays and removes those of its class with a larger intersection over
    union with it than `iou`, then the best of the rest, and so on. Boxes in `first` (n,) come
    before all others, whatever their score.
    """
    boxes = check_boxes(xyxy)
    scores = check_per_box(scores, len(boxes), "scores").astype(np.float64)
    labels = check_per_box(labels, len(boxes), "labels")
    late = (
        np.zeros(len(boxes), bool) if first is None else ~check_per_box(first, len(boxes), "marks")
    )
    if not 0 <= iou <= 1:
        raise ValueError(f"The limit of intersection over union is from 0 to 1, not {iou}.")
    if not np.isfinite(scores).all():
        raise ValueError("Scores must be finite numbers.")
    order = np.lexsort((-scores, late))
    if not len(boxes):
        return order
    corners: npt.NDArray[np.float64] = boxes.astype(np.float64)
    if in_numpy():
        kept = np.sort(_suppress_in_numpy(corners, labels, order, iou))
        return kept[np.argsort(-scores[kept], kind="stable")]
    grid = BoxGrid.of(corners, labels)
    place = np.empty(len(boxes), np.int64)
    place[grid.order] = np.arange(len(boxes))
    alive = np.ones(len(boxes), np.bool_)
    _suppress_in_order(
        np.ascontiguousarray(corners[grid.order]), place[order], grid.keys, grid.starts,
        grid.levels, grid.cell, corners[:, :2].min(axis=0), float(iou), alive,
    )  # fmt: skip
    kept = np.sort(grid.order[alive])
    return kept[np.argsort(-scores[kept], kind="stable")]


@dataclass(frozen=True, eq=False)
class OverlapPairs:
    """Which detections and true boxes overlap.

    Those of detection i are at `starts[i]` … `starts[i + 1]` − 1 of `truth` (p,), the indices of
    the true boxes in ascending order, and of `iou` (p,), at least `MIN_IOU`. `truth_count` is the
    number of true boxes.
    """

    starts: Indices
    truth: Indices
    iou: Values
    truth_count: int

    @property
    def detection(self) -> Indices:
        """(p,) the index of the detection of each pair."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def overlap_pairs(detections: BoxArray, truth: BoxArray) -> OverlapPairs:
    """All pairs of detected (n, 4) and true (m, 4) boxes with an IoU of at least `MIN_IOU`."""
    mine, theirs = (check_boxes(boxes).astype(np.float64) for boxes in (detections, truth))
    if not len(mine) or not len(theirs):
        return OverlapPairs(
            np.zeros(len(mine) + 1, np.int64), _no_indices(), np.zeros(0), len(theirs)
        )
    if kernels_being_compiled() and len(mine) * len(theirs) <= _MAX_PAIRS_IN_NUMPY:
        return _overlaps_in_numpy(mine, theirs)  # a window shows matches, and must not wait
    grid = BoxGrid.of(theirs, np.zeros(len(theirs), np.int64))
    sorted_boxes = np.ascontiguousarray(theirs[grid.order])
    corner = theirs[:, :2].min(axis=0)
    ends, places, ious = _find_overlaps(
        mine, sorted_boxes, grid.keys, grid.starts, grid.levels, grid.cell, corner, MIN_IOU
    )
    starts = np.concatenate([[0], ends])
    index = grid.order[places]
    order = np.lexsort((index, np.repeat(np.arange(len(mine)), np.diff(starts))))
    return OverlapPairs(starts, index[order], ious[order], len(theirs))


def concatenate_pairs(parts: list[OverlapPairs]) -> OverlapPairs:
    """Pairs of several images as if all were one, boxes numbered on."""
    starts, truth, pair_count, truth_count = [np.zeros(1, np.int64)], [_no_indices()], 0, 0
    for part in parts:
        starts.append(part.starts[1:] + pair_count)
        truth.append(part.truth + truth_count)
        pair_count += len(part.truth)
        truth_count += part.truth_count
    ious = np.concatenate([np.zeros(0), *(part.iou for part in parts)])
    return OverlapPairs(np.concatenate(starts), np.concatenate(truth), ious, truth_count)


def match_boxes(
    detections: BoxArray,
    truth: BoxArray,
    min_iou: float,
    scores: npt.NDArray[Any] | None = None,
    labels: npt.NDArray[Any] | None = None,
    true_labels: npt.NDArray[Any] | None = None,
) -> Indices:
    """(n,) for each detected box the index of the true one that it is, or -1; see `match_greedy`.

    By descending score, or in the order given.
    """
    order = np.arange(len(detections))
    if scores is not None:
        order = np.argsort(-np.asarray(scores), kind="stable")
    return match_greedy(overlap_pairs(detections, truth), order, min_iou, labels, true_labels)


def match_greedy(
    pairs: OverlapPairs,
    order: Indices,
    min_iou: float,
    labels: npt.NDArray[Any] | None = None,
    true_labels: npt.NDArray[Any] | None = None,
    free: npt.NDArray[np.bool_] | None = None,
) -> Indices:
    """(n,) for each detection the true box that it is, or -1; each is matched once.

    In the given `order` (indices of detections; those not in it stay -1) each takes the `free` box
    with the largest IoU, if that is at least `min_iou`. With both labels only boxes of one class
    match. This is what Ultralytics and COCO do, at one IoU threshold.
    """
    if not MIN_IOU <= min_iou <= 1:
        raise ValueError(f"Boxes match from an overlap (IoU) of {MIN_IOU} to 1, not {min_iou}.")
    if (labels is None) != (true_labels is None):
        raise ValueError("To match within classes, the labels of both are needed.")
    count = len(pairs.starts) - 1
    matched = np.full(count, -1, np.int64)
    remaining = np.ones(pairs.truth_count, np.bool_) if free is None else free.copy()
    mine = np.zeros(count) if labels is None else labels
    theirs = np.zeros(pairs.truth_count) if true_labels is None else true_labels
    in_python = kernels_being_compiled() and len(pairs.truth) <= _MAX_PAIRS_IN_NUMPY >> 6
    match_in_order = _match_in_order.py_func if in_python else _match_in_order
    match_in_order(
        pairs.starts, pairs.truth, pairs.iou, np.asarray(order, np.int64), min_iou,
        np.asarray(mine, np.int64), np.asarray(theirs, np.int64), remaining, matched,
    )  # fmt: skip
    return matched


def max_iou(pairs: OverlapPairs, allowed: npt.NDArray[np.bool_] | None = None) -> Values:
    """(n,) the largest IoU of each detection with a true box, of `allowed` pairs."""
    best = np.zeros(len(pairs.starts) - 1)
    chosen = slice(None) if allowed is None else allowed
    np.maximum.at(best, pairs.detection[chosen], pairs.iou[chosen])
    return best


def _no_indices() -> Indices:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class BoxGrid:
    """Where each box is: sorted by `keys`, which are label, level, row, column in one number.

    `order` (n,) sorts the boxes so; `starts` (labels · levels + 1,) is where each grid begins;
    `cell` is the side of a cell of level 0 in pixels.
    """

    order: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    levels: int
    cell: float

    @classmethod
    def of(cls, boxes: npt.NDArray[np.float64], labels: npt.NDArray[Any]) -> BoxGrid:
        corner = boxes[:, :2].min(axis=0)
        side = (boxes[:, 2:] - boxes[:, :2]).max(axis=1)
        extent = (boxes[:, :2].max(axis=0) - corner).max()
        least: float = max(extent / _MAX_CELLS, side.min(), 1e-30)
        cell = 2.0 ** np.ceil(np.log2(least) + 0.1)  # a power of two: dividing by it is exact
        level = np.maximum(np.frexp(side / cell)[1], 0)  # side < 2**level cells
        levels = int(level.max()) + 1
        kinds, kind = np.unique(labels, return_inverse=True)
        number = kind * levels + level
        columns, rows = ((boxes[:, :2] - corner).T // (cell * 2.0**level)).astype(np.int64)
        keys = number * _GRID_STRIDE + rows * _ROW_STRIDE + columns
        order = np.argsort(keys, kind="stable")
        starts = np.searchsorted(keys[order], np.arange(len(kinds) * levels + 1) * _GRID_STRIDE)
        return cls(order, keys[order], starts, levels, float(cell))


@njit(cache=True, nogil=True)
def _suppress_in_order(boxes, turns, keys, starts, levels, cell, corner, limit, alive):
    """Clear `alive` (n,) where a box is removed; all are in the order of the grid."""
    for p in turns:
        if not alive[p]:
            continue
        side = max(boxes[p, 2] - boxes[p, 0], boxes[p, 3] - boxes[p, 1])
        label = keys[p] // (_GRID_STRIDE * levels)
        for level in range(levels):
            grid = label * levels + level
            size = cell * 2.0**level  # this level's boxes are at least half as long
            too_small = size * _ROUNDING_SLACK < limit * side
            too_large = level > 0 and side * _ROUNDING_SLACK < limit * size / 2
            if starts[grid] == starts[grid + 1] or too_small or too_large:
                continue
            reach = size * _ROUNDING_SLACK
            left = max(int(np.floor((boxes[p, 0] - corner[0] - reach) / size)), 0)
            right = min(int(np.floor((boxes[p, 2] - corner[0]) / size)), _ROW_STRIDE - 1)
            top = max(int(np.floor((boxes[p, 1] - corner[1] - reach) / size)), 0)
            bottom = min(int(np.floor((boxes[p, 3] - corner[1]) / size)), _ROW_STRIDE - 1)
            if bottom - top > starts[grid + 1] - starts[grid]:
                _suppress_range(boxes, p, starts[grid], starts[grid + 1], limit, alive)
                continue
            for row in range(top, bottom + 1):
                here = grid * _GRID_STRIDE + row * _ROW_STRIDE
                begin = _lower_bound(keys, starts[grid], starts[grid + 1], here + left)
                end = begin
                while end < starts[grid + 1] and keys[end] <= here + right:
                    end += 1
                _suppress_range(boxes, p, begin, end, limit, alive)


def _suppress_in_numpy(
    boxes: npt.NDArray[np.float64], labels: npt.NDArray[Any], order: Indices, limit: float
) -> Indices:
    """Indices of the boxes that remain: as `_suppress_in_order`, each against all that follow."""
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        mine, theirs = boxes[best], boxes[order]
        extent = np.minimum(mine[2:], theirs[:, 2:]) - np.maximum(mine[:2], theirs[:, :2])
        shared = np.where((extent > 0).all(1), extent.prod(1), 0.0)
        union = (mine[2:] - mine[:2]).prod() + (theirs[:, 2:] - theirs[:, :2]).prod(1) - shared
        share = np.divide(shared, union, out=np.zeros(len(order)), where=union > 0)
        order = order[(share <= limit) | (labels[order] != labels[best])]
    return np.array(kept, np.int64)


@njit(cache=True, nogil=True)
def _suppress_range(boxes, p, begin, end, limit, alive):
    """Remove those of boxes begin … end − 1 that share more than `limit` with box p."""
    x1, y1, x2, y2 = boxes[p]
    area = (x2 - x1) * (y2 - y1)
    for q in range(begin, end):
        if not alive[q] or q == p:
            continue
        width = min(x2, boxes[q, 2]) - max(x1, boxes[q, 0])
        height = min(y2, boxes[q, 3]) - max(y1, boxes[q, 1])
        if width <= 0 or height <= 0:
            continue
        shared = width * height
        other = (boxes[q, 2] - boxes[q, 0]) * (boxes[q, 3] - boxes[q, 1])
        union = area + other - shared
        if union > 0 and shared / union > limit:
            alive[q] = False


@njit(cache=True, nogil=True)
def _find_overlaps(found, boxes, keys, starts, levels, cell, corner, limit):
    """The pairs: ends (n,), places of true boxes in the grid's order (p,), overlaps (p,)."""
    ends = np.empty(len(found), np.int64)
    places, shares, used = np.empty(1024, np.int64), np.empty(1024, np.float64), 0
    for i in range(len(found)):
        x1, y1, x2, y2 = found[i]
        side = max(x2 - x1, y2 - y1)
        for level in range(levels):
            begin, end = starts[level], starts[level + 1]
            size = cell * 2.0**level  # this level's boxes are at least half as long
            too_small = size * _ROUNDING_SLACK < limit * side
            too_large = level > 0 and side * _ROUNDING_SLACK < limit * size / 2
            if begin == end or too_small or too_large:
                continue
            reach = size * _ROUNDING_SLACK
            left = min(max(int(np.floor((x1 - corner[0] - reach) / size)), 0), _ROW_STRIDE - 1)
            right = max(min(int(np.floor((x2 - corner[0]) / size)), _ROW_STRIDE - 1), -1)
            top = max(int(np.floor((y1 - corner[1] - reach) / size)), 0)
            bottom = min(int(np.floor((y2 - corner[1]) / size)), _ROW_STRIDE - 1)
            every = bottom - top >= end - begin  # fewer boxes than rows: look at all of them
            if every:
                top = bottom
            for row in range(top, bottom + 1):
                low, high = begin, end
                if not every:
                    low = _lower_bound(
                        keys, begin, end, level * _GRID_STRIDE + row * _ROW_STRIDE + left
                    )
                    high = _lower_bound(
                        keys, low, end, level * _GRID_STRIDE + row * _ROW_STRIDE + right + 1
                    )
                if used + high - low > len(places):
                    room = 2 * (used + high - low)
                    places, shares = _enlarged(places, room), _enlarged(shares, room)
                for place in range(low, high):
                    share = _box_iou(x1, y1, x2, y2, boxes[place])
                    if share >= limit:
                        places[used], shares[used] = place, share
                        used += 1
        ends[i] = used
    return ends, places[:used], shares[:used]


def _overlaps_in_numpy(mine: Values, theirs: Values) -> OverlapPairs:
    """As `overlap_pairs`, each with all: the same pairs, to the bit."""
    low = np.maximum(mine[:, None, :2], theirs[None, :, :2])
    extent = np.minimum(mine[:, None, 2:], theirs[None, :, 2:]) - low
    shared = np.where((extent > 0).all(axis=2), extent[..., 0] * extent[..., 1], 0.0)
    my_area, their_area = ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) for b in (mine, theirs))
    union = my_area[:, None] + their_area[None] - shared
    share = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    rows, columns = np.nonzero(share >= MIN_IOU)
    starts = np.searchsorted(rows, np.arange(len(mine) + 1))
    return OverlapPairs(starts, columns, share[rows, columns], len(theirs))


@njit(cache=True, nogil=True)
def _lower_bound(keys, low, high, key):
    """The first index from `low` on whose key is not below `key`; `high` if there is none."""
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _box_iou(x1, y1, x2, y2, box):
    width = min(x2, box[2]) - max(x1, box[0])
    height = min(y2, box[3]) - max(y1, box[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    union = (x2 - x1) * (y2 - y1) + (box[2] - box[0]) * (box[3] - box[1]) - shared
    return shared / union if union > 0 else 0.0  # areas below the smallest number are 0


@njit(cache=True, nogil=True)
def _enlarged(values, length):
    new = np.empty(length, values.dtype)
    new[: len(values)] = values
    return new


@njit(cache=True, nogil=True)
def _match_in_order(starts, true, iou, turns, level, mine, theirs, free, taken):
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
