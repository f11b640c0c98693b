"""Compare the model before and after a training run, and keep or discard the new one.

Metrics on the validation data and on a reference; the changed detections on the open image or, of
a classifier, the validation crops whose type has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from napari.layers import Image, Shapes
from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QGridLayout, QLabel, QLineEdit, QVBoxLayout, QWidget

from napari_beerlanet.core.boxes.classes import CHANGE_COLOURS
from napari_beerlanet.core.checkpoints.checkpoint import model_kind
from napari_beerlanet.core.checkpoints.info import CLASSIFIER, DETECTOR
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report, subprogress
from napari_beerlanet.core.evaluation.diff import MAX_COMPARED_PIXELS
from napari_beerlanet.core.training.runs import inspect_run
from napari_beerlanet.ui.common.controls import (
    button,
    heading,
    hint,
    plain_label,
    row,
    wrapping_label,
)
from napari_beerlanet.ui.common.model_section import make_ready
from napari_beerlanet.ui.common.panel import Panel, ThemedLabel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.recent import add_recent_model
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.comparison_layer import (
    ChangeToggles,
    comparison_layer,
    remove_comparison,
    show_comparison,
)
from napari_beerlanet.ui.finetune.run_view import PictureButton
from napari_beerlanet.ui.viewer.layer_data import ShapesSnapshot, read_layer_annotations
from napari_beerlanet.ui.viewer.layers import ImagePicker, Role, role_of, source_image
from napari_beerlanet.ui.viewer.planes import Plane, current_plane, pixel_size

if TYPE_CHECKING:  # what takes long to load is loaded in worker threads
    from napari.viewer import Viewer

    from napari_beerlanet.core.boxes.annotations import Annotations
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.evaluation.diff import DetectionDiff
    from napari_beerlanet.core.training.comparison import (
        ComparisonRow,
        CropChange,
        ModelComparison,
    )

_HEADERS = {
    "detect": ("mAP in percent", "before", "after", ""),
    "classify": ("Accuracy in percent", "before", "after", ""),
}
_TOOLTIPS = {
    "detect": "mAP in percent: how well boxes and classes match. Higher is better.",
    "classify": "Crops classified correctly, in percent; for a type, of the crops of that type.",
}
_MAX_SHOWN_CHANGES = 24
_SHEET_WIDTH = 320  # pixels on the screen
_MIN_LABEL_WIDTH = 90  # pixels of a row's name
_TITLE = "Model comparison: before and after"


class ModelComparisonPanel(QWidget):
    """The result of a run. `kept` carries the new model's file, `discarded` the run's folder.

    The model can be kept or discarded at any time: a comparison that is not done yet continues
    after *Keep*, and its result is added to the record of the kept model.
    """

    kept = Signal(object)
    discarded = Signal(object)

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self._panel, self._viewer = panel, panel.viewer
        self.comparison: ModelComparison | None = None
        self.folder: Path | None = None
        self.kept_path: Path | None = None
        self.kept_kind = DETECTOR
        self._told: WeakKeyDictionary[Image, tuple[str, str]] = WeakKeyDictionary()
        """Of compared images the summary, and the warning that counts them."""
        self.evaluate_task, self.compare_task, self.keep_task = (panel.task() for _ in range(3))
        self.evaluate_bar = TaskProgressBar(self.evaluate_task)
        self.compare_bar = TaskProgressBar(self.compare_task)
        self.keep_bar = TaskProgressBar(self.keep_task, quiet=True)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        self.title = heading(_TITLE)
        layout.addWidget(self.title)
        layout.addWidget(self.evaluate_bar)
        self.table = MetricsTable()
        layout.addWidget(self.table)
        self.notes = hint()
        layout.addWidget(self.notes)
        self.changes_line, self.changes = wrapping_label(), PictureButton()
        layout.addWidget(self.changes_line)
        layout.addWidget(self.changes)
        self._add_image_comparison(layout)
        self._add_keep_or_discard(layout)
        self.hide()

    def _add_image_comparison(self, layout: QVBoxLayout) -> None:
        self.image_choice = ImagePicker(self._panel)
        self.compare_button = button(
            "Compare",
            "Show where the detections of the new model differ on this image.",
            self.compare_image,
        )
        self.image_row = row(self.image_choice, self.compare_button, stretch=0)
        layout.addWidget(self.image_row)
        layout.addWidget(self.compare_bar)
        self.toggles = ChangeToggles(self._viewer)
        layout.addWidget(self.toggles)
        self.image_choice.chosen.connect(self._show_summary)

    def _add_keep_or_discard(self, layout: QVBoxLayout) -> None:
        self.name = QLineEdit()
        self.name.setPlaceholderText("Name of the new model")
        self.name.setToolTip(
            "The new model is saved under this name in the project's models folder."
        )
        self.name.returnPressed.connect(self.keep)
        self.keep_button = button(
            "Keep", "Save the new model and load it, to be used from now on.", self.keep
        )
        self.discard_button = button(
            "Discard",
            "Keep using the previous model. The run's folder stays until you delete it.",
            self.discard,
        )
        self.close_button = button("Close", "Close this comparison; the model is kept.", self.clear)
        self.decision = row(self.keep_button, self.discard_button)
        self.warning = ThemedLabel(kind="warning")  # nobody keeps the model without seeing it
        layout.addWidget(self.warning)
        layout.addWidget(self.name)
        layout.addWidget(self.decision)
        layout.addWidget(row(self.close_button))
        layout.addWidget(self.keep_bar)

    @property
    def pending(self) -> bool:
        """Whether a new model waits for being kept or discarded."""
        return self.folder is not None and self.kept_path is None

    # --- metrics ---------------------------------------------------------------------------------

    def evaluate_run(self, folder: Path, reference_images: int | None = None) -> None:
        """Evaluate a run's best model and its parent, and show the metrics side by side.

        `reference_images` is the size of the reference, None for the default.
        """
        self.clear()
        self.folder = folder
        self.name.setText(_default_model_name(folder))
        self._show_warning(inspect_run(folder).warning)
        self._update_controls()
        self.show()

        def work(report: Report) -> ModelComparison:
            from napari_beerlanet.core.evaluation.dataset import REFERENCE_COUNT
            from napari_beerlanet.core.training.comparison import compare_models

            return compare_models(folder, report, reference_images or REFERENCE_COUNT)

        self.evaluate_task.start(work, self._show_metrics)

    def clear(self) -> None:
        """Show nothing, and remove the comparison layer."""
        for task in (self.evaluate_task, self.compare_task):
            task.cancel()
        remove_comparison(self._viewer)
        self.comparison = self.folder = self.kept_path = None
        self._show_warning("")
        self.changes_line.hide()
        self.changes.hide()
        self._told.clear()
        self.title.setText(_TITLE)
        self.table.clear()
        self.notes.hide()
        self.toggles.hide()
        for bar in (self.evaluate_bar, self.compare_bar, self.keep_bar):
            bar.set_message("")
        self._update_controls()
        self.hide()

    def _show_metrics(self, comparison: ModelComparison) -> None:
        self.comparison = comparison
        self.table.set_rows([*comparison.rows(), *comparison.class_rows()], comparison.task)
        self._show_changes(comparison)
        self._show_warning(comparison.change.text if comparison.change else "")
        forgotten = [f"Forgotten: {text}." for text in comparison.forgotten]
        notes = [*forgotten, *comparison.notes]
        self.notes.setText("\n".join(notes))
        self.notes.set_kind("warning" if forgotten else "hint")
        self.notes.setVisible(bool(notes))
        self._update_controls()
        if self.kept_path is not None:
            self._record_comparison(self.kept_path, comparison)
        elif self.image_choice.layer is not None and comparison.task == "detect":
            self.compare_image()

    def _show_warning(self, text: str) -> None:
        """Say that the new model takes cells for other sizes or classes."""
        self.warning.setText(text)
        self.warning.setVisible(bool(text))

    def _show_changes(self, comparison: ModelComparison) -> None:
        """Of a classifier: the crops whose type has changed."""
        text, changes = comparison.describe_changes(), comparison.changes[:_MAX_SHOWN_CHANGES]
        more = len(comparison.changes) - len(changes)
        shown = f" The first {len(changes)} of those that changed:" if more > 0 else ""
        self.changes_line.setText(f"{text}{shown}")
        self.changes_line.setVisible(bool(text))
        self.changes.setVisible(bool(changes))
        if changes:
            from napari_beerlanet.core.figures.drawing import draw_crop_sheet

            sheet = draw_crop_sheet(
                [change.pixels for change in changes],
                [
                    (f"was {one.before}", f"now {one.after}", f"annotated: {one.annotated}")
                    for one in changes
                ],
                [CHANGE_COLOURS[_kind_of_change(one)] for one in changes],
            )
            self.changes.show_picture("Crops whose type has changed", sheet, _SHEET_WIDTH)

    def rows(self) -> list[list[str]]:
        """The table as text."""
        return self.table.texts()

    # --- on the open image -----------------------------------------------------------------------

    def compare_image(self) -> None:
        """Run both models on the selected image, and show the difference as a layer."""
        layer = self.image_choice.layer
        if self.comparison is None or layer is None:
            self.compare_bar.set_message("Open an image to compare the detections of both models.")
            return
        plane, size = current_plane(layer, self._viewer), pixel_size(layer)
        if plane.shape[0] * plane.shape[1] > MAX_COMPARED_PIXELS:
            self.compare_bar.set_message("This image is too large to compare; open a crop of it.")
            return
        before, after = self.comparison.before, self.comparison.after
        self.compare_task.start(
            lambda report: compare_detections(plane, size, before, after, report),
            lambda diff: self._show_diff(layer, plane, diff),
        )

    def _show_diff(self, layer: Image, plane: Plane, diff: DetectionDiff) -> None:
        from napari_beerlanet.core.evaluation.diff import describe_against

        annotations = annotations_of(self._viewer, layer, plane)
        against = describe_against(diff, annotations) if annotations is not None else ""
        change = self.comparison.change if self.comparison is not None else None
        warning = change.with_open_image(diff.before, diff.after).text if change else ""
        self._told[layer] = f"{plane.name}: {diff.summary()} {against}".rstrip(), warning
        if layer in self._viewer.layers:
            show_comparison(self._viewer, layer, diff, plane.index, self.toggles.visible_kinds)
        self._show_summary(self.image_choice.layer)

    def _show_summary(self, image: Image | None) -> None:
        """Show what was compared on the chosen image, and nothing of another one."""
        change = self.comparison.change if self.comparison is not None else None
        nothing = "", change.text if change else self.warning.text()
        summary, warning = self._told.get(image, nothing) if image is not None else nothing
        self.compare_bar.set_message(summary)
        self._show_warning(warning)
        shown = comparison_layer(self._viewer)
        is_of_image = shown is not None and source_image(self._viewer, shown) is image
        self.toggles.setVisible(image is not None and is_of_image)

    # --- keep or discard -------------------------------------------------------------------------

    def keep(self) -> None:
        """Save the new model, and load it for detection."""
        folder, comparison, name = self.folder, self.comparison, self.name.text().strip()
        if folder is None:
            return
        if not name:
            self.keep_bar.set_message("Enter a name for the new model first.")
            return
        self.keep_task.start(
            lambda report: keep_and_load_model(folder, name, comparison),
            lambda saved: self._use_saved_model(folder, saved, comparison is not None),
            lambda error: self._update_controls(),
        )
        self._update_controls()

    def _use_saved_model(
        self, folder: Path, saved: tuple[Path, Detector | Classifier], with_comparison: bool
    ) -> None:
        path, model = saved
        session, self.kept_kind = get_session(self._viewer), model_kind(model.info)
        kept: Any = model
        if self.kept_kind == CLASSIFIER:
            add_recent_model(path, CLASSIFIER)
            session.set_classifier(kept, str(path))
        else:
            session.set_model(kept, str(path))
        if self.folder != folder:  # another run's result was opened meanwhile, and stays
            self._update_controls()
        elif with_comparison or not (self.comparison or self.evaluate_task.running):
            self.clear()
        else:
            self.kept_path = path
            self.title.setText(f"{path.stem}: before and after")
            self.compare_task.cancel()
            self._update_controls()
            if self.comparison is not None:  # it was done while the model was saved
                self._record_comparison(path, self.comparison)
        self.kept.emit(path)

    def _record_comparison(self, path: Path, comparison: ModelComparison) -> None:
        """Add the comparison to the record of a model that was kept before it was done."""

        def work(report: Report) -> dict[str, Any]:
            from napari_beerlanet.core.training.comparison import record_comparison

            return record_comparison(path, comparison)

        def done(info: dict[str, Any]) -> None:
            session = get_session(self._viewer)  # panels describe it anew
            if session.model is not None and session.model_key == str(path):
                session.model.info = info
                session.set_model(session.model, str(path))
            elif session.classifier is not None and session.classifier_key == str(path):
                session.classifier.info = info
                session.set_classifier(session.classifier, str(path))

        self.keep_task.start(work, done)

    def discard(self) -> None:
        """Keep using the previous model; the run's folder stays."""
        folder = self.folder
        self.clear()
        self.discarded.emit(folder)

    def _update_controls(self) -> None:
        """Keep and Discard from the start, and Close once the model is kept."""
        for control in (self.keep_button, self.discard_button, self.name):
            control.setEnabled(self.pending and not self.keep_task.running)
        for part in (self.name, self.decision):
            part.setVisible(self.pending)
        classifies = self.folder is not None and inspect_run(self.folder).task == "classify"
        self.image_row.setVisible(self.pending and not classifies)
        self.compare_button.setEnabled(self.pending and self.comparison is not None)
        self.close_button.setVisible(self.kept_path is not None)


