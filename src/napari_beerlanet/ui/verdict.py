"""Before and after a training, side by side, and the choice: keep the new model or discard it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtpy.QtCore import Signal
from qtpy.QtGui import QColor, QIcon, QPixmap
from qtpy.QtWidgets import QCheckBox, QLineEdit, QVBoxLayout, QWidget

from napari_beerlanet.ui.controls import button, heading, hint, row
from napari_beerlanet.ui.layers import ImageChoice
from napari_beerlanet.ui.planes import Plane, current_plane, pixel_size
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.session import session
from napari_beerlanet.ui.verdict_layers import (
    KINDS,
    remove_comparison,
    show_comparison,
    show_kinds,
)
from napari_beerlanet.ui.verdict_table import MetricsTable
from napari_beerlanet.ui.verdict_work import compare_on, judge_run, keep_model

_LARGEST = 16e6  # pixels of an image that is compared whole


class Verdict(QWidget):
    """Shows what a run has brought. `kept` tells the new model's file, `discarded` the run's."""

    kept = Signal(object)
    discarded = Signal(object)

    def __init__(self, panel: Any) -> None:
        super().__init__()
        self._panel, self._viewer = panel, panel.viewer
        self.judged: Any = None
        self.folder: Path | None = None
        self.task, self.compare_task, self.keep_task = panel.task(), panel.task(), panel.task()
        self.task.ended.connect(lambda _: self._enable(self.folder is not None))
        self.bar, self.compare_bar = RunBar(self.task), RunBar(self.compare_task)
        self.keep_bar = RunBar(self.keep_task, quiet=True)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        self.title = heading("Before and after")
        layout.addWidget(self.title)
        layout.addWidget(self.bar)
        self.table = MetricsTable()
        layout.addWidget(self.table)
        self.notes = hint()
        layout.addWidget(self.notes)
        self._add_comparison(layout)
        self._add_choice(layout)
        self.hide()

    def _add_comparison(self, layout: QVBoxLayout) -> None:
        self.image = ImageChoice(self._panel)
        self.compare = button(
            "Compare",
            "Show in the viewer what the new model finds otherwise in this image.",
            self.compare_image,
        )
        layout.addWidget(row(self.image, self.compare, stretch=0))
        layout.addWidget(self.compare_bar)
        self.boxes = {}
        for kind, (colour, tip) in KINDS.items():
            box = QCheckBox(kind)
            box.setChecked(True)
            box.setToolTip(tip)
            box.setIcon(_patch(colour))
            box.toggled.connect(lambda _: show_kinds(self._viewer, self._shown()))
            self.boxes[kind] = box
        self.toggles = row(*self.boxes.values())
        layout.addWidget(self.toggles)

    def _add_choice(self, layout: QVBoxLayout) -> None:
        self.name = QLineEdit()
        self.name.setPlaceholderText("name of the new model")
        self.name.setToolTip("The new model is saved under this name in the project's “models”.")
        self.name.returnPressed.connect(self.keep)
        self.keep_button = button(
            "Keep", "Save the new model and use it for detection from now on.", self.keep
        )
        self.discard_button = button(
            "Discard",
            "Go on with the model as it was. The run's folder stays until you delete it.",
            self.discard,
        )
        layout.addWidget(self.name)
        layout.addWidget(row(self.keep_button, self.discard_button))
        layout.addWidget(self.keep_bar)

    # --- measuring -------------------------------------------------------------------------------

    def judge(self, folder: Path, fields: int | None = None) -> None:
        """Measure a run's model and the one before; shown as soon as both are there."""
        self.clear()
        self.folder = folder
        self.name.setText(_suggested(folder))
        self.show()
        self.task.start(lambda report: judge_run(folder, report, fields), self._show)

    def clear(self) -> None:
        """Show nothing, and take our layers away."""
        for task in (self.task, self.compare_task):
            task.cancel()
        remove_comparison(self._viewer)
        self.judged = self.folder = None
        self.table.clear()
        self.notes.hide()
        self.toggles.hide()
        for bar in (self.bar, self.compare_bar, self.keep_bar):
            bar.say("")
        self._enable(False)
        self.hide()

    def _show(self, judged: Any) -> None:
        self.judged = judged
        self.table.fill(judged.rows())
        self.notes.setText("\n".join(judged.notes))
        self.notes.setVisible(bool(judged.notes))
        self._enable(True)
        if self.image.layer is not None:
            self.compare_image()

    def rows(self) -> list[list[str]]:
        """The table as text."""
        return self.table.texts()

    # --- on the open image -----------------------------------------------------------------------

    def compare_image(self) -> None:
        """Run both models on the chosen image, and show the difference as layers."""
        layer = self.image.layer
        if self.judged is None or layer is None:
            self.compare_bar.say("Open an image to see what the new model finds otherwise.")
            return
        plane, size = current_plane(layer, self._viewer), pixel_size(layer)
        if plane.shape[0] * plane.shape[1] > _LARGEST:
            self.compare_bar.say("This image is too large to be compared; open a field of it.")
            return
        before, after = self.judged.before, self.judged.after
        self.compare_task.start(
            lambda report: compare_on(plane, size, before, after, report),
            lambda found: self._compared(layer, plane, found),
        )

    def _compared(self, layer: Any, plane: Plane, found: Any) -> None:
        self.compare_bar.say(f"{plane.name}: {found.sentence()}")
        if layer in self._viewer.layers:
            show_comparison(self._viewer, layer, found, plane.index, self._shown())
            self.toggles.show()

    def _shown(self) -> list[str]:
        return [kind for kind, box in self.boxes.items() if box.isChecked()]

    # --- the choice ------------------------------------------------------------------------------

    def keep(self) -> None:
        """Save the new model, and load it for detection."""
        folder, judged, name = self.folder, self.judged, self.name.text().strip()
        if folder is None:
            return
        if not name:
            self.keep_bar.say("Give the new model a name first.")
            return
        self._enable(False)
        self.keep_task.start(
            lambda report: keep_model(folder, name, judged),
            self._keep,
            lambda error: self._enable(True),
        )

    def _keep(self, made: tuple[Path, Any]) -> None:
        path, model = made
        session(self._viewer).put_model(model, str(path))
        self.clear()
        self.kept.emit(path)

    def discard(self) -> None:
        """Leave everything as it was; the run's folder stays."""
        folder = self.folder
        self.clear()
        self.discarded.emit(folder)

    def _enable(self, on: bool) -> None:
        for widget in (self.keep_button, self.name):
            widget.setEnabled(on)
        self.compare.setEnabled(on and self.judged is not None)


def _patch(colour: str) -> QIcon:
    """A small square of a colour, which is seen on dark and on light."""
    square = QPixmap(12, 12)
    square.fill(QColor(colour))
    return QIcon(square)


def _suggested(folder: Path) -> str:
    return f"{folder.parents[1].name} {folder.name[:10]}"
