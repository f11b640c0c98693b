"""Our layers beside the user's: role metadata, transforms, adding and picking layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import pint
from napari.layers import Image, Layer
from napari.utils.transforms import Affine
from pint.registry import LazyRegistry
from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QFormLayout, QSizePolicy
from superqt.utils import signals_blocked

from napari_beerlanet.ui.common.controls import ElidingComboBox, plain_tooltip
from napari_beerlanet.ui.viewer.planes import colour_images

if TYPE_CHECKING:
    from napari.viewer import Viewer

    from napari_beerlanet.ui.common.panel import DockedWidget

METADATA_KEY = "napari-beerlanet"
"""The key of our part of a layer's metadata: its role, the image that it belongs to, …"""


NAME_SEPARATOR = " · "
"""Between the name of an image and what a layer shows of it, as in "smear · detections"."""


class Role(StrEnum):
    """What a layer of ours is for. The values are in layers that users have saved: never change."""

    DETECTIONS = "detections"
    CELL_DENSITY = "cell density"
    COMPARISON = "compared"
    OUTCOME = "quality"
    REVIEW_MARKER = "current"
    ANNOTATIONS = "annotations"
    REGIONS = "annotated regions"
    BOXES = "boxes"
    RULER = "ruler"
    STAIN_DENSITY = "density"
    RECONSTRUCTION = "reconstruction"
    RESIDUAL = "residual"
    PATCHES = "patch probabilities"
    NORMALIZED = "normalized"


STAIN_IMAGES = frozenset({Role.STAIN_DENSITY, Role.RECONSTRUCTION, Role.RESIDUAL})
"""Roles of image layers that are made from an image and cover it."""

RESULT_BOXES = frozenset({Role.DETECTIONS, Role.COMPARISON, Role.OUTCOME})
"""Roles of layers whose boxes are to be seen on the image itself."""

DISPLAY_ONLY = frozenset({Role.COMPARISON, Role.OUTCOME, Role.REVIEW_MARKER, Role.RULER})
"""Roles of Shapes layers that only show something and hold no boxes or regions of the user's."""


def transform_kwargs(layer: Layer, planar: bool = False) -> dict[str, Any]:
    """Keyword arguments that put a layer of the same axes at the same place in the world.

    `planar`: for a layer of the last two axes only.
    """
    keep = slice(-2, None) if planar else slice(None)
    affine = layer.affine.affine_matrix
    if planar and layer.ndim > 2:
        affine = affine[-3:, -3:]
    return {
        "scale": tuple(layer.scale[keep]),
        "translate": tuple(layer.translate[keep]),
        "rotate": layer.rotate[-2:, -2:] if planar else layer.rotate,
        "shear": layer.shear[-1:] if planar else layer.shear,
        "affine": affine,
        "units": tuple(layer.units[keep]),
        "axis_labels": tuple(layer.axis_labels[keep]),
    }


def grid_transform(layer: Layer, cell: float, index: Sequence[int] = ()) -> dict[str, Any]:
    """Scale and translation of an image whose pixels are squares of `cell` pixels of a layer.

    The first one begins at the layer's corner, which lies half a pixel before the centre of its
    first pixel; `index` is the plane of a stack.
    """
    linear = Affine(
        scale=layer.scale, rotate=layer.rotate, shear=layer.shear, ndim=layer.ndim
    ).linear_matrix
    larger = np.array([*(1.0 for _ in index), cell, cell])
    first = np.array([*index, *[(cell - 1) / 2] * 2], float)  # the first cell's centre
    return {
        "scale": tuple(np.asarray(layer.scale) * larger),
        "translate": tuple(np.asarray(layer.translate) + linear @ first),
    }


_MOVES = ("scale", "translate", "rotate", "shear", "affine", "units")
# Scale, translation and linear map of an image when its results were last put there.
_last_places: WeakKeyDictionary[Layer, tuple[Any, Any, Any]] = WeakKeyDictionary()


def _place_of(layer: Layer) -> tuple[Any, Any, Any]:
    linear = Affine(scale=layer.scale, rotate=layer.rotate, shear=layer.shear, ndim=layer.ndim)
    return np.array(layer.scale), np.array(layer.translate), linear.linear_matrix


