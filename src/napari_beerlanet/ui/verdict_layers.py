"""What a new model finds otherwise, as layers: gained, lost and changed boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
from napari.layers import Image, Shapes

from napari_beerlanet.core.comparing import Comparison
from napari_beerlanet.ui.detection_shapes import corners_of
from napari_beerlanet.ui.gl_guard import guard_software_opengl
from napari_beerlanet.ui.layers import mark, put_above, role, spatial

KINDS = {
    "gained": ("#56b4e9", "Boxes that only the new model finds."),
    "lost": ("#e69f00", "Boxes that only the old model found."),
    "changed": ("#f0e442", "Boxes of another class or another confidence."),
}
"""Colours that are told apart by everybody, and what each kind is."""

_ROLE = "compared"
_MOST = 500  # boxes of a kind: more take long to draw


def show_comparison(viewer: Any, source: Image, found: Comparison, index: Any = ()) -> None:
    """Put a layer for each kind above an image, in place of those that are there."""
    guard_software_opengl(viewer)
    remove_comparison(viewer)
    selected = set(viewer.layers.selection)
    for kind, boxes in boxes_by_kind(found).items():
        if not len(boxes):
            continue
        colour, _ = KINDS[kind]
        layer = Shapes(
            list(corners_of(boxes[:_MOST], index)),
            shape_type="rectangle",
            edge_color=colour,
            face_color="transparent",
            edge_width=max(min(_shape(source)) / 250, 1),
            opacity=1.0,
            name=f"{kind} · {source.name}",
            metadata=mark(_ROLE, source, kind=kind),
            **spatial(source),
        )
        viewer.add_layer(layer)
        put_above(viewer, layer, source)
    viewer.layers.selection = selected


def boxes_by_kind(found: Comparison) -> dict[str, Any]:
    """Boxes (n, 4) of each kind, lost ones as they were before."""
    changed = np.concatenate([found.relabelled, found.rescored]).astype(np.int64)
    return {
        "gained": found.after.xyxy[found.gained],
        "lost": found.before.xyxy[found.lost],
        "changed": found.after.xyxy[changed[:, 1]],
    }


def comparison_layers(viewer: Any) -> dict[str, Shapes]:
    """The layers of a comparison that are in the viewer, by kind."""
    ours = [layer for layer in viewer.layers if role(layer) == _ROLE]
    return {layer.metadata["napari-beerlanet"]["kind"]: layer for layer in ours}


def set_visible(viewer: Any, kind: str, visible: bool) -> None:
    """Show or hide the layer of a kind, if there is one."""
    layer = comparison_layers(viewer).get(kind)
    if layer is not None:
        layer.visible = visible


def remove_comparison(viewer: Any) -> None:
    """Take our layers out of the viewer."""
    for layer in comparison_layers(viewer).values():
        viewer.layers.remove(layer)


def _shape(source: Image) -> tuple[int, int]:
    finest = source.data[0] if source.multiscale else source.data
    return finest.shape[-3:-1]
