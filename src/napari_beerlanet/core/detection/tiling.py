"""Tiles of an image at the network's working resolution, and merging of their detections.

A tile is a rectangle of the image's own pixels, all of one size, resized to one working size. Tiles
overlap by more than an object, so every object lies whole in one of them; what a border cuts is
dropped where another tile shows it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.geometry import area, intersection
from napari_beerlanet.core.boxes.geometry import iou as overlap_of
from napari_beerlanet.core.boxes.matching import non_max_suppression
from napari_beerlanet.core.common.rectangle import Rectangle, tile_starts
from napari_beerlanet.core.detection.ultralytics_api import cv2
from napari_beerlanet.core.images.rgb import PADDING_GREY, fill_transparent

BoxArray = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

_BORDER_FRACTION = 0.01  # of a tile's side: a box that ends so near an inner border is cut by it
_MIN_CUT_INSIDE = 0.6  # of a cut box that lies inside a whole one: they are one object
_DUPLICATE_IOU = 0.45  # intersection over union from which boxes of two tiles are one object
_BLOCK, _MIN_BLOCK = 8, 3  # working pixels, less than objects have, and image pixels of a block
_MIN_CONTRAST = 6.0  # grey levels by which a block with a part of an object differs from others


@dataclass(frozen=True)
class TileGrid:
    """Tiles of an image of `shape` (H, W), row by row, each to be resized to `size` (h, w)."""

    shape: tuple[int, int]
    tiles: list[Rectangle]
    size: tuple[int, int]

    @property
    def pixel_steps(self) -> tuple[float, float]:
        """Image pixels per working pixel along x and y."""
        first = self.tiles[0]
        return first.width / self.size[1], first.height / self.size[0]

    def overlapping(self, number: int) -> list[int]:
        """Return the numbers of all tiles that overlap one, itself too."""
        down, across = self._overlaps
        row, column = divmod(number, len(across))
        return [r * len(across) + c for r in down[row] for c in across[column]]

    @cached_property
    def _overlaps(self) -> tuple[list[range], list[range]]:
        """For each row and for each column of tiles, those that overlap it."""
        first = self.tiles[0]
        columns = sum(tile.y == first.y for tile in self.tiles)
        across = _overlapping_ranges([tile.x for tile in self.tiles[:columns]], first.width)
        down = _overlapping_ranges([tile.y for tile in self.tiles[::columns]], first.height)
        return down, across


def plan_tiles(shape: tuple[int, int], scale: float, tile: int, overlap: int) -> TileGrid:
    """Tiles of at most `tile` working pixels that overlap by at least `overlap` of them.

    `scale` is working pixels per image pixel. An image that fits in a quarter more than a tile is
    left whole.
    """
    sides, rows = [], []
    whole = max(shape) * scale <= 1.25 * tile
    for length in shape:
        side = length if whole or length * scale <= tile else round(tile / scale)
        sides.append(max(min(side, length), 1))
        rows.append(tile_starts(length, sides[-1], round(overlap / scale)))
    tiles = [Rectangle(x, y, sides[1], sides[0]) for y in rows[0] for x in rows[1]]
    height, width = (max(round(side * scale), 1) for side in sides)
    return TileGrid(shape, tiles, (height, width))


def busiest_windows(pixels: npt.NDArray[np.uint8], side: int, count: int) -> list[tuple[int, int]]:
    """Corners (y, x) of the whole image, or of the `count` windows of `side` with most detail."""
    height, width = pixels.shape[:2]
    if 1.3 * side >= max(height, width):
        return [(0, 0)]
    step = max(side // 16, 1)
    thumbnail = pixels[::step, ::step, :3].astype(np.float32).mean(2)
    cells = max(side // step, 1)
    rows, columns = (max(n // cells, 1) for n in thumbnail.shape)
    whole = thumbnail[: rows * cells, : columns * cells]
    spread = whole.reshape(rows, -1, columns, whole.shape[1] // columns).std((1, 3))
    best = np.argsort(-spread.ravel(), kind="stable")[:count]
    corners = [divmod(int(k), columns) for k in best]
    return [
        (min(i * cells * step, max(height - side, 0)), min(j * cells * step, max(width - side, 0)))
        for i, j in corners
    ]


def is_empty(pixels: npt.NDArray[np.uint8], scale: float) -> bool:
    """Whether an image (H, W, 3 or 4) shows nothing at a scale but noise and uneven light."""
    step = max(int(1 / scale), 1)
    part = np.ascontiguousarray(fill_transparent(np.asarray(pixels[::step, ::step])))
    side = max(_BLOCK / scale, _MIN_BLOCK) / step
    height, width = (max(round(n / side), 1) for n in part.shape[:2])
    blocks = cv2.resize(part, (width, height), interpolation=cv2.INTER_AREA).astype(np.float32)
    # Uneven light has no third difference, and what is below a contrast none of eight times that.
    if np.abs(np.diff(blocks, 3, axis=1)).max(initial=0) > 8 * _MIN_CONTRAST:
        return False
    y, x = (axis.ravel() / max(height, width) for axis in np.indices((height, width)))
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], 1)
    levels = blocks.reshape(-1, 3)
    light = terms @ np.linalg.lstsq(terms, levels, rcond=None)[0]
    return bool(np.abs(levels - light).max() < _MIN_CONTRAST)


def read_tile(
    pixels: npt.NDArray[np.uint8], tile: Rectangle, size: tuple[int, int]
) -> npt.NDArray[np.uint8]:
    """A tile of pixels (H, W, 3 or 4) at its working `size` (h, w), RGB; hidden pixels are grey."""
    part = fill_transparent(np.asarray(pixels[tile.slices]))
    if part.shape[:2] == tuple(size):
        return np.ascontiguousarray(part)
    how = cv2.INTER_AREA if size[0] < part.shape[0] else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(np.ascontiguousarray(part), size[::-1], interpolation=how))


def pad_tile(
    tile: npt.NDArray[np.uint8], stride: int = 32
) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    """A tile (h, w, 3) amid grey, its sides multiples of `stride`; and where it begins (y, x)."""
    height, width = (-(-side // stride) * stride for side in tile.shape[:2])
    top, left = (height - tile.shape[0]) // 2, (width - tile.shape[1]) // 2
    whole = np.full((height, width, 3), PADDING_GREY, np.uint8)
    whole[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    return whole, (top, left)


def to_image_boxes(grid: TileGrid, tile: Rectangle, xyxy: BoxArray) -> BoxArray:
    """Boxes (n, 4) of a tile's working pixels in the image's own, clipped to the tile."""
    step = np.array([*grid.pixel_steps, *grid.pixel_steps], np.float32)
    corner = np.array([tile.x, tile.y, tile.x, tile.y], np.float32)
    x1, y1, x2, y2 = tile.corners
    inside = np.clip(xyxy * step + corner, (x1, y1, x1, y1), (x2, y2, x2, y2))
    return np.asarray(inside, dtype=np.float32)


def merge_tiles(
    grid: TileGrid,
    xyxy: BoxArray,
    scores: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    owner: Indices,
    iou: float,
) -> Indices:
    """Indices, best first, of the boxes (n, 4) in image pixels that are left of all tiles'.

    `owner` (n,) is the number of the tile in which each was detected.
    """
    keep = np.ones(len(xyxy), bool)
    cut = _touches_inner_border(grid, xyxy, owner)
    for a, b in _overlapping_pairs(grid, xyxy, owner):
        _drop_cut_boxes(a, b, xyxy, scores, cut, keep)
        _drop_cut_boxes(b, a, xyxy, scores, cut, keep)
        _drop_duplicates(a[keep[a]], b[keep[b]], xyxy, scores, labels, keep)
    left = np.flatnonzero(keep)
    order = non_max_suppression(xyxy[left], scores[left], labels[left], iou)
    return np.asarray(left[order], dtype=np.int64)


def _touches_inner_border(grid: TileGrid, xyxy: BoxArray, owner: Indices) -> npt.NDArray[np.bool_]:
    """(n,): whether a box ends at a border of its tile that is not the image's."""
    corners = np.array([t.corners for t in grid.tiles])[owner] if len(owner) else np.zeros((0, 4))
    height, width = grid.shape
    inner = corners != [0, 0, width, height]
    first = grid.tiles[0]
    near = np.array([first.width, first.height] * 2) * _BORDER_FRACTION
    return np.asarray((inner & (np.abs(xyxy - corners) < near)).any(1))


