"""A made-up slide with very many cells: tissue with glands, four kinds, drawn when looked at."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from scipy import ndimage

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.spatial_index import Bounds, DynamicSpatialIndex, SpatialIndex

NAMES = ["epithelium", "lymphocyte", "stroma", "mitosis"]
_SIDES = np.array([46.0, 28.0, 38.0, 52.0])  # pixels
_FIELD = 512  # cells of the fields that say where what is


def _field(rng: np.random.Generator, size: float) -> npt.NDArray[np.float32]:
    """Smooth noise from 0 to 1 of `_FIELD` cells each way."""
    noise = ndimage.gaussian_filter(rng.standard_normal((_FIELD, _FIELD)), size, mode="wrap")
    rank = np.argsort(np.argsort(noise, axis=None)).reshape(noise.shape)
    return (rank / rank.size).astype(np.float32)


def tissue(side: int, count: int, seed: int = 0) -> tuple[Detections, npt.NDArray[np.float32]]:
    """`count` detections on a slide of `side` pixels each way, and where tissue is (512, 512)."""
    rng = np.random.default_rng(seed)
    middle = np.hypot(*(np.indices((_FIELD, _FIELD)) / _FIELD - 0.5))
    where = np.clip(4 * (_field(rng, 30) - 0.1 - 1.2 * middle**1.5), 0, 1)
    glands = np.abs(_field(rng, 5) - 0.5) < 0.12
    inflamed = _field(rng, 14) > 0.86
    kinds = np.stack(
        [0.25 + 3.0 * glands, 0.12 + 4.0 * inflamed, 0.6 + 0.0 * where, 0.02 + 0.03 * glands]
    )
    rate = (kinds * where).reshape(4, -1)
    pick = rng.choice(rate.size, count, p=rate.ravel() / rate.sum())
    labels, cell = np.divmod(pick, _FIELD * _FIELD)
    at = np.stack([cell % _FIELD, cell // _FIELD], axis=1) + rng.random((count, 2))
    centre = at * (side / _FIELD)
    half = _SIDES[labels][:, None] * rng.uniform(0.38, 0.62, (count, 2))
    boxes = np.clip(np.concatenate([centre - half, centre + half], axis=1), 0, side)
    scores = np.clip(rng.beta(5, 2, count), 0.01, 1)
    found = Detections(
        boxes.astype(np.float32),
        labels,
        scores,
        NAMES,
        columns={"OD 1 mean": rng.gamma(4, 0.1, count), "OD 2 mean": rng.gamma(3, 0.1, count)},
        image_shape=(side, side),
        pixel_size=(0.25, 0.25),
        report={"model": "made up"},
    )
    return found, where.astype(np.float32)


class Slide:
    """One level of the slide's picture, (h, w, 3) uint8, every `step`th pixel; made when asked."""

    dtype, ndim = np.dtype(np.uint8), 3

    def __init__(
        self, where: npt.NDArray[np.float32], index: SpatialIndex, side: int, step: int
    ) -> None:
        self._where, self._index, self._side, self._step = where, index, side, step
        self.shape = (-(-side // step), -(-side // step), 3)

    def __getitem__(self, key: Any) -> npt.NDArray[np.uint8]:
        key = (*(key if isinstance(key, tuple) else (key,)), slice(None), slice(None))[:3]
        rows, columns = (
            np.arange(n)[k] * self._step for n, k in zip(self.shape, key[:2], strict=False)
        )
        y, x = (np.clip(v * _FIELD / self._side, 0, _FIELD - 1) for v in (rows, columns))
        much = ndimage.map_coordinates(self._where, np.meshgrid(y, x, indexing="ij"), order=1)
        glass, pink = np.array([243, 240, 243.0]), np.array([226, 172, 205.0])
        picture = glass + np.sqrt(much)[..., None] * (pink - glass)
        if self._step <= 16 and rows.size and columns.size:
            (self._nuclei if self._step <= 4 else self._threshold_dots)(picture, rows, columns)
        return np.clip(picture, 0, 255).astype(np.uint8)[..., key[2]]

    def _boxes_in(self, window: Bounds) -> npt.NDArray[np.float32]:
        dynamic = DynamicSpatialIndex()
        dynamic.use_grid(self._index)
        boxes = self._index.xyxy
        return boxes[dynamic.query(window, boxes, np.zeros(len(boxes), bool))]

    def _threshold_dots(self, picture: Any, rows: Any, columns: Any) -> None:
        """A dark spot in the middle of each box."""
        window = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        boxes = self._boxes_in(window)
        x = np.clip(np.searchsorted(columns, boxes[:, ::2].mean(axis=1)), 0, len(columns) - 2)
        y = np.clip(np.searchsorted(rows, boxes[:, 1::2].mean(axis=1)), 0, len(rows) - 2)
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            picture[y + down, x + right] = (130, 95, 160)

    def _nuclei(self, picture: Any, rows: Any, columns: Any) -> None:
        """Dark ellipses where the boxes are."""
        window = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        for x1, y1, x2, y2 in self._boxes_in(window):
            top, bottom = np.searchsorted(rows, (y1, y2))
            left, right = np.searchsorted(columns, (x1, x2))
            v = (rows[top:bottom] - (y1 + y2) / 2) / max((y2 - y1) * 0.4, 1)
            u = (columns[left:right] - (x1 + x2) / 2) / max((x2 - x1) * 0.4, 1)
            inside = np.clip(2.5 * (1 - np.hypot(*np.meshgrid(v, u, indexing="ij"))), 0, 1)
            part = picture[top:bottom, left:right]
            part += inside[..., None] * (np.array([96, 62, 140.0]) - part) * 0.85


def levels(side: int, found: Detections, where: npt.NDArray[np.float32]) -> list[Any]:
    """The slide's pyramid as dask arrays, the finest first."""
    index = SpatialIndex(found.xyxy)
    made = [Slide(where, index, side, step) for step in (1, 2, 4, 8, 16, 32, 64)]
    return [da.from_array(level, chunks=(512, 512, 3), asarray=True) for level in made]


def plain(side: int) -> list[Any]:
    """A pyramid of one colour that costs nothing to read."""
    return [
        np.broadcast_to(np.uint8([226, 190, 210]), (side // step, side // step, 3))
        for step in (1, 2, 4, 8, 16, 32, 64)
    ]