class MetricsTable(QWidget):
    """Shows `ComparisonRow`s in percent, with an arrow for better or worse."""

    def __init__(self) -> None:
        super().__init__()
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setColumnStretch(0, 1)
        self._labels: list[list[QLabel]] = []

    def set_rows(self, rows: Sequence[ComparisonRow], task: str = "detect") -> None:
        """Show these rows, of detectors ("detect") or classifiers ("classify")."""
        self.clear()
        self.setToolTip(_TOOLTIPS[task])
        nouns = ("crop", "crops") if task == "classify" else ("box", "boxes")
        lines = [_HEADERS[task]]
        for row_ in rows:
            before, after = _percent_text(row_.before), _percent_text(row_.after)
            boxes = f" ({count_of(row_.count, *nouns)})" if row_.count else ""
            mark = ": forgotten" if row_.forgotten else ""
            lines.append((f"{row_.what}{boxes}{mark}", before, after, _change_text(row_)))
        self._labels = [[plain_label(text) for text in line] for line in lines]
        for i, labels in enumerate(self._labels):
            for j, label in enumerate(labels):
                if j:
                    label.setAlignment(Qt.AlignmentFlag.AlignRight)
                else:  # the numbers are what must be seen in a narrow dock
                    label.setWordWrap(True)
                    label.setMinimumWidth(_MIN_LABEL_WIDTH)
                self._grid.addWidget(label, i, j)

    def clear(self) -> None:
        """Show nothing."""
        for label in chain.from_iterable(self._labels):
            self._grid.removeWidget(label)
            label.hide()
            label.deleteLater()
        self._labels = []

    def texts(self) -> list[list[str]]:
        """The cells, row by row."""
        return [[label.text() for label in labels] for labels in self._labels]


