"""Where there are more boxes than can be drawn: an image layer that shows how dense they lie.

The picture is made beside the GUI, of the whole image at once, so it need not follow the view. Its
opacity does: it comes up as the boxes in view become too many, while their edges fade.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from napari.utils.transforms import Affine
from qtpy.QtCore import QTimer

from napari_beerlanet.core.heatmap import HeatGrid, Picture, heat_map
from napari_beerlanet.core.progress import Report
from napari_beerlanet.ui.detection_choice import BoxChoice
from napari_beerlanet.ui.detection_store import Chosen
from napari_beerlanet.ui.layers import mark, put_above, spatial
from napari_beerlanet.ui.tasks import Task

ROLE = "cell density"
FROM = 10_000
"""Chosen boxes from which on there is a picture of their density."""

_FADED = 8.0  # times as many boxes in view as can be drawn: only the density is left
_OPACITY = 0.7
_WHILE = 1000  # milliseconds between pictures while boxes come
_ANEW = 1.5  # times as many boxes as before: the scale of opacity is found again


def fade_of(near: int, most: int) -> float:
    """From 0, all boxes in view are drawn, to 1, none: by how many times they are too many."""
    if near <= most:
        return 0.0
    return float(min(np.log(near / most) / np.log(_FADED), 1.0))


class _Asked(NamedTuple):
    """Whose picture was asked for: boxes, which of them (n,), their plane, colours (k, 3)."""

    choice: BoxChoice
    mask: npt.NDArray[np.bool_]
    index: tuple[int, ...]
    colours: npt.NDArray[Any]

    def same(self, other: _Asked) -> bool:
        """A mask is made anew when anything changes."""
        if self.mask is not other.mask or self.index != other.index:
            return False
        return np.array_equal(self.colours, other.colours)

    def grown_from(self, other: _Asked) -> bool:
        """Whether boxes have come to those of the other."""
        return self.choice is other.choice and len(self.mask) > len(other.mask)


class HeatLayer:
    """The image layer of the density of one `DetectionLayer`, made when it is first needed.

    `ready` is called when a picture has come. A layer that the user deletes does not come back;
    whether it is visible, and how opaque at most, is the user's to say.
    """

    def __init__(self, viewer: Any, shapes: Shapes, source: Image, ready: Callable[[], None]):
        self._viewer, self._shapes, self._ready = viewer, shapes, ready
        self._shape, self._name = _image_shape(source), f"{source.name} · cell density"
        self._source = source
        self.layer: Image | None = None
        self.refused = False
        self._task = Task()
        self._asked: _Asked | None = None
        self._begun: _Asked | None = None
        self._later = QTimer()
        self._later.setSingleShot(True)
        self._later.setInterval(_WHILE)
        self._later.timeout.connect(self._begin_late)
        self._has: BoxChoice | None = None
        self._full: tuple[BoxChoice | None, int, float | None] = (None, 0, None)
        self._fade, self._base, self._ours = 0.0, _OPACITY, False
        shapes.events.visible.connect(self._go_along)
        viewer.layers.events.removed.connect(self._removed)

    def shows(self, choice: BoxChoice) -> bool:
        """Whether the layer has a picture of these boxes, maybe of those a moment ago."""
        return self.layer is not None and self._has is choice

    def expected(self, choice: BoxChoice) -> bool:
        """Whether there is a picture of these boxes, or soon will be."""
        if self.refused:
            return False
        return self.shows(choice) or (self._asked is not None and self._asked.choice is choice)

    def ask(
        self, choice: BoxChoice, chosen: Chosen, colours: npt.NDArray[Any], index: tuple[int, ...]
    ) -> None:
        """Have the chosen boxes' picture made, if it is not; `colours` (k, 3) from 0 to 255."""
        asked = _Asked(choice, choice.mask(chosen), index, colours)
        if self.refused or (self._asked is not None and asked.same(self._asked)):
            return
        self._asked = asked
        if not self._task.running:  # a slider that moves must not keep it from ever being done
            self._begin_newest()

    @property
    def waiting(self) -> bool:
        """Whether a picture is being made, or soon will be."""
        return self._task.running or self._later.isActive()

    def _begin_newest(self) -> None:
        """Make the picture that was asked for last; of boxes that just come, in a while."""
        asked, had = self._asked, self._begun
        if asked is None or (had is not None and asked.same(had)):
            return
        if self.layer is not None and had is not None and asked.grown_from(had):
            if not self._later.isActive():
                self._later.start()
        else:
            self._begin(asked)

    def _begin_late(self) -> None:
        if self._asked is not None and not self._task.running:
            self._begin(self._asked)

    def _begin(self, asked: _Asked) -> None:
        self._begun = asked
        self._later.stop()
        store, shape, full = asked.choice.store, self._shape, self._scale_of(asked.choice)
        mask, colours, xyxy, labels = asked.mask, asked.colours, store.xyxy, store.labels

        def work(report: Report) -> tuple[HeatGrid, Picture, float]:
            rows = np.flatnonzero(mask[: len(xyxy)])
            grid = HeatGrid.over(shape, xyxy)
            return grid, *heat_map(grid, xyxy[rows], labels[rows], colours, full)

        self._task.start(work, lambda made: self._done(asked, *made))

    def _done(self, asked: _Asked, grid: HeatGrid, picture: Picture, full: float) -> None:
        if self._scale_of(asked.choice) is None:
            self._full = asked.choice, len(asked.choice.store), full
        if not self.refused and self._asked is not None and self._asked.choice is asked.choice:
            self._put(asked, grid, picture)
        self._begin_newest()

    def fade(self, by: float) -> None:
        """Show as much of it, from 0, nothing, to 1."""
        self._fade = by
        if self.layer is not None:
            self._set("opacity", self._base * by)

    def close(self) -> None:
        """Take the layer away, and make no further picture."""
        self._task.close()
        self._later.stop()
        self._shapes.events.visible.disconnect(self._go_along)
        self._viewer.layers.events.removed.disconnect(self._removed)
        layer, self.layer, self.refused = self.layer, None, True
        if layer is not None:  # not within the removal of another
            QTimer.singleShot(0, lambda: _remove(self._viewer, layer))

    def _scale_of(self, choice: BoxChoice) -> float | None:
        """Boxes in a cell that are shown opaque: as before, unless there are many more now."""
        of, count, full = self._full
        same = of is choice and len(choice.store) < _ANEW * count
        return full if same else None

    def _put(self, asked: _Asked, grid: HeatGrid, picture: Picture) -> None:
        data = picture.reshape((1,) * len(asked.index) + picture.shape)
        place = _place(self._shapes, grid, asked.index)
        if self.layer is None:
            self._make(data, place)
        else:
            for name, value in place.items():
                if not np.array_equal(getattr(self.layer, name), value):
                    setattr(self.layer, name, value)
            self.layer.data = data
        first, self._has = self._has is not asked.choice, asked.choice
        if first:
            self._ready()

    def _make(self, data: npt.NDArray[np.uint8], place: dict[str, Any]) -> None:
        layers = self._viewer.layers
        chosen, active = set(layers.selection), layers.selection.active
        self.layer = Image(
            data,
            rgb=True,
            name=self._name,
            opacity=self._base * self._fade,
            visible=self._shapes.visible,
            interpolation2d="linear",
            metadata=mark(ROLE, self._source),
            **spatial(self._shapes) | place,
        )
        self._viewer.add_layer(self.layer)
        put_above(self._viewer, self.layer, self._source)
        layers.selection = chosen  # what the user works on stays so
        layers.selection.active = active
        self.layer.events.opacity.connect(self._opacity_set)

    def _set(self, name: str, value: Any) -> None:
        if self.layer is not None and getattr(self.layer, name) != value:
            self._ours = True
            setattr(self.layer, name, value)
            self._ours = False

    def _opacity_set(self, event: Any = None) -> None:
        if not self._ours and self.layer is not None and self._fade > 0.05:
            self._base = min(self.layer.opacity / self._fade, 1.0)

    def _go_along(self, event: Any = None) -> None:
        self._set("visible", self._shapes.visible)

    def _removed(self, event: Any) -> None:
        if self.layer is not None and event.value is self.layer:
            self.layer, self.refused = None, True
            self._task.cancel()
            self._later.stop()
            self._ready()


def _place(layer: Shapes, grid: HeatGrid, index: tuple[int, ...]) -> dict[str, Any]:
    """Scale and translation of the picture, at the same place in the world as the boxes' layer."""
    linear = Affine(
        scale=layer.scale, rotate=layer.rotate, shear=layer.shear, ndim=layer.ndim
    ).linear_matrix
    larger = np.array([*(1.0 for _ in index), grid.cell, grid.cell])
    first = np.array([*index, *[(grid.cell - 1) / 2] * 2], float)  # the first cell's centre
    return {
        "scale": tuple(np.asarray(layer.scale) * larger),
        "translate": tuple(np.asarray(layer.translate) + linear @ first),
    }


def _image_shape(source: Image) -> tuple[int, int]:
    """(H, W) of the finest level."""
    finest = source.data[0] if source.multiscale else source.data
    height, width = finest.shape[-3:-1] if source.rgb else finest.shape[-2:]
    return int(height), int(width)


def _remove(viewer: Any, layer: Image) -> None:
    if layer in viewer.layers:
        viewer.layers.remove(layer)
