"""What a new model finds otherwise, in one layer: gained, lost and changed boxes by colour."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from napari.utils.colormaps.standardize_color import transform_color

from napari_beerlanet.core.comparing import Comparison
from napari_beerlanet.ui import detection_shapes
from napari_beerlanet.ui.gl_guard import guard_software_opengl
from napari_beerlanet.ui.layers import mark, put_above, role, spatial

KINDS = {
    "gained": ("#56b4e9", "Boxes that only the new model finds."),
    "lost": ("#e69f00", "Boxes that only the old model found."),
    "changed": ("#f0e442", "Boxes of another class or another confidence."),
}
"""Colours that are told apart by everybody, and what each kind is."""

_ROLE = "compared"
_KEY = "napari-beerlanet"


def show_comparison(
    viewer: Any,
    source: Image,
    found: Comparison,
    index: Sequence[int] = (),
    shown: Collection[str] = tuple(KINDS),
) -> None:
    """Put boxes of the kinds `shown` above an image, in the place of those that are there.

    One layer for all kinds: adding one takes napari long.
    """
    guard_software_opengl(viewer)
    remove_comparison(viewer)
    selected = set(viewer.layers.selection)
    layer = Shapes(
        ndim=source.ndim,
        name=f"{source.name} · before and after",
        face_color="transparent",
        opacity=1.0,
        metadata=mark(_ROLE, source, boxes=boxes_by_kind(found), index=tuple(index)),
        **spatial(source),
    )
    viewer.add_layer(layer)
    put_above(viewer, layer, source)
    layer.metadata[_KEY]["width"] = max(min(_shape(source)) / 250, 1.0)
    show_kinds(viewer, shown)
    viewer.layers.selection = selected


def show_kinds(viewer: Any, shown: Collection[str]) -> None:
    """Show the boxes of these kinds and no others."""
    layer = comparison_layer(viewer)
    if layer is None:
        return
    known = layer.metadata[_KEY]
    most = detection_shapes.most() // len(KINDS)
    boxes = {kind: known["boxes"][kind][:most] for kind in KINDS if kind in shown}
    kinds = [kind for kind, some in boxes.items() for _ in some]
    colours = transform_color([KINDS[kind][0] for kind in kinds]) if kinds else np.empty((0, 4))
    together = np.concatenate([np.empty((0, 4), np.float32), *boxes.values()])
    corners = detection_shapes.corners_of(together, known["index"])
    detection_shapes.put(layer, corners, colours, known["width"], {"kind": np.array(kinds, object)})


def boxes_by_kind(found: Comparison) -> dict[str, npt.NDArray[np.float32]]:
    """Boxes (n, 4) of each kind, lost ones as they were before."""
    changed = np.concatenate([found.relabelled, found.rescored]).astype(np.int64)
    return {
        "gained": found.after.xyxy[found.gained],
        "lost": found.before.xyxy[found.lost],
        "changed": found.after.xyxy[changed[:, 1]],
    }


def comparison_layer(viewer: Any) -> Shapes | None:
    """The layer of a comparison, if there is one in the viewer."""
    return next((layer for layer in viewer.layers if role(layer) == _ROLE), None)


def remove_comparison(viewer: Any) -> None:
    """Take our layer out of the viewer."""
    layer = comparison_layer(viewer)
    if layer is not None:
        viewer.layers.remove(layer)


def _shape(source: Image) -> tuple[int, int]:
    finest = source.data[0] if source.multiscale else source.data
    height, width = finest.shape[-3:-1]
    return height, width