def move_results(viewer: Viewer, source: Layer) -> None:
    """Move what was made from an image to where that is now, as after its scale was set.

    Also what lies on a grid of its own, see `grid_transform`. Normalized versions are linked to
    their image by napari.
    """
    (scale, translate, linear), now = _last_places.get(source, _place_of(source)), _place_of(source)
    _last_places[source] = now
    for layer in list(viewer.layers):
        if role_of(layer) in (None, Role.NORMALIZED) or not is_made_from(layer, source):
            continue
        axes = slice(-layer.ndim, None)
        turn = now[2][axes, axes] @ np.linalg.inv(linear[axes, axes])
        offset = turn @ (np.asarray(layer.translate) - translate[axes])
        wanted = transform_kwargs(source, planar=layer.ndim < source.ndim)
        wanted["scale"] = np.asarray(layer.scale) * (now[0] / scale)[axes]
        wanted["translate"] = now[1][axes] + offset
        for name in _MOVES:
            there = layer.affine.affine_matrix if name == "affine" else getattr(layer, name)
            if not np.array_equal(there, wanted[name]):
                setattr(layer, name, wanted[name])


def role_metadata(role: Role, source: Layer | None = None, **more: Any) -> dict[str, Any]:
    """Metadata of a layer of ours: its role, and the layer that it comes from."""
    link = source_link(source) if source is not None else {"source": None}
    return {METADATA_KEY: {"role": str(role), **link, **more}}


def source_link(source: Layer) -> dict[str, str]:
    """The part of our metadata that says which layer a layer comes from.

    The id holds while the viewer is open, whatever the layer is called; the name is for layers that
    come from files, where ids of an earlier session mean nothing.
    """
    return {"source": source.name, "source_id": str(source.unique_id)}


def own_metadata(metadata: Any) -> dict[str, Any]:
    """Our part of a layer's metadata, {} where there is none."""
    own = metadata.get(METADATA_KEY) if isinstance(metadata, Mapping) else None
    return dict(own) if isinstance(own, Mapping) else {}


def role_of(layer: Layer) -> str | None:
    """What we made a layer for, None where it is the user's own."""
    role = own_metadata(layer.metadata).get("role")
    return None if role is None else str(role)


def find_source(viewer: Viewer, own: Mapping[str, Any]) -> Layer | None:
    """The layer that our part of some metadata names, None if it is not in the viewer."""
    by_id = (one for one in viewer.layers if str(one.unique_id) == own.get("source_id"))
    by_name = (one for one in viewer.layers if one.name == own.get("source"))
    return next(by_id, None) or next(by_name, None)


def source_layer(viewer: Viewer, layer: Layer) -> Layer | None:
    """The layer that a layer of ours was made from, also if it was renamed since."""
    return find_source(viewer, own_metadata(layer.metadata))


def is_made_from(layer: Layer, source: Layer) -> bool:
    """Whether a layer of ours was made from another one."""
    own, link = own_metadata(layer.metadata), source_link(source)
    key = "source_id" if "source_id" in own else "source"
    return bool(own.get(key) == link[key])


def link_sources(viewer: Viewer) -> None:
    """Update the links of all layers of ours, after layers were added or renamed.

    So a layer that names its source is linked to it before that is renamed, and a name in the
    metadata is never that of another layer by now. A layer that is called after its source is
    renamed with it; a name that the user has given neither begins nor ends with the source's.
    """
    for layer in list(viewer.layers):
        own = layer.metadata.get(METADATA_KEY) if isinstance(layer.metadata, dict) else None
        source = find_source(viewer, own) if isinstance(own, dict) and own.get("source") else None
        if isinstance(own, dict) and source is not None:
            before, after = str(own["source"]), source.name
            own.update(source_link(source))  # first: the layer's name is heard of here, too
            if before != after and layer.name.startswith(f"{before}{NAME_SEPARATOR}"):
                layer.name = after + layer.name.removeprefix(before)
            elif before != after and layer.name.endswith(f"{NAME_SEPARATOR}{before}"):
                layer.name = layer.name.removesuffix(before) + after


def user_images(viewer: Viewer) -> list[Image]:
    """The viewer's RGB images that are not of our making, the topmost last."""
    return [layer for layer in colour_images(viewer) if role_of(layer) is None]


def work_images(viewer: Viewer) -> list[Image]:
    """The images that panels work on: the user's, and normalized versions of them."""
    images = colour_images(viewer)
    return [layer for layer in images if role_of(layer) in (None, Role.NORMALIZED)]


