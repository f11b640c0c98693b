"""What is done with each image of a batch, and how; filled from the panels that are open."""

from __future__ import annotations

import os
from typing import Any

from qtpy.QtCore import Signal
from qtpy.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QLineEdit,
    QRadioButton,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.studysettings import StudySettings
from napari_beerlanet.ui.controls import Fold, form, heading, hint, row
from napari_beerlanet.ui.detect_form import Percent
from napari_beerlanet.ui.model_choice import ModelChoice

_FINDING = ("model", "confidence", "iou", "object_size", "device")
_STAINS = ("components", "iterations", "lam", "gamma", "spectra", "leave_out")


class BatchForm(QWidget):
    """Settings of a study; `changed` whenever one is."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._kept = StudySettings()  # what has no control of its own
        self._make()
        self._lay_out()
        for box in (self.stains, self.find, self.measure, self.reports, self.previews):
            box.toggled.connect(self._told)
        self.model.chosen.connect(self._told)
        self.confidence.changed.connect(self._told)
        self.here.toggled.connect(self._told)
        self.workers.valueChanged.connect(self._told)
        self.address.textChanged.connect(self._told)
        self._told()

    def _make(self) -> None:
        self.stains = _box("Take the stains apart", "Spectra, and a preview of each stain.")
        self.find = _box("Find cells", "Boxes as CSV and GeoJSON (QuPath), and a picture.")
        self.measure = _box("Measure the stains of each cell", "Columns in the table of cells.")
        self.reports = _box("Write a report on each image", "One HTML file for each image.")
        self.previews = _box("Save pictures", "Previews of the stains, and boxes in the image.")
        self.stain_words, self.find_words = hint(), hint()
        self.model = ModelChoice()
        self.confidence = Percent(0.25, "How sure the model must be of a box.")
        self.here, self.there = QRadioButton("This computer"), QRadioButton("A dask cluster")
        self.either = QButtonGroup(self)
        for choice in (self.here, self.there):
            self.either.addButton(choice)
        self.here.setChecked(True)
        self.here.setToolTip("In processes of this computer.")
        self.there.setToolTip("On the workers of a dask.distributed scheduler.")
        self.workers = QSpinBox()
        self.workers.setRange(1, max(os.cpu_count() or 1, 64))
        self.workers.setSuffix(" at a time")
        self.workers.setToolTip("Images that are worked on at the same time, each in a process.")
        self.address = QLineEdit()
        self.address.setPlaceholderText("tcp://head-node:8786")
        self.address.setToolTip("The scheduler's address. Its workers must see the same folders.")

    def _lay_out(self) -> None:
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        finding = form()
        finding.addRow("Model", self.model)
        finding.addRow("Confidence", self.confidence)
        self.finding = QWidget()
        inside = QVBoxLayout(self.finding)
        inside.setContentsMargins(18, 0, 0, 0)
        inside.addLayout(finding)
        for widget in (self.find_words, self.measure, self.reports):
            inside.addWidget(widget)
        layout.addWidget(heading("What to do"))
        for widget in (self.stains, _indented(self.stain_words), self.find, self.finding):
            layout.addWidget(widget)
        layout.addWidget(self.previews)
        self.where = Fold("Where it runs")
        self.where.body.addWidget(row(self.here, self.workers))
        self.where.body.addWidget(row(self.there, self.address, stretch=1))
        layout.addWidget(self.where)

    # --- what is set ------------------------------------------------------------------------------

    def take(self, given: dict[str, Any]) -> None:
        """Show settings by their names in `StudySettings`; others stay as they are."""
        if "model" in given:
            self.find.setChecked(bool(given["model"]))
            if given["model"]:
                self.model.show_choice(str(given["model"]))
        if "confidence" in given:
            self.confidence.set_value(given["confidence"])
        for name, box in self._boxes().items():
            if name in given:
                box.setChecked(bool(given[name]))
        shown = {"model", "confidence", *self._boxes()}
        kept = {n: getattr(self._kept, n) for n in (*_FINDING, *_STAINS, "tile", "pixel_size")}
        kept |= {"formats": self._kept.formats, "skip_glass": self._kept.skip_glass}
        new = {name: value for name, value in given.items() if name not in shown}
        self._kept = StudySettings.of({**kept, **new, "model": ""})
        self._told()

    def settings(self) -> dict[str, Any]:
        """By their names in `StudySettings`."""
        kept = {name: getattr(self._kept, name) for name in StudySettings.__dataclass_fields__}
        boxes = {name: box.isChecked() for name, box in self._boxes().items()}
        model = self.model.key if self.find.isChecked() else ""
        return kept | boxes | {"model": model, "confidence": self.confidence.value}

    def set_where(self, workers: int, scheduler: str | None) -> None:
        """Where it runs."""
        self.workers.setValue(workers)
        self.address.setText(scheduler or "")
        (self.there if scheduler else self.here).setChecked(True)

    @property
    def scheduler(self) -> str | None:
        """The address, None for this computer."""
        text = self.address.text().strip()
        return text if self.there.isChecked() and text else None

    @property
    def problem(self) -> str:
        """Why this cannot be run, "" where it can."""
        if not self.stains.isChecked() and not self.find.isChecked():
            return "Tick what is to be done."
        if self.find.isChecked() and not self.model.key:
            return "Choose a model."
        if self.there.isChecked() and not self.scheduler:
            return "Type the address of the dask scheduler."
        return ""

    def _boxes(self) -> dict[str, QCheckBox]:
        return {
            "decompose": self.stains,
            "measure": self.measure,
            "reports": self.reports,
            "previews": self.previews,
        }

    def _told(self, *_: Any) -> None:
        self.finding.setVisible(self.find.isChecked())
        self.stain_words.parentWidget().setVisible(self.stains.isChecked())
        self.workers.setEnabled(self.here.isChecked())
        self.address.setEnabled(self.there.isChecked())
        self.stain_words.setText(stain_words(self._kept))
        self.find_words.setText(find_words(self._kept))
        self.changed.emit()


def stain_words(settings: StudySettings) -> str:
    """How stains are taken apart, as a person would say it."""
    count, steps = settings.components, settings.iterations
    if settings.spectra is not None:
        said = [f"starting from {len(settings.spectra[0])} given spectra"]
    else:
        said = ["as many stains as needed" if count == "auto" else f"at most {count} stains"]
    said.append("until settled" if steps == "converge" else f"{steps} steps")
    for name, value in (("λ", settings.lam), ("γ", settings.gamma)):
        said.append(f"{name} {value if value == 'auto' else format(value, '.3g')}")
    if settings.leave_out:
        said.append(f"without {' and '.join(settings.leave_out)}")
    return ", ".join(said).capitalize() + "."


def find_words(settings: StudySettings) -> str:
    """How cells are found, beside model and confidence."""
    size = settings.object_size
    cells = "cell size automatic" if size == "auto" else f"cells of {size:.0f} pixels"
    where = "" if settings.device == "auto" else f", on {settings.device}"
    return f"Overlap {settings.iou:.2f}, {cells}{where}."


def _box(text: str, tooltip: str) -> QCheckBox:
    made = QCheckBox(text)
    made.setChecked(True)
    made.setToolTip(tooltip)
    return made


def _indented(widget: QWidget) -> QWidget:
    made = QWidget()
    layout = QVBoxLayout(made)
    layout.setContentsMargins(18, 0, 0, 0)
    layout.addWidget(widget)
    return made
