"""Drawn shapes as boxes and regions of the image's pixels.

napari's pixels have their centres at whole numbers, boxes and regions their edges: half a pixel
lies between. `detection_shapes.corners_of` goes the one way, `points_of` the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.annotations import boxes_of_shapes
from napari_beerlanet.core.regions import Region

Plane = tuple[int, ...]
"""The place in a stack, one number per leading axis."""

_HALF = 0.5


@dataclass(frozen=True)
class Boxes:
    """Boxes (n, 4) around shapes, which of them they are (n,), their planes (n, leading axes).

    `notes`: sentences on shapes that are no boxes.
    """

    xyxy: npt.NDArray[np.float64]
    which: npt.NDArray[np.int64]
    planes: npt.NDArray[np.int64]
    notes: list[str] = field(default_factory=list)


def points_of(shape: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(k, 2) x, y in the image's pixels of a shape (k, D) in napari's coordinates."""
    return np.asarray(shape, np.float64)[:, :-3:-1] + _HALF


def plane_of(shape: npt.NDArray[Any]) -> Plane:
    """The plane that a shape (k, D) lies in."""
    return tuple(np.rint(np.asarray(shape)[0, :-2]).astype(int).tolist())


def read_boxes(shapes: Sequence[npt.NDArray[Any]], kinds: Sequence[str]) -> Boxes:
    """Boxes around shapes as napari's layer has them, in their order."""
    plain = np.array([kind == "rectangle" for kind in kinds], bool)
    which = np.flatnonzero(plain)
    xyxy = _around([shapes[k] for k in which])
    real = (xyxy[:, 2:] > xyxy[:, :2]).all(axis=1) & np.isfinite(xyxy).all(axis=1)
    others = np.setdiff1d(np.arange(len(shapes)), which[real])
    drawn = boxes_of_shapes([points_of(shapes[k]) for k in others], [kinds[k] for k in others])
    places = np.concatenate([which[real], others[drawn.which]])
    order = np.argsort(places)
    found = places[order]
    planes = [plane_of(shapes[k]) for k in found]
    leading = shapes[0].shape[1] - 2 if len(shapes) else 0
    return Boxes(
        np.concatenate([xyxy[real], drawn.xyxy])[order],
        found,
        np.array(planes, np.int64).reshape(len(found), leading),
        drawn.notes,
    )


def read_regions(
    shapes: Sequence[npt.NDArray[Any]], kinds: Sequence[str], plane: Plane
) -> tuple[list[Region], list[str]]:
    """Regions of one plane, and sentences on shapes that enclose nothing."""
    regions, notes = [], []
    for shape, kind in zip(shapes, kinds, strict=True):
        if plane_of(shape) != plane:
            continue
        try:
            regions.append(Region.of_shape(points_of(shape), kind))
        except ValueError as error:
            notes.append(str(error))
    return regions, list(dict.fromkeys(notes))


def region_shape(region: Region, plane: Plane) -> npt.NDArray[np.float64]:
    """(k, D) corners of a region in napari's coordinates."""
    planar = region.points[:, ::-1] - _HALF
    leading = np.broadcast_to(np.array(plane, np.float64), (len(planar), len(plane)))
    return np.concatenate([leading, planar], axis=1)


def _around(rectangles: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """(n, 4) boxes of rectangles (4, D) each, all at once."""
    if not len(rectangles):
        return np.empty((0, 4))
    corners = np.asarray(rectangles, np.float64)[:, :, :-3:-1] + _HALF
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