def add_unselected(
    viewer: Viewer, layer: Layer, *, above: Layer | None = None, position: int | None = None
) -> None:
    """Add a layer without selecting it: on top, above another layer, or at a position.

    napari makes every new layer the active one, which takes as long as adding it.
    """
    layers = viewer.layers
    selected, active = set(layers.selection), layers.selection.active
    if above is not None and above in layers:
        position = layers.index(above) + 1
    activates, layers._activate_on_insert = getattr(layers, "_activate_on_insert", True), False
    try:
        layers.insert(len(layers) if position is None else position, layer)
    finally:
        layers._activate_on_insert = activates
    if set(layers.selection) != selected:
        layers.selection = selected
        layers.selection.active = active


def stain_images(viewer: Viewer, source: Layer) -> list[Image]:
    """The image layers that were made from an image, the topmost last."""
    return [
        layer
        for layer in viewer.layers
        if isinstance(layer, Image)
        and role_of(layer) in STAIN_IMAGES
        and source_layer(viewer, layer) is source
    ]


def move_to_top(viewer: Viewer, layer: Layer) -> None:
    """Move a layer above all images that would cover it; other layers may stay above it."""
    position = viewer.layers.index(layer)
    above = [
        k for k, other in enumerate(viewer.layers) if isinstance(other, Image) and k > position
    ]
    if above:
        viewer.layers.move(position, above[-1] + 1)


def covering_images(viewer: Viewer, source: Layer) -> list[Image]:
    """Other images, or stains of others, that hide a part of an image; the topmost last."""
    if viewer.canvas.grid.enabled or source not in viewer.layers:
        return []
    above = viewer.layers[viewer.layers.index(source) + 1 :]
    return [
        layer
        for layer in above
        if isinstance(layer, Image)
        and (role_of(layer) in (None, Role.NORMALIZED) or role_of(layer) in STAIN_IMAGES)
        and (role_of(layer) == Role.NORMALIZED or not is_made_from(layer, source))
        and layer.visible
        and layer.opacity == 1
        and layer.blending not in ("additive", "multiplicative", "minimum")
        and _overlap(layer, source)
    ]


def _overlap(layer: Layer, other: Layer) -> bool:
    """Whether two layers share more than an edge of the canvas."""
    low, high = np.array([one.extent.world[:, -2:] for one in (layer, other)]).swapaxes(0, 1)
    return bool((low.max(axis=0) < high.min(axis=0)).all())


# What was hidden for the boxes of an image, and which images were shown for them.
_stepped_back: WeakKeyDictionary[Layer, WeakSet[Image]] = WeakKeyDictionary()
_shown_sources: WeakSet[Layer] = WeakSet()


def step_back(viewer: Viewer, source: Layer) -> None:
    """Hide what was made from an image and covers it, until `step_forward`; show the image."""
    covering = [layer for layer in stain_images(viewer, source) if layer.visible]
    hidden = _stepped_back.setdefault(source, WeakSet())
    for layer in covering:
        hidden.add(layer)
        layer.visible = False
    if not source.visible and source not in _set_aside:
        _shown_sources.add(source)
        source.visible = True


def step_forward(viewer: Viewer, source: Layer) -> None:
    """Show again what `step_back` has hidden, and hide the image if it was hidden before."""
    hidden = [layer for layer in _stepped_back.pop(source, ()) if layer in viewer.layers]
    for layer in hidden:
        layer.visible = True
    # Stains that are blended with the image would be darkened or outshone by it.
    blended = any(layer.blending in ("additive", "multiplicative") for layer in hidden)
    if source in _shown_sources and blended:
        source.visible = False
    _shown_sources.discard(source)


def boxes_removed(viewer: Viewer, source: Layer) -> None:
    """`step_forward`, if the last of the boxes for which stains were hidden is gone."""
    left = any(
        role_of(layer) in RESULT_BOXES and source_layer(viewer, layer) is source
        for layer in viewer.layers
    )
    if source in viewer.layers and not left:
        step_forward(viewer, source)


def is_stepped_back(layer: Image) -> bool:
    """Whether a layer is hidden by `step_back` or with its image, and not by the user."""
    by_us: list[WeakSet[Any]] = [*_stepped_back.values(), *_set_aside.values()]
    return not layer.visible and any(layer in hidden for hidden in by_us)


def hide_with_source(viewer: Viewer, layer: Layer) -> None:
    """Hide a new layer whose image is hidden for another one; it comes back with its image."""
    source = source_layer(viewer, layer)
    if source is not None and source in _set_aside and not source.visible:
        _set_aside[source].add(layer)
        layer.visible = False