def annotations_of(viewer: Viewer, image: Image, plane: Plane) -> Annotations | None:
    """The annotations of an image's plane that are in the viewer, None where there are none."""
    for layer in viewer.layers:
        if not isinstance(layer, Shapes) or role_of(layer) != Role.ANNOTATIONS:
            continue
        if source_image(viewer, layer) is image:
            drawn = read_layer_annotations(ShapesSnapshot.of(layer), plane.index, plane.shape)
            return drawn.annotations if len(drawn.annotations) else None
    return None


def compare_detections(
    plane: Plane,
    size: tuple[float, float] | None,
    before: Detector,
    after: Detector,
    report: Report,
) -> DetectionDiff:
    """Run both models on one plane."""
    from napari_beerlanet.core.evaluation.diff import diff_detections
    from napari_beerlanet.ui.viewer.fast_shapes import fast_shapes_supported

    fast_shapes_supported()  # compiles what drawing needs here and not in the GUI thread
    pixels = plane.read()
    halves = subprogress(report, 0.0, 0.5), subprogress(report, 0.5, 1.0)
    return diff_detections(
        before.detect(pixels, pixel_size=size, densities=False, report=halves[0]),
        after.detect(pixels, pixel_size=size, densities=False, report=halves[1]),
    )


def _kind_of_change(change: CropChange) -> str:
    return "lost" if change.lost else "gained" if change.gained else "changed"


def keep_and_load_model(
    folder: Path, name: str, comparison: ModelComparison | None
) -> tuple[Path, Detector | Classifier]:
    """Save a run's best model under a name; returns its file and the loaded model."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint
    from napari_beerlanet.core.training.comparison import save_best_model

    path = save_best_model(folder, name, comparison)
    return path, make_ready(load_checkpoint(path))


def _percent_text(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _change_text(line: ComparisonRow) -> str:
    if line.before is None or line.after is None:
        return ""
    # Of the numbers as they are shown: whoever subtracts them gets the same.
    points = round(round(100 * line.after, 1) - round(100 * line.before, 1), 1)
    return f"{'▲' if points > 0 else '▼'} {abs(points):.1f}" if points else "="


def _default_model_name(folder: Path) -> str:
    return f"{folder.parents[1].name} {folder.name[:10]}"
