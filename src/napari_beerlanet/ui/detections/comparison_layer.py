"""Detections gained, lost or changed between two results, in one layer, by colour."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from napari.utils.colormaps.standardize_color import transform_color
from qtpy.QtWidgets import QCheckBox, QHBoxLayout, QWidget

from napari_beerlanet.core.boxes.classes import CHANGE_COLOURS
from napari_beerlanet.core.evaluation.diff import DetectionDiff
from napari_beerlanet.ui.common.controls import colour_icon
from napari_beerlanet.ui.viewer import box_shapes
from napari_beerlanet.ui.viewer.layers import (
    METADATA_KEY,
    Role,
    add_unselected,
    boxes_removed,
    guard_software_opengl,
    role_metadata,
    role_of,
    source_layer,
    step_back,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.planes import image_shape

if TYPE_CHECKING:
    from napari.viewer import Viewer

CHANGE_KINDS = {
    "gained": (CHANGE_COLOURS["gained"], "Cells that only the new model detects."),
    "lost": (CHANGE_COLOURS["lost"], "Cells that only the old model detected."),
    "changed": (CHANGE_COLOURS["changed"], "Cells whose class or confidence differs."),
}
"""Colours that the colour-blind can tell apart, and what each kind is."""


class ChangeToggles(QWidget):
    """Check boxes in the colours of the kinds of changes, which show and hide them."""

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self.boxes: dict[str, QCheckBox] = {}
        for kind, (colour, tooltip) in CHANGE_KINDS.items():
            box = QCheckBox(kind)
            box.setChecked(True)
            box.setToolTip(tooltip)
            box.setIcon(colour_icon(colour))
            box.toggled.connect(lambda _: show_kinds(viewer, self.visible_kinds))
            self.boxes[kind] = box
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        for box in self.boxes.values():
            layout.addWidget(box)
        layout.addStretch(1)

    @property
    def visible_kinds(self) -> list[str]:
        """The kinds that are checked."""
        return [kind for kind, box in self.boxes.items() if box.isChecked()]


def show_comparison(
    viewer: Viewer,
    source: Image,
    diff: DetectionDiff,
    index: Sequence[int] = (),
    visible: Collection[str] = tuple(CHANGE_KINDS),
) -> None:
    """Show boxes of the kinds `visible` above an image, instead of an earlier comparison.

    One layer for all kinds: adding one takes napari long.
    """
    guard_software_opengl(viewer)
    remove_comparison(viewer)
    layer = Shapes(
        ndim=source.ndim,
        name=f"{source.name} · before and after",
        face_color="transparent",
        opacity=1.0,
        metadata=role_metadata(
            Role.COMPARISON,
            source,
            boxes=boxes_by_kind(diff),
            index=tuple(index),
            width=max(min(image_shape(source)) / 250, 1.0),
        ),
        **transform_kwargs(source),
    )
    add_unselected(viewer, layer)
    step_back(viewer, source)
    show_kinds(viewer, visible)


def show_kinds(viewer: Viewer, visible: Collection[str]) -> None:
    """Show the boxes of these kinds and no others."""
    layer = comparison_layer(viewer)
    if layer is None:
        return
    own = layer.metadata[METADATA_KEY]
    limit = box_shapes.max_drawn_boxes() // len(CHANGE_KINDS)
    boxes = {kind: own["boxes"][kind][:limit] for kind in CHANGE_KINDS if kind in visible}
    kinds = [kind for kind, some in boxes.items() for _ in some]
    colours = (
        transform_color([CHANGE_KINDS[kind][0] for kind in kinds]) if kinds else np.empty((0, 4))
    )
    xyxy = np.concatenate([np.empty((0, 4), np.float32), *boxes.values()])
    corners = box_shapes.corners_from_boxes(xyxy, own["index"])
    box_shapes.set_boxes(layer, corners, colours, own["width"], {"kind": np.array(kinds, object)})


def boxes_by_kind(diff: DetectionDiff) -> dict[str, npt.NDArray[np.float32]]:
    """Boxes (n, 4) of each kind, lost ones as they were before."""
    changed = np.concatenate([diff.relabelled, diff.rescored]).astype(np.int64)
    return {
        "gained": diff.after.xyxy[diff.gained],
        "lost": diff.before.xyxy[diff.lost],
        "changed": diff.after.xyxy[changed[:, 1]],
    }


def comparison_layer(viewer: Viewer) -> Shapes | None:
    """The layer of a comparison, if there is one in the viewer."""
    shapes = (layer for layer in viewer.layers if isinstance(layer, Shapes))
    return next((layer for layer in shapes if role_of(layer) == Role.COMPARISON), None)


def remove_comparison(viewer: Viewer) -> None:
    """Remove our layer from the viewer."""
    layer = comparison_layer(viewer)
    if layer is not None:
        source = source_layer(viewer, layer)
        viewer.layers.remove(layer)
        if source is not None:
            boxes_removed(viewer, source)
