"""The classification panel ("Classify cells")."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from napari.layers import Shapes
from psygnal import SignalInstance
from qtpy.QtCore import QSize, Qt, QTimer, Signal
from qtpy.QtGui import QResizeEvent, QShowEvent
from qtpy.QtWidgets import (
    QCheckBox,
    QGridLayout,
    QLayout,
    QPushButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import QSignalDebouncer, signals_blocked

from napari_beerlanet.core.boxes.classes import applicable_classes
from napari_beerlanet.core.checkpoints.info import CLASSIFIER
from napari_beerlanet.ui.classify.job import ClassifyResult, run_classification, run_summary
from napari_beerlanet.ui.classify.patches import PatchSection
from napari_beerlanet.ui.classify.target import (
    ClassifyTarget,
    DetectionTarget,
    annotation_layer_of,
    classify_targets,
)
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    DisabledReason,
    button,
    combo_box,
    copy_text,
    form,
    plain_tooltip,
    row,
    separator,
)
from napari_beerlanet.ui.common.model_section import DevicePicker, ModelPanel, ModelSection
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.detections.drawing import ColourBy
from napari_beerlanet.ui.detections.type_counts import TypeCountsView
from napari_beerlanet.ui.viewer.empty_state import EmptyState
from napari_beerlanet.ui.viewer.layers import (
    ImagePicker,
    LayerListWatcher,
    guard_software_opengl,
)

if TYPE_CHECKING:
    from napari import Viewer

_DEBOUNCE_MS = 30
_CLASS_SPACING_PX = 4
_SHOW_DELAY_MS = 20  # from types to their counts: in between the canvas is painted
_NO_BOXES = "There are no boxes yet: find cells first (tab “Cells”), or annotate some."
COLOUR_CHOICES: dict[ColourBy, str] = {"class": "class of the detector", "type": "cell type"}
"""What the colours of boxes can say, as the user reads it."""


class ClassifyWidget(ModelPanel):
    """The panel "Classify cells".

    `classified` is emitted with the `ClassifyResult` when its types are in their layer. Other rooms
    put presets into `presets`, above the model, and what else a classifier does into `extras`.
    """

    title = "Classify cells"
    classified = Signal(object)

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        guard_software_opengl(self.viewer)
        self.session = get_session(self.viewer)
        self.classify_task = self.task()
        self.targets: list[ClassifyTarget] = []
        self._layer: DetectionLayer | None = None  # whose signals are connected
        self._annotations: Shapes | None = None
        self._build()
        self._debounce = QSignalDebouncer(parent=self)
        self._debounce.setTimeout(_DEBOUNCE_MS)
        self._shown: ClassifyResult | None = None  # whose counts are shown next
        self._waiting: list[Callable[[], None]] = []
        self._show_timer = QTimer(self)
        self._show_timer.setSingleShot(True)
        self._show_timer.setInterval(_SHOW_DELAY_MS)
        self._show_timer.timeout.connect(self._show_result)
        self._connect()
        self.model.load_initial()
        self._image_chosen()

    def _build(self) -> None:
        self.image = ImagePicker(self)
        self.device = DevicePicker()
        self.model = ModelSection(self, self.session, self.device, CLASSIFIER)
        self.empty = EmptyState(self)
        self.presets, self.extras = QVBoxLayout(), QVBoxLayout()
        self.boxes = combo_box(
            "Which boxes are classified: the detections of this image, or its annotations. "
            "Annotations keep the types, to be corrected and trained on.",
            12,
            expanding=True,
        )
        self.classes = ClassChoice()
        self.run_button = QPushButton("Classify cells")
        self.run_button.setToolTip("Give the boxes of these classes a cell type (Ctrl+Shift+K).")
        self.run_reason = DisabledReason(self.run_button)
        self.progress_bar = TaskProgressBar(self.classify_task)
        self._image_of_message: Any = None
        self.more = CollapsibleGroup("More settings")
        more = form()
        more.addRow("Device", self.device.native)
        self.more.body.addLayout(more)
        self.result = self._result_section()
        model = form()
        model.addRow("Model", self.model.picker)
        self.rows = rows = form()
        rows.addRow("Image", self.image)
        rows.addRow("Boxes", self.boxes)
        rows.addRow("Classes", self.classes)
        self.section = QWidget()
        section = QVBoxLayout(self.section)
        section.setContentsMargins(0, 0, 0, 0)
        section.setSpacing(6)
        section.addLayout(rows)
        for widget in (
            self.more,
            row(self.run_button),
            self.run_reason,
            self.progress_bar,
            self.result,
        ):
            section.addWidget(widget)
        self.body.addLayout(self.presets)
        self.body.addLayout(model)
        self.body.addWidget(self.model)
        self.body.addWidget(separator())
        self.body.addWidget(self.empty)
        self.body.addWidget(self.section)
        self.patches = PatchSection(
            self,
            self.image,
            lambda: (str(self.model.picker.key or ""), self.model.loaded),
            lambda: self.device.chosen,
        )
        self.extras.addWidget(self.patches)
        self.body.addLayout(self.extras)
        self.body.addStretch(1)

    def _result_section(self) -> QWidget:
        self.counts = TypeCountsView()
        self.colour_by = combo_box("What the colours of the boxes show.", 12, expanding=True)
        for colour_by, text in COLOUR_CHOICES.items():
            self.colour_by.addItem(text, colour_by)
        self.undo_run = QPushButton()
        self.copy = button(
            "Copy table", "Copy the types as a table for a spreadsheet.", self.copy_table
        )
        self.copy_summary_button = button(
            "Copy summary", "Copy the types as one sentence.", self.copy_summary
        )
        colours = form()
        colours.addRow("Colour boxes by", self.colour_by)
        section = QWidget()
        layout = QVBoxLayout(section)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(separator())
        layout.addWidget(self.counts)
        self.colour_row = QWidget()
        self.colour_row.setLayout(colours)
        layout.addWidget(self.colour_row)
        layout.addWidget(row(self.copy, self.copy_summary_button, self.undo_run))
        return section

    def _connect(self) -> None:
        self.image.chosen.connect(lambda *_: self._image_chosen())
        self.model.ready.connect(self._model_ready)
        self.boxes.activated.connect(lambda *_: self._boxes_chosen())
        self.classes.changed.connect(self._update_run_button)
        self.colour_by.activated.connect(lambda *_: self._colour_chosen())
        self.undo_run.clicked.connect(lambda *_: self.undo())
        self.run_button.clicked.connect(lambda *_: self.run())
        self.classify_task.started.connect(self._update_run_button)
        self.classify_task.ended.connect(self._ended)
        self._debounce.triggered.connect(self.update_targets)
        self.add_shortcut("Ctrl+Shift+K", self.run)
        self.connect_event(self.session.detections_changed, self._update_soon)
        self.connect_event(self.session.type_palette.changed, self._update_soon)
        self.connect_event(self.viewer.dims.events.point, self._update_soon)
        self._layer_list = LayerListWatcher(self, self._layers_changed)

    # --- state ------------------------------------------------------------------------------------

    @property
    def target(self) -> ClassifyTarget | None:
        """The boxes that are chosen, None where there are none."""
        index = self.boxes.currentIndex()
        return self.targets[index] if 0 <= index < len(self.targets) else None

    def _layers_changed(self) -> None:
        self.empty.update_text()
        self._image_chosen()

    def _image_chosen(self) -> None:
        has_image = self.image.layer is not None
        self.empty.setVisible(not has_image)
        self.section.setVisible(has_image)
        self.patches.setVisible(has_image)
        if self.image.layer is not self._image_of_message:
            self._image_of_message = self.image.layer
            if not self.classify_task.running:
                self.progress_bar.set_message("")  # it was about the image before
        self.update_targets()

    def _update_soon(self, event: Any = None) -> None:
        self._debounce.throttle()

    def update_targets(self) -> None:
        """Offer the boxes that the image has now, with their classes; show counts of types."""
        chosen = self.target.kind if self.target is not None else None
        self.targets = classify_targets(self.viewer, self.image.layer)
        kinds = [target.kind for target in self.targets]
        with signals_blocked(self.boxes):
            self.boxes.clear()
            self.boxes.addItems(kinds)
            self.boxes.setCurrentIndex(kinds.index(chosen) if chosen in kinds else 0)
        self.boxes.setEnabled(bool(kinds))
        self._follow_layers()
        self._boxes_chosen()

    def _follow_layers(self) -> None:
        """Hear of changes of the layers that hold the boxes."""
        layers = [target.layer for target in self.targets if isinstance(target, DetectionTarget)]
        layer = layers[0] if layers else None
        if layer is not self._layer:
            for signal in _signals(self._layer):
                signal.disconnect(self._update_soon, missing_ok=True)
            self._layer = layer
            for signal in _signals(layer):
                signal.connect(self._update_soon)
        # Also one without boxes: the first that is drawn in it has to be heard of.
        image = self.image.layer
        annotations = None if image is None else annotation_layer_of(self.viewer, image)
        if annotations is not self._annotations:
            for old, connect in (
                (self._annotations, self.disconnect_event),
                (annotations, self.connect_event),
            ):
                if old is not None:
                    connect(old.events.data, self._update_soon)
                    connect(old.events.features, self._update_soon)
            self._annotations = annotations

    def _boxes_chosen(self) -> None:
        target = self.target
        self.classes.offer(target.class_counts() if target is not None else {})
        self._show_types()
        self._update_run_button()

    def _model_ready(self) -> None:
        model = self.model.loaded
        if model is not None:
            self.classes.prefer(model.info.get("applies_to") or ())
        self._update_run_button()
        self.patches.update_state()

    def _show_types(self) -> None:
        target = self.target
        if target is None:
            self.counts.clear()
        else:
            target.show(self.counts)
        has_types = self.counts.class_counts is not None
        can_undo = target is not None and target.can_undo
        self.result.setVisible(has_types or can_undo)
        self.copy.setVisible(has_types)
        self.copy_summary_button.setVisible(has_types)
        self.colour_row.setVisible(has_types and isinstance(target, DetectionTarget))
        if isinstance(target, DetectionTarget):
            self.colour_by.setCurrentIndex(list(COLOUR_CHOICES).index(target.layer.colour_by))
        undone = target is not None and target.undone
        self.undo_run.setVisible(can_undo)
        self.undo_run.setText("Redo run" if undone else "Undo run")
        self.undo_run.setToolTip(
            "Give the boxes the types of the last run again."
            if undone
            else "Bring back the types before the last run; boxes stay as they are."
        )

    def _update_run_button(self) -> None:
        reason = ""
        if self.image.layer is None:
            reason = "Open an image first."
        elif self.target is None:
            reason = _NO_BOXES
        elif not self.model.picker.key:
            reason = "Choose a model first."
        elif not self.classes.chosen:
            reason = "Choose a class."
        elif self.classify_task.running:
            reason = "A classification is running."
        self.run_reason.update_button(reason)
        for part in (self.classes, self.rows.labelForField(self.classes)):
            if part is not None:
                part.setVisible(self.target is not None)

    def _colour_chosen(self) -> None:
        if isinstance(self.target, DetectionTarget):
            self.target.layer.set_colour_by(self.colour_by.currentData())

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Classify with the present settings."""
        target = self.target
        if target is None or self.classify_task.running or not self.run_button.isEnabled():
            return
        try:
            job = target.job(
                self.classes.chosen, self.model.picker.key, self.model.loaded, self.device.chosen
            )
        except Exception as error:
            self.progress_bar.show_error(error)
            return
        if not len(job.rows):
            classes = ", ".join(self.classes.chosen)
            self.progress_bar.set_message(f"There are no boxes of {classes} to classify.")
            return
        self.classify_task.start(
            lambda report: run_classification(replace(job, owner=self.session), report),
            lambda result: self._done(target, result),
            self._failed,
        )

    def run_on_detections(self) -> None:
        """Classify the detections of the classes that the loaded classifier is meant for."""
        self.update_targets()
        self.boxes.setCurrentIndex(0)  # detections come before annotations
        self._boxes_chosen()
        model = self.model.loaded
        if model is not None:
            self.classes.choose(model.info.get("applies_to") or ())
        self.run()

    def _done(self, target: ClassifyTarget, result: ClassifyResult) -> None:
        self.model.share_model(result.model, result.job.model_key)
        if not target.write(result):
            self.progress_bar.set_message(
                "The boxes were removed or detected again meanwhile; classify them again."
            )
            return
        self._shown = result
        self._show_timer.start()

    def _show_result(self) -> None:
        """Show the counts of the last run."""
        result, self._shown = self._shown, None
        if result is not None:
            self.update_targets()
            self.progress_bar.set_message(run_summary(result))
            self.show_soon(self.counts.table)
            self.classified.emit(result)
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def when_shown(self, callback: Callable[[], None]) -> None:
        """Call when the counts of the last run are shown: at once, unless they are still to come.

        They come a moment after the boxes have their types. When they are first shown they take as
        long as the boxes, and as their painting; in between, the window answers.
        """
        if self._show_timer.isActive():
            self._waiting.append(callback)
        else:
            callback()

    def _failed(self, error: BaseException) -> None:
        self.model.picker.refresh()  # a file may have been deleted

    def _ended(self, outcome: TaskOutcome) -> None:
        self._update_run_button()

    def undo(self) -> None:
        """Bring back the types before the last run, or redo it."""
        if self.target is not None:
            self.target.undo()
            self.update_targets()

    def copy_table(self) -> None:
        """Copy the counts to the clipboard as a table."""
        if self.counts.class_counts is not None:
            copy_text(self.counts.class_counts.tsv())

    def copy_summary(self) -> None:
        """Copy the counts to the clipboard as a sentence."""
        if self.counts.class_counts is not None:
            copy_text(self.counts.class_counts.text())

    def on_closed(self) -> None:
        """Layers stay as they are."""
        self._debounce.cancel()
        self._show_timer.stop()
        for signal in _signals(self._layer):
            signal.disconnect(self._update_soon, missing_ok=True)
        self.model.disconnect_session()


