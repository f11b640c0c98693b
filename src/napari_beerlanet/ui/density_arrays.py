"""Arrays for layers out of a fit: in memory for an image that is small, otherwise lazy.

Lazy arrays are dask's: a block is worked out when it is looked at, so neither a stack nor a slide
is ever in memory. The layers of all components share the work on a block.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.decompose import Decomposition
from napari_beerlanet.core.images import within_range
from napari_beerlanet.core.lookup import DensityLevels
from napari_beerlanet.core.slidecolours import SlideColours
from napari_beerlanet.ui.fitting import Fitted, Target

Data = Any
"""What a layer takes: an array, or a list of them for the levels of a multiscale image."""

_TILE = 1024
_KEPT = 1 << 28  # bytes of densities that are kept for the next layer


class Densities:
    """Densities (r, h, w) of blocks under one fit; the last ones are kept."""

    def __init__(self, decomposition: Decomposition) -> None:
        self.decomposition = decomposition
        self._kept: OrderedDict[Any, npt.NDArray[np.float32]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: Any, pixels: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Of pixels (h, w, 3 or 4), which are those of this key."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        found = self.decomposition.densities_of(within_range(pixels))
        with self._lock:
            self._kept[key] = found
            while sum(planes.nbytes for planes in self._kept.values()) > _KEPT:
                self._kept.popitem(last=False)
        return found


def density_data(fitted: Fitted) -> list[Data]:
    """For each of the r components what its layer shows."""
    d = fitted.decomposition
    if not fitted.target.lazy:
        return list(d.densities)
    if fitted.seen is not None and fitted.target.plane.dtype == np.uint8:
        return _slide_data(fitted, fitted.seen)
    shared = Densities(d)

    def one(component: int) -> Data:
        def work(pixels: npt.NDArray[Any], key: Any) -> npt.NDArray[Any]:
            return shared.of(key, pixels)[component]

        return _mapped(fitted.target, work, np.dtype(np.float32))

    return [one(i) for i in range(len(d.active))]


def _slide_data(fitted: Fitted, seen: SlideColours) -> list[Data]:
    """Look-ups at every level; what a look at the whole needs is worked out here and now."""
    lazy = DensityLevels(seen.levels, fitted.decomposition)
    if seen.palette is not None:
        lazy.table.know(seen.palette)
    coarsest = len(seen.levels) - 1
    height, width = seen.levels[coarsest].shape[:2]
    high, wide = lazy.chunk(coarsest)
    for row in range(-(-height // high)):
        for column in range(-(-width // wide)):
            lazy.block(coarsest, row, column)
    return [
        _single([lazy.dask(k, i) for k in range(len(seen.levels))])
        for i in range(len(fitted.decomposition.active))
    ]


def _single(levels: list[Any]) -> Data:
    return levels if len(levels) > 1 else levels[0]


def reconstruction_data(fitted: Fitted, components: Sequence[int]) -> Data:
    """The image from just these components, (…, 3) of its own type."""
    d = fitted.decomposition
    if not fitted.target.lazy:
        return d.reconstruct(components)
    keep = list(components)

    def work(pixels: npt.NDArray[Any], key: Any) -> npt.NDArray[Any]:
        return d.reconstruct_of(within_range(pixels), keep)

    return _mapped(fitted.target, work, fitted.target.plane.dtype, colours=True)


def residual_data(fitted: Fitted) -> Data:
    """How far model and image are apart in OD, over the three colours, float32."""
    d = fitted.decomposition
    if not fitted.target.lazy:
        return np.linalg.norm(d.residual(), axis=-1)

    def work(pixels: npt.NDArray[Any], key: Any) -> npt.NDArray[Any]:
        return np.linalg.norm(d.residual_of(within_range(pixels)), axis=-1)

    return _mapped(fitted.target, work, np.dtype(np.float32))


def _mapped(
    target: Target,
    work: Callable[[npt.NDArray[Any], Any], npt.NDArray[Any]],
    dtype: np.dtype[Any],
    colours: bool = False,
) -> Data:
    """The work done on every plane of every block of every level of the target, lazily."""
    plane = target.plane
    if target.is_slide:
        levels = [as_dask(level) for level in plane.pyramid]
    else:
        levels = [
            as_dask(plane.levels[k] if target.whole_stack else plane.lazy(k))
            for k in range(len(plane.levels))
        ]
    return _single([_map_level(k, level, work, dtype, colours) for k, level in enumerate(levels)])


def _map_level(k: int, level: da.Array, work: Any, dtype: np.dtype[Any], colours: bool) -> da.Array:
    def on_block(block: npt.NDArray[Any], block_id: Any = None) -> npt.NDArray[Any]:
        tail = (3,) if colours else ()
        out = np.empty((*block.shape[:-1], *tail), dtype)
        for place in np.ndindex(block.shape[:-3]):
            out[place] = work(block[place], (k, block_id, place))
        return out

    last = level.ndim - 1
    shape = {"chunks": (*level.chunks[:-1], (3,))} if colours else {"drop_axis": last}
    ndim = level.ndim if colours else last
    name = f"beerlanet-{uuid.uuid4().hex}"  # dask would read every array in sight to make one up
    meta = np.empty((0,) * ndim, dtype)
    return da.map_blocks(on_block, level, dtype=dtype, meta=meta, name=name, **shape)


def as_dask(array: Any) -> da.Array:
    """The array (…, H, W, 3 or 4) in dask's blocks, each with all its colours."""
    if isinstance(array, da.Array):
        return array.rechunk({array.ndim - 1: -1})
    leading = (1,) * (array.ndim - 3)
    sides = tuple(min(_TILE, n) for n in array.shape[-3:-1])
    return da.from_array(array, chunks=(*leading, *sides, array.shape[-1]), name=False)