# What was hidden with an image when another one was chosen, and images that the user wants to see
# with others.
_set_aside: WeakKeyDictionary[Layer, WeakSet[Layer]] = WeakKeyDictionary()
_seen_together: WeakSet[Layer] = WeakSet()
# The camera's zoom and centre when an image was hidden.
_last_views: WeakKeyDictionary[Layer, tuple[float, Any]] = WeakKeyDictionary()


def show_in_place_of_others(viewer: Viewer, image: Image) -> None:
    """Hide the other images at the same place, with what was made from them; show this one.

    napari draws images over each other, and the boxes of one on another. What was hidden comes back
    with its image. Who shows such a layer again wants to see both: they are left alone from then.
    The camera goes where the user has last looked at the image, or shows all of it.
    """
    replaced = []
    returns = image in _set_aside.get(image, ())  # as when the image in front is removed
    for one in work_images(viewer) if not viewer.canvas.grid.enabled else []:
        if any(layer.visible for layer in _set_aside.get(one, ())):
            _seen_together.add(one)
    for layer in _set_aside.pop(image, ()):
        if layer in viewer.layers:
            layer.visible = True
    for other in work_images(viewer):
        if other is image or viewer.canvas.grid.enabled or not _overlap(other, image):
            continue
        if other in _seen_together or image in _seen_together:
            continue
        own = [layer for layer in viewer.layers if source_image(viewer, layer) is other]
        hidden = _set_aside.setdefault(other, WeakSet())
        replaced += [other] if other.visible else []
        for layer in own:
            if layer.visible:
                hidden.add(layer)
                layer.visible = False
    if (replaced or (returns and image in _last_views)) and viewer.dims.ndisplay == 2:
        _look_at(viewer, image, replaced)


def _look_at(viewer: Viewer, image: Image, replaced: Sequence[Image]) -> None:
    """Move the camera to an image, unless it has the place of one that it replaces."""
    camera = viewer.scene.camera
    for other in replaced:
        _last_views[other] = camera.zoom, camera.center
    place, *others = (one.extent.world[:, -2:] for one in (image, *replaced))
    if any(np.array_equal(place, other) for other in others):
        return  # as of two stains of one field, which are compared
    if image in _last_views:
        camera.zoom, camera.center = _last_views[image]
    else:
        viewer.fit_to_view(layers=[image])


def add_hidden(viewer: Viewer, image: Image, above: Layer) -> None:
    """Add an image above another one, without selecting it; it is shown when it is chosen."""
    image.visible = False
    add_unselected(viewer, image, above=above)
    _set_aside.setdefault(image, WeakSet()).add(image)


_GRID_SPACING_PX = 4


class ImageGrid:
    """Images in napari's grid, each alone in its cell with its name; all other layers are hidden.

    The part of the image that is in view stays in view.
    """

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self.images: WeakSet[Image] = WeakSet()
        self._hidden: WeakSet[Layer] = WeakSet()
        self._aside: WeakKeyDictionary[Layer, WeakSet[Layer]] = WeakKeyDictionary()
        self._named: WeakSet[Image] = WeakSet()  # whose names we show, not the user
        self._before = 1, 0.0  # stride and spacing that the user has set
        self._side = 1  # cells beside each other

    def show(self, images: Sequence[Image]) -> None:
        """Show these, in the order of napari's layer list from below, the first in a corner."""
        grid = self._viewer.canvas.grid
        if not self.images:
            self._before = grid.stride, grid.spacing
        for layer in self._viewer.layers:
            if layer not in images and layer.visible:
                self._hidden.add(layer)
                layer.visible = False
        for image in images:
            self.images.add(image)
            if image in _set_aside:
                self._aside[image] = _set_aside.pop(image)
            image.visible = True
            if not image.name_overlay.visible:
                self._named.add(image)
                image.name_overlay.visible = True
        grid.stride, grid.spacing, grid.enabled = 1, _GRID_SPACING_PX, True
        self._zoom_to_cells(max(grid.actual_shape(self._viewer.layers)))

    def leave(self, chosen: Image | None) -> None:
        """Show the chosen image alone again, and what was hidden."""
        grid = self._viewer.canvas.grid
        images, self.images = [one for one in self.images if one in self._viewer.layers], WeakSet()
        named, self._named = self._named, WeakSet()
        for image in named:
            image.name_overlay.visible = False
        grid.enabled = False
        grid.stride, grid.spacing = self._before
        self._zoom_to_cells(1)
        for image in images:
            aside = self._aside.pop(image, WeakSet([image]))
            if image is not chosen:
                _set_aside[image] = aside
                image.visible = False
            else:
                for layer in aside:
                    layer.visible = layer in self._viewer.layers
        hidden, self._hidden = self._hidden, WeakSet()
        for layer in hidden:
            source = source_image(self._viewer, layer)
            if source is not None and source in _set_aside:
                _set_aside[source].add(layer)
            else:
                layer.visible = True

    def _zoom_to_cells(self, side: int) -> None:
        """So many cells beside each other, or one below the other, share the canvas from now on."""
        before, self._side = self._side, side
        self._viewer.scene.camera.zoom *= before / side