def _overlapping_pairs(
    grid: TileGrid, xyxy: BoxArray, owner: Indices
) -> Iterator[tuple[Indices, Indices]]:
    """For each two tiles that overlap, indices of either's boxes that reach into the other."""
    order = np.argsort(owner, kind="stable")
    numbers, first = np.unique(owner[order], return_index=True)
    of = dict(zip(numbers.tolist(), np.split(order, first[1:]), strict=True)) if len(order) else {}
    tiles = grid.tiles
    for a in of:
        for b in grid.overlapping(a):
            if b > a and b in of:
                yield _boxes_in_tile(of[a], xyxy, tiles[b]), _boxes_in_tile(of[b], xyxy, tiles[a])


def _overlapping_ranges(starts: list[int], side: int) -> list[range]:
    """For each piece of a side the numbers of those that overlap it."""
    low = np.searchsorted(starts, np.array(starts) - side, "right")
    high = np.searchsorted(starts, np.array(starts) + side, "left")
    return [range(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]


def _boxes_in_tile(which: Indices, xyxy: BoxArray, tile: Rectangle) -> Indices:
    """Those of the boxes of which at least a part lies in a tile."""
    x1, y1, x2, y2 = tile.corners
    left, top, right, bottom = xyxy[which].T
    here = (left < x2) & (right > x1) & (top < y2) & (bottom > y1)
    return np.asarray(which[here], dtype=np.int64)


def _drop_cut_boxes(
    a: Indices,
    b: Indices,
    xyxy: BoxArray,
    scores: npt.NDArray[np.float32],
    cut: npt.NDArray[np.bool_],
    keep: npt.NDArray[np.bool_],
) -> None:
    """Drop those of boxes `a` that are cut and of which `b` has the whole."""
    cut_boxes, whole = a[cut[a] & keep[a]], b[~cut[b]]
    if len(cut_boxes) and len(whole):
        # Of the cut box's own area: a small object in a large one's cut box is not its whole.
        min_area = _MIN_CUT_INSIDE * area(xyxy[cut_boxes])[:, None]
        inside = intersection(xyxy[cut_boxes], xyxy[whole]) >= min_area
        # A doubtful box is no reason to drop a sure one.
        inside &= scores[whole][None] >= 0.5 * scores[cut_boxes][:, None]
        keep[cut_boxes[inside.any(1)]] = False


def _drop_duplicates(
    a: Indices,
    b: Indices,
    xyxy: BoxArray,
    scores: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    keep: npt.NDArray[np.bool_],
) -> None:
    """Of two boxes that are each other's nearest in two tiles' views, drop the less sure one.

    Two views of a small object differ by more than `iou` allows, which is for one view.
    """
    if not len(a) or not len(b):
        return
    shared = overlap_of(xyxy[a], xyxy[b]) * (labels[a][:, None] == labels[b])
    nearest = shared.argmax(1)
    rows = np.arange(len(a))
    mutual = (shared.argmax(0)[nearest] == rows) & (shared[rows, nearest] >= _DUPLICATE_IOU)
    first, second = a[mutual], b[nearest[mutual]]
    keep[np.where(scores[first] >= scores[second], second, first)] = False
