"""Settings of a detection: search area, confidence, overlap (NMS IoU), cell size, device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from magicgui.widgets import CheckBox, ComboBox
from magicgui.widgets.bases import ValueWidget
from napari.layers import Image, Layer, Shapes
from napari.layers.base import ActionType
from qtpy.QtCore import QObject, QTimer, Signal
from qtpy.QtWidgets import QPushButton, QVBoxLayout, QWidget

from napari_beerlanet.core.detection.settings import DetectSettings, OpenVinoMode
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    expand,
    field_widget,
    form,
    hint,
    row,
)
from napari_beerlanet.ui.common.model_section import DevicePicker
from napari_beerlanet.ui.viewer.layers import (
    Role,
    guard_software_opengl,
    role_metadata,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.viewport import SearchArea, to_image_pixels

if TYPE_CHECKING:
    from napari import Viewer

AREA_NAMES: dict[SearchArea, str] = {
    "whole": "Whole image",
    "view": "Current view",
    "shapes": "Selected shapes",
}
"""Search areas as the user reads them."""
_OPENVINO_NAMES: dict[OpenVinoMode, str] = {
    "auto": "Automatic",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "off": "Off (torch)",
}
_TYPICAL_CELL_PX, _MAX_CELL_PX = 50, 20_000
_MIN_SIDE_PX = 2.0  # of a drawn box; less is a slip of the mouse


class DetectForm(QWidget):
    """`confidence_changed` and `labels_changed` act on detections that are there already."""

    confidence_changed = Signal(float)
    labels_changed = Signal(bool)
    draw_requested = Signal(bool)
    openvino_changed = Signal()

    def __init__(self, image: QWidget) -> None:
        super().__init__()
        self._make_controls()
        self._make_size_controls()
        rows = form()
        rows.addRow("Image", image)
        rows.addRow("Search in", self.where.native)
        size = row(self.size_auto.native, self.cell_size.native, self.draw, stretch=1)
        rows.addRow("Cell size", size)
        rows.addRow("Confidence", self.confidence_slider.native)
        self.more = CollapsibleGroup("More settings")
        more_rows = form()
        more_rows.addRow("Overlap", self.iou_slider.native)
        more_rows.addRow("Device", self.device.native)
        if find_spec("openvino") is not None:
            more_rows.addRow("OpenVINO", self.openvino.native)
        self.more.body.addLayout(more_rows)
        for box in (self.labels, self.stains):
            self.more.body.addWidget(box.native)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addLayout(rows)
        for widget in (
            self.size_note,
            self.skip_background.native,
            self.more,
        ):
            layout.addWidget(widget)
        self.show_slide_controls(False)
        self.show_slide_note("")

    def _make_controls(self) -> None:
        self.where = ComboBox(
            choices=[(name, area) for area, name in AREA_NAMES.items()],
            tooltip="Where to search: in the whole image, in the current view, or in the shapes "
            "that are selected in any Shapes layer. Boxes elsewhere are kept.",
        )
        self.confidence_slider = field_widget(
            DetectSettings, "confidence", widget_type="FloatSlider", step=0.01
        )
        _extend_tooltip(
            self.confidence_slider, "Moving it updates boxes and counts without another run."
        )
        self.iou_slider = field_widget(DetectSettings, "iou", widget_type="FloatSlider", step=0.01)
        _extend_tooltip(
            self.iou_slider,
            "Lower it if cells are boxed twice, raise it if touching cells are lost. Needs another "
            "run.",
        )
        self.labels = CheckBox(
            text="Label boxes with class and confidence",
            tooltip="Labels appear as soon as few enough boxes are in view.",
        )
        self.stains = CheckBox(
            text="Add the stains as layers",
            tooltip="Add one layer per stain, decomposed with the spectra that this model has "
            "learned.",
        )
        self.skip_background = field_widget(DetectSettings, "skip_glass", text="Skip background")
        self.slide_note = hint()  # placed by the panel, below buttons that it must not move
        self.device = DevicePicker()
        self.openvino = ComboBox(
            choices=[(_OPENVINO_NAMES[mode], mode) for mode in get_args(OpenVinoMode)],
            value=DetectSettings.default("openvino"),
            tooltip="OpenVINO runs the model on the CPU faster than torch does, with the same "
            "boxes; bfloat16 is faster still where the CPU has it, and rounds. Automatic takes it "
            "for slides if it finds the same in some of their tiles.",
        )
        expand(self.where)
        expand(self.openvino)
        self.openvino.changed.connect(self._emit_openvino)
        self.confidence_slider.changed.connect(self._emit_confidence)
        self.labels.changed.connect(self._emit_labels)

    def _make_size_controls(self) -> None:
        self.size_auto = CheckBox(
            text="automatic",
            value=True,
            tooltip="Derive the size of cells from the pixel size, or estimate it from the image.",
        )
        self.cell_size = field_widget(
            DetectSettings, "object_size", value=_TYPICAL_CELL_PX, max=_MAX_CELL_PX, step=1
        )
        self.cell_size.tooltip = "The width of a typical cell in image pixels."
        self.cell_size.enabled = False
        self.cell_size.native.setDecimals(0)
        self.cell_size.native.setSuffix(" px")
        self.draw = QPushButton("Draw")
        self.draw.setCheckable(True)
        self.draw.setToolTip("Draw a box over a typical cell to measure its size.")
        self.size_note = hint()
        policy = self.size_note.sizePolicy()
        policy.setRetainSizeWhenHidden(True)  # the buttons below stay where they are
        self.size_note.setSizePolicy(policy)
        self.size_note.hide()
        self.size_auto.changed.connect(self._update_size_enabled)
        self.draw.toggled.connect(self.draw_requested)

    # psygnal holds bound methods weakly, so that no signal keeps the form alive

    def show_confidence(self, value: float) -> None:
        """Move the slider without telling anyone: what is drawn has this threshold already."""
        with self.confidence_slider.changed.blocked():
            self.confidence_slider.value = value

    def _emit_confidence(self, value: float) -> None:
        self.confidence_changed.emit(self.confidence)

    def _emit_openvino(self, mode: OpenVinoMode) -> None:
        self.openvino_changed.emit()

    def _emit_labels(self, value: bool) -> None:
        self.labels_changed.emit(value)

    def _update_size_enabled(self, automatic: bool) -> None:
        self.cell_size.enabled = not automatic

    @property
    def search_area(self) -> SearchArea:
        """Which part of the image is searched."""
        area: SearchArea = self.where.value
        return area

    @property
    def confidence(self) -> float:
        """The threshold of detections to show."""
        return round(float(self.confidence_slider.value), 2)

    @property
    def object_size(self) -> float | Literal["auto"]:
        """In image pixels."""
        return "auto" if self.size_auto.value else float(self.cell_size.value)

    @property
    def chosen_device(self) -> str:
        """A name for `pick_device`."""
        return self.device.chosen

    @property
    def openvino_mode(self) -> OpenVinoMode:
        """How OpenVINO is used on the CPU."""
        mode: OpenVinoMode = self.openvino.value
        return mode

    def settings(self, pixel_size: tuple[float, float] | None = None) -> DetectSettings:
        """The present settings for an image of this pixel size (y, x) in micrometres."""
        return DetectSettings(
            confidence=self.confidence,
            iou=round(float(self.iou_slider.value), 2),
            object_size=self.object_size,
            pixel_size=pixel_size,
            skip_glass=bool(self.skip_background.value),
            openvino=self.openvino_mode,
        )

    def study_settings(self, model: str) -> dict[str, Any]:
        """The present settings by the names of `StudySettings`."""
        settings = self.settings()
        names = ("confidence", "iou", "object_size", "openvino")
        values = {name: getattr(settings, name) for name in names}
        return {"model": model, "device": self.chosen_device, **values}

    def set_measured_size(self, pixels: float) -> None:
        """Use a size that the user has measured."""
        self.size_auto.value = False
        self.cell_size.value = pixels
        self.show_size_note(f"Measured from your box: {pixels:.0f} pixels.")

    def show_slide_controls(self, is_slide: bool) -> None:
        """Show or hide the controls that only slides need."""
        self.skip_background.native.setVisible(is_slide)

    def show_slide_note(self, text: str) -> None:
        """Show a note on the search of the slide."""
        self.slide_note.setText(text)
        self.slide_note.setVisible(bool(text))

    def show_size_note(self, text: str) -> None:
        """Show which cell size was used, and why."""
        self.size_note.setText(text)
        self.size_note.setVisible(bool(text))


def _extend_tooltip(widget: ValueWidget[Any], text: str) -> None:
    """Append to the description of a setting, on all parts of its widget."""
    widget.tooltip = f"{widget.tooltip} {text}"
    for part in widget.native.findChildren(QWidget):
        part.setToolTip(widget.tooltip)


class CellRuler(QObject):
    """A Shapes layer for one rectangle, which is removed when that is drawn.

    `measured` carries √(width · height) in image pixels; `ended` tells that the layer is gone.
    """

    measured = Signal(float)
    ended = Signal()

    def __init__(self, viewer: Viewer, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._viewer = viewer
        self.layer: Shapes | None = None
        self._image: Image | None = None
        self._previously_active: Layer | None = None

    def start(self, image: Image) -> None:
        """Let the user draw a box over a cell of the image."""
        self.stop()
        guard_software_opengl(self._viewer)
        self._image, self._previously_active = image, self._viewer.layers.selection.active
        self.layer = Shapes(
            ndim=2,
            name="Draw over one cell",
            edge_color="yellow",
            face_color="transparent",
            edge_width=2,
            metadata=role_metadata(Role.RULER, image),
            **transform_kwargs(image, planar=image.ndim > 2),
        )
        self._viewer.add_layer(self.layer)
        self._viewer.layers.selection.active = self.layer
        self.layer.mode = "add_rectangle"
        self.layer.events.data.connect(self._drawn)
        self._viewer.layers.events.removed.connect(self._removed)

    def stop(self) -> None:
        """Remove the layer."""
        layer = self.layer
        if layer is not None and layer in self._viewer.layers:
            self._viewer.layers.remove(layer)

    def _drawn(self, event: Any) -> None:
        if event.action == ActionType.ADDED:
            QTimer.singleShot(0, self._measure)  # napari is still handling the mouse event

    def _measure(self) -> None:
        if self.layer is None or not self.layer.data or self._image is None:
            return
        corners = to_image_pixels(self.layer.data[-1], self.layer, self._image)
        sides = [np.hypot(*(corners[k + 1] - corners[k])) for k in range(2)]
        self.stop()
        if min(sides) >= _MIN_SIDE_PX:
            self.measured.emit(float(np.sqrt(sides[0] * sides[1])))

    def _removed(self, event: Any) -> None:
        if event.value is not self.layer or self.layer is None:
            return
        self.layer.events.data.disconnect(self._drawn)
        self._viewer.layers.events.removed.disconnect(self._removed)
        self.layer = None
        active = self._previously_active
        if active is not None and active in self._viewer.layers:
            self._viewer.layers.selection.active = active
        self.ended.emit()