class UpdateGuard:
    """True while we change layers ourselves, so that their events are not the user's edits.

    ::

        with self._updating:  # may be nested
            layer.data = …

        if not self._updating:  # in a callback of the layer: the user did it
    """

    def __init__(self) -> None:
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def __bool__(self) -> bool:
        return self._depth > 0


def source_image(viewer: Viewer, layer: Layer | None) -> Image | None:
    """The image to work on that a layer is, or that a layer of ours was made from."""
    images = work_images(viewer)
    for image in images:
        if image is layer:
            return image
    source = source_layer(viewer, layer) if layer is not None else None
    return next((image for image in images if image is source), None)


def is_selected(viewer: Viewer, image: Layer) -> bool:
    """Whether the user is at this image: it, a layer made from it, or none of any image is active.

    What ends for another image must not take the user away from this one.
    """
    return source_image(viewer, viewer.layers.selection.active) in (None, image)


class ImagePicker(ElidingComboBox):
    """A list of the images to work on that follows the viewer's layers and the selected one.

    `chosen` is emitted with the layer, or None when there is none. Selecting a layer of ours in
    napari's list, such as detections, chooses the image that it was made from; a layer that has
    nothing to do with an RGB image changes nothing. Where that is another image, `refused` is
    emitted with it; with None when an image to work on, or no image, is selected.
    """

    chosen = Signal(object)
    refused = Signal(object)

    def __init__(self, panel: DockedWidget) -> None:
        super().__init__(
            "The image to work on: an RGB layer of this viewer. Others are hidden.", 12
        )
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._viewer = panel.viewer
        self._layers: list[Image] = []
        self._layer: Image | None = None
        self._leader: ImagePicker | None = None
        self._names = LayerListWatcher(panel, self._refresh)
        panel.connect_event(panel.viewer.layers.selection.events.active, self._layer_selected)
        self.currentIndexChanged.connect(self._choose)
        self.activated.connect(self._select_layer)
        self._refresh()
        self._layer_selected()

    @property
    def layer(self) -> Image | None:
        """The chosen layer."""
        return self._layer

    def choose(self, layer: Image) -> None:
        """Choose one of the offered layers."""
        if layer in self._layers:
            self.setCurrentIndex(self._layers.index(layer))

    def pick(self, layer: Image) -> None:
        """Choose a layer as the user does here: it is selected in napari's list, too."""
        self.choose(layer)
        self._select_layer(self.currentIndex())

    def bind(self, leader: ImagePicker) -> None:
        """Choose what another picker chooses from now on, and let it choose what is chosen here."""
        self.unbind()
        self._leader = leader
        leader.chosen.connect(self._follow_leader)
        self._follow_leader(leader.layer)

    def unbind(self) -> None:
        """Be independent again."""
        if self._leader is not None:
            self._leader.chosen.disconnect(self._follow_leader)
            self._leader = None

    def _follow_leader(self, layer: Image | None) -> None:
        if layer is not None and layer not in self._layers:
            self._refresh()  # the leader has heard of a new layer first
        elif layer is not None:
            self.choose(layer)

    def _refresh(self) -> None:
        self._layers = work_images(self._viewer)
        index = len(self._layers) - 1
        for preferred in (self._layer, self._leader.layer if self._leader is not None else None):
            if preferred in self._layers:
                index = self._layers.index(preferred)
        with signals_blocked(self):
            self.clear()
            for place, layer in enumerate(self._layers):
                self.addItem(layer.name)
                tip = plain_tooltip(layer.name)
                self.setItemData(place, tip, Qt.ItemDataRole.ToolTipRole)
            self.setCurrentIndex(index)
            self.setEnabled(bool(self._layers))
        if self._layer not in self._layers or self._leader is not None:
            self._choose(index)

    def _choose(self, index: int) -> None:
        layer = self._layers[index] if 0 <= index < len(self._layers) else None
        if layer is self._layer:
            return
        self._layer = layer
        if self._leader is not None and layer is not None:
            self._leader.choose(layer)
        self.chosen.emit(layer)

    def _layer_selected(self, event: Any = None) -> None:
        """The user has selected or opened a layer; where there is a leader, it follows."""
        active = self._viewer.layers.selection.active
        image = source_image(self._viewer, active)
        if image is not None and self._leader is None:
            self.choose(image)
        unusable = image is None and isinstance(active, Image) and role_of(active) is None
        self.refused.emit(active if unusable else None)

    def _select_layer(self, index: int) -> None:
        """The user has picked an image here: select it in napari's list, too."""
        image, selection = self._layer, self._viewer.layers.selection
        if image is not None and source_image(self._viewer, selection.active) is not image:
            selection.active = image