def _signals(layer: DetectionLayer | None) -> list[SignalInstance]:
    if layer is None:
        return []
    return [layer.changed, layer.filter_changed, layer.colours_changed, layer.removed]


class ClassChoice(QWidget):
    """A check box for each class of the boxes, with their number.

    Those that a classifier is meant for are checked, by name; all, where it does not say, or where
    there are none of them. What the user has checked or unchecked stays, until another model comes.
    As many are side by side as the width has room for; a name that is wider than that is elided.
    """

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, QCheckBox] = {}
        self._counts: dict[str, int] = {}
        self._preferred: tuple[str, ...] = ()
        self._by_user: dict[str, bool] = {}
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(_CLASS_SPACING_PX)
        # Its width is the panel's: names must not widen it, or they would be cut at its border.
        self._grid.setSizeConstraint(QLayout.SizeConstraint.SetNoConstraint)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    @property
    def chosen(self) -> list[str]:
        """Names of the classes that are checked."""
        return [name for name, box in self.boxes.items() if box.isChecked()]

    def prefer(self, names: Collection[str]) -> None:
        """Check the classes that a model is meant for; [] for all."""
        if tuple(names) != self._preferred:
            self._preferred = tuple(names)
            self._by_user.clear()
        self._check()
        self.changed.emit()

    def choose(self, names: Collection[str]) -> None:
        """Check the classes that a model is meant for alone, whatever the user has checked."""
        self._by_user.clear()
        self._preferred = tuple(names)
        self._check()
        self.changed.emit()

    def offer(self, counts: Mapping[str, int]) -> None:
        """Offer these classes, with the number of boxes of each."""
        if list(counts) != list(self.boxes):
            for box in self.boxes.values():
                self._grid.removeWidget(box)
                box.deleteLater()
            self.boxes = {}
            for name in counts:
                box = self.boxes[name] = QCheckBox(self)
                box.setToolTip(plain_tooltip(f"Classify the boxes of the class “{name}”."))
                box.clicked.connect(self._clicked(name))
            self._check()
        if dict(counts) != self._counts or not self._grid.count():
            self._counts = dict(counts)
            self._arrange()

    def minimumSizeHint(self) -> QSize:
        """Qt's: as narrow as it has to be."""
        return QSize(0, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent | None) -> None:
        """Qt's: arrange the boxes for the new width."""
        super().resizeEvent(event)
        self._arrange()

    def showEvent(self, event: QShowEvent | None) -> None:
        """Qt's: the style sheet, which decides on the room that a name takes, counts from now."""
        super().showEvent(event)
        self._arrange()

    def _arrange(self) -> None:
        """Names with their counts, in as many columns as there is room for."""
        widest = 1
        for name, box in self.boxes.items():
            box.setText(self._text(name))
            widest = max(widest, box.sizeHint().width())
        columns = max((self.width() + _CLASS_SPACING_PX) // (widest + _CLASS_SPACING_PX), 1)
        for place, (name, box) in enumerate(self.boxes.items()):
            excess = box.sizeHint().width() - self.width()
            if excess > 0:
                box.setText(self._text(name, excess))
            self._grid.addWidget(box, *divmod(place, columns))

    def _text(self, name: str, excess: int = 0) -> str:
        """ "RBC (212)", with the name elided so that it takes so many pixels less."""
        metrics, shown = self.fontMetrics(), name
        if excess:
            width = max(metrics.horizontalAdvance(name) - excess, 0)
            shown = metrics.elidedText(name, Qt.TextElideMode.ElideMiddle, width)
        # An & would be taken for a shortcut.
        return f"{shown} ({self._counts[name]:,})".replace("&", "&&")

    def _clicked(self, name: str) -> Callable[[bool], None]:
        def clicked(checked: bool) -> None:
            self._by_user[name] = checked
            self.changed.emit()

        return clicked

    def _check(self) -> None:
        names = list(self.boxes)
        meant = applicable_classes(self._preferred, names) or names
        for name, box in self.boxes.items():
            box.setChecked(self._by_user.get(name, name in meant))