def show_picker(picker: ImagePicker, visible: bool) -> None:
    """Show or hide a picker with its label in a form."""
    picker.setVisible(visible)
    parent = picker.parentWidget()
    for rows in parent.findChildren(QFormLayout) if parent is not None else []:
        label = rows.labelForField(picker)
        if label is not None:
            label.setVisible(visible)


class LayerListWatcher:
    """Calls back when layers are added, removed or renamed, until the panel is closed.

    Links between layers are up to date by then, see `link_sources`. Results follow an image that is
    moved or scaled.
    """

    def __init__(self, panel: DockedWidget, changed: Callable[[], None]) -> None:
        self._panel, self._changed = panel, changed
        layers = panel.viewer.layers
        panel.connect_event(layers.events.inserted, self._inserted)
        panel.connect_event(layers.events.removed, self._removed)
        for layer in layers:
            self._follow(layer, panel.connect_event)
        link_sources(panel.viewer)

    def _inserted(self, event: Any) -> None:
        self._follow(event.value, self._panel.connect_event)
        self._notify(event)

    def _removed(self, event: Any) -> None:
        self._follow(event.value, self._panel.disconnect_event)
        self._notify(event)

    def _follow(self, layer: Layer, connect: Callable[[Any, Callable[..., None]], None]) -> None:
        connect(layer.events.name, self._notify)
        if isinstance(layer, Image):
            _last_places.setdefault(layer, _place_of(layer))
            for name in _MOVES:
                connect(layer.events[name], self._moved)

    def _moved(self, event: Any) -> None:
        move_results(self._panel.viewer, event.source)

    def _notify(self, event: Any = None) -> None:
        link_sources(self._panel.viewer)
        self._changed()


_SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast")


def guard_software_opengl(viewer: Viewer) -> None:
    """Where Mesa draws without a graphics card, keep it from ending the process.

    Mesa 22 does when an image is drawn after a Shapes layer was removed and another one added,
    because programs were deleted. They are small; there, and only there, they are kept. And each
    of Mesa and triton, which torch's compiler loads, brings an LLVM; the second ends the process.
    Without a graphics card there is nothing to compile for, so there triton counts as missing.
    """
    try:
        from vispy.gloo import gl, glir

        viewer.window._qt_viewer.canvas._scene_canvas.set_current()
        renderer = str(gl.glGetParameter(gl.GL_RENDERER)).lower()
        if any(name in renderer for name in _SOFTWARE_RENDERERS):
            glir.GlirProgram.delete = lambda self: None
            sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    except Exception:  # no window, or another vispy: then there is nothing to guard
        return


# --- what napari prepares for its first layers, which takes long ---


def units_are_ready() -> bool:
    """Whether napari's units were read from their file; the first layer does that otherwise."""
    registry = pint.get_application_registry()  # type: ignore[no-untyped-call]
    return not isinstance(registry.get(), LazyRegistry)


def read_units() -> Any:
    """pint's registry of units, read off the GUI thread, for `use_units`."""
    return pint.UnitRegistry(on_redefinition="raise")


def use_units(registry: Any) -> None:
    """Have napari use these units unless it has its own by now; on the GUI thread."""
    if not units_are_ready():
        pint.set_application_registry(registry)  # type: ignore[no-untyped-call]


def prepare_shapes() -> None:
    """Load the functions that triangulate shapes; the first Shapes layer does that otherwise."""
    with suppress(ImportError, AttributeError):  # another version of napari
        from napari.layers.shapes import _accelerated_triangulate_dispatch as dispatch

        dispatch.warmup_numba_cache()
