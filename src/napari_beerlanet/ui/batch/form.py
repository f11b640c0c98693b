"""The form of a batch: images and output folder, and the settings, filled from the open panels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from magicgui.widgets import CheckBox, LineEdit, SpinBox
from magicgui.widgets.bases import ValueWidget
from qtpy.QtCore import Signal
from qtpy.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QFileDialog,
    QLabel,
    QLineEdit,
    QRadioButton,
    QTextEdit,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import qdebounced

from napari_beerlanet.core.batch.inputs import find_images
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.boxes.classes import infected_types
from napari_beerlanet.core.checkpoints.checkpoint import read_info
from napari_beerlanet.core.checkpoints.info import CLASSIFIER
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    FractionSlider,
    button,
    field_widget,
    form,
    heading,
    hint,
    not_none,
    row,
)
from napari_beerlanet.ui.common.model_picker import ModelPicker
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.tasks import Task

_INDENT = 18  # pixels by which options of a step are set in
_CHECK_BOXES = {
    "decompose": "Decompose stains",
    "densities": "Measure stain densities of each cell",
    "reports": "Write a report on each image",
    "one_page": "on one page, for malaria smears",
    "previews": "Save pictures",
}
_DEBOUNCE_MS = 300
_VISIBLE_LINES = 3
_INPUT_HELP = "Folders, files, or patterns such as slides/*.svs; one per line."
RESULTS_SUFFIX = "-results"
"""Added to the name of the images' folder for that of the results, unless another is chosen."""


class BatchInputs(QWidget):
    """Images and output folder; `changed` whenever one of them is another."""

    changed = Signal()

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.image_count = 0
        self._task, self._suggested_out = task, ""
        self._lay_out()
        self._count_debounced = qdebounced(self._count, timeout=_DEBOUNCE_MS, parent=self)
        self.images.textChanged.connect(self._images_changed)
        self.recursive.toggled.connect(lambda *_: self._images_changed())
        self.out.textChanged.connect(lambda *_: self.changed.emit())

    def _lay_out(self) -> None:
        self.images = QTextEdit()
        self.images.setToolTip(_INPUT_HELP)
        self.images.setLineWrapMode(QTextEdit.LineWrapMode.NoWrap)
        self.images.setTabChangesFocus(True)
        self.images.setAcceptRichText(False)
        self.images.setFixedHeight(_VISIBLE_LINES * self.images.fontMetrics().lineSpacing() + 16)
        add_folder = button("Add folder …", "Add all images of a folder.", self._open_folder)
        add_files = button("Add files …", "Add single images.", self._open_files)
        self.recursive = QCheckBox("Include subfolders")
        self.recursive.setToolTip("Also process the images in subfolders.")
        self.count_label, self.bar = hint(_INPUT_HELP), TaskProgressBar(self._task, quiet=True)
        self.out = QLineEdit()
        self.out.setPlaceholderText("Created if it does not exist")
        self.out.setToolTip(
            "Images that are done there already, with the same settings, are skipped, so a run "
            "that was stopped resumes."
        )
        choose_out = button("Choose …", "Choose the output folder.", self._open_out)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(heading("Images"))
        layout.addWidget(self.images)
        layout.addWidget(row(add_folder, add_files, self.recursive))
        layout.addWidget(self.count_label)
        layout.addWidget(self.bar)
        layout.addWidget(heading("Output folder"))
        layout.addWidget(row(self.out, choose_out, stretch=0))

    # --- images and folder ------------------------------------------------------------------------

    @property
    def patterns(self) -> tuple[str, ...]:
        """Files, folders and patterns."""
        lines = (line.strip() for line in self.images.toPlainText().splitlines())
        return tuple(line for line in lines if line)

    @property
    def out_folder(self) -> Path | None:
        """The output folder, None as long as there is none."""
        text = self.out.text().strip()
        return Path(text).expanduser().absolute() if text else None

    def set_inputs(self, images: Sequence[str], out: Path | None, recursive: bool = False) -> None:
        """Show these."""
        self.recursive.setChecked(recursive)
        self.images.setPlainText("\n".join(images))
        if out is not None:
            self.out.setText(str(out))

    def _add(self, paths: Sequence[str]) -> None:
        new = [path for path in paths if path and path not in self.patterns]
        self.images.setPlainText("\n".join([*self.patterns, *new]))

    def _open_folder(self) -> None:
        start = self.patterns[-1] if self.patterns else ""
        self._add([QFileDialog.getExistingDirectory(self, "Add folder", start)])

    def _open_files(self) -> None:
        kinds = "Images (" + " ".join(f"*{s}" for s in sorted(IMAGE_SUFFIXES)) + ");;All files (*)"
        self._add(QFileDialog.getOpenFileNames(self, "Add files", "", kinds)[0])

    def _open_out(self) -> None:
        start = str(self.out_folder or "")
        folder = QFileDialog.getExistingDirectory(self, "Output folder", start)
        if folder:
            self.out.setText(folder)

    # --- number of images -------------------------------------------------------------------------

    def _images_changed(self) -> None:
        self.image_count = 0
        self._suggest_out()
        self._count_debounced()
        self.changed.emit()

    def _suggest_out(self) -> None:
        """A folder beside the first, as long as nobody has chosen another."""
        if self.out.text() not in ("", self._suggested_out):
            return
        plain = [text for text in self.patterns if not set(text) & set("*?[")]
        first = Path(plain[0]) if plain else None
        if first is None or not first.is_absolute():
            return
        folder = first.parent if first.suffix else first
        beside = folder.with_name(folder.name + RESULTS_SUFFIX) if folder.name else ""
        self._suggested_out = str(beside)
        self.out.setText(self._suggested_out)

    def _count(self) -> None:
        patterns, out = self.patterns, self.out_folder or Path()
        recursive = self.recursive.isChecked()
        if patterns:
            self._task.start(
                lambda report: count_images(patterns, out, recursive), self._show_count
            )
        else:
            self._show_count((0, ""))

    def _show_count(self, result: tuple[int, str]) -> None:
        self.image_count, missing = result
        text = count_of(self.image_count, "image") if self.patterns else _INPUT_HELP
        self.count_label.setText(f"{text}; not found: {missing}" if missing else text)
        self.changed.emit()


def count_images(patterns: Sequence[str], out: Path, recursive: bool) -> tuple[int, str]:
    """The number of images, and the first path that does not exist. Off the GUI thread."""
    given = [str(Path(text).expanduser()) for text in patterns]
    paths = list(find_images(given, out, recursive))
    missing = [path for path in paths if not path.is_file()]
    return len(paths) - len(missing), str(missing[0]) if missing else ""


class BatchForm(QWidget):
    """Settings of a study; `changed` whenever one is."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._others = StudySettings()  # settings without a control of their own
        self.boxes: dict[str, ValueWidget[Any]] = {
            name: field_widget(StudySettings, name, text=text)
            for name, text in _CHECK_BOXES.items()
        }
        self.detect = CheckBox(value=True, text="Detect cells")
        self.detect.tooltip = "Write boxes as CSV and GeoJSON (QuPath)."
        self.stain_summary, self.detect_summary = hint(), hint()
        self.model = ModelPicker()
        self.classify = CheckBox(value=False, text="Classify cells")
        self.classify.tooltip = "Give cells a type, in all tables, pictures and reports."
        self.classifier = ModelPicker(CLASSIFIER)
        self.classify_summary = hint()
        self._described_key, self._classifier_info = "", dict[str, Any]()
        confidence = StudySettings.spec("confidence")
        self.confidence = FractionSlider(confidence.default, confidence.description)
        self._make_run_location()
        self._lay_out()
        switches = (*self.boxes.values(), self.detect, self.classify)
        for box in (*switches, self.workers, self.scheduler_address):
            box.changed.connect(self._update)
        for picker in (self.model, self.classifier):
            picker.chosen.connect(self._update)
        self.confidence.changed.connect(self._update)
        self.run_locally.toggled.connect(self._update)
        self._update()

    def _make_run_location(self) -> None:
        self.run_locally = QRadioButton("This computer")
        self.run_locally.setToolTip("Run in background processes on this computer.")
        self.run_on_cluster = QRadioButton("Dask cluster")
        self.run_on_cluster.setToolTip("Run on the workers of a dask.distributed scheduler.")
        self._locations = QButtonGroup(self)
        for choice in (self.run_locally, self.run_on_cluster):
            self._locations.addButton(choice)
        self.run_locally.setChecked(True)
        self.workers = SpinBox(value=1, min=1, max=max(os.cpu_count() or 1, 64))
        self.workers.tooltip = "Number of images processed in parallel, each in its own process."
        self.scheduler_address = LineEdit()
        self.scheduler_address.native.setPlaceholderText("tcp://head-node:8786")
        self.scheduler_address.tooltip = (
            "Address of the scheduler. Its workers must see the same folders."
        )

    def _lay_out(self) -> None:
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        confidence = form()
        confidence.addRow("Confidence", self.confidence)
        self.detect_options = QWidget()
        inside = QVBoxLayout(self.detect_options)
        inside.setContentsMargins(_INDENT, 0, 0, 0)
        inside.addWidget(row(QLabel("Model"), self.model, stretch=1))
        inside.addLayout(confidence)
        inside.addWidget(self.detect_summary)
        inside.addWidget(self.boxes["densities"].native)
        inside.addWidget(self.classify.native)
        self.classify_options = QWidget()
        typed = QVBoxLayout(self.classify_options)
        typed.setContentsMargins(_INDENT, 0, 0, 0)
        typed.addWidget(row(QLabel("Model"), self.classifier, stretch=1))
        typed.addWidget(self.classify_summary)
        inside.addWidget(self.classify_options)
        inside.addWidget(self.boxes["reports"].native)
        self.one_page = _indented(self.boxes["one_page"].native)
        inside.addWidget(self.one_page)
        layout.addWidget(heading("Processing"))
        layout.addWidget(self.boxes["decompose"].native)
        layout.addWidget(_indented(self.stain_summary))
        layout.addWidget(self.detect.native)
        layout.addWidget(self.detect_options)
        layout.addWidget(self.boxes["previews"].native)
        self.run_location = CollapsibleGroup("Run on")
        parallel = row(self.run_locally, self.workers.native, QLabel("in parallel"))
        self.run_location.body.addWidget(parallel)
        address = self.scheduler_address.native
        self.run_location.body.addWidget(row(self.run_on_cluster, address, stretch=1))
        layout.addWidget(self.run_location)

    # --- settings ---------------------------------------------------------------------------------

    def set_settings(self, given: dict[str, Any]) -> None:
        """Show settings by their names in `StudySettings`; others stay as they are."""
        given = dict(given)
        if "model" in given:
            model = str(given.pop("model") or "")
            self.detect.value = bool(model)
            if model:
                self.model.set_key(model)
        if "classifier" in given:
            classifier = str(given.pop("classifier") or "")
            self.classify.value = bool(classifier)
            if classifier:
                self.classifier.set_key(classifier)
        if "confidence" in given:
            self.confidence.set_value(given.pop("confidence"))
        for name in [name for name in self.boxes if name in given]:
            self.boxes[name].value = bool(given.pop(name))
        self._others = self._others.replace(**given)
        self._update()

    def settings(self) -> dict[str, Any]:
        """By their names in `StudySettings`."""
        shown = {name: box.value for name, box in self.boxes.items()}
        shown["model"] = self.model.key if self.detect.value else ""
        shown["classifier"] = self.classifier.key if self._classifies else ""
        shown["one_page"] = self.one_page.isVisibleTo(self) and bool(self.boxes["one_page"].value)
        return dict(self._others) | shown | {"confidence": self.confidence.value}

    def set_run_location(self, workers: int, scheduler: str | None) -> None:
        """Show where a study runs."""
        self.workers.value = max(workers, 1)
        self.scheduler_address.value = scheduler or ""
        (self.run_on_cluster if scheduler else self.run_locally).setChecked(True)

    @property
    def scheduler(self) -> str | None:
        """The scheduler's address, None for this computer."""
        text = self.scheduler_address.value.strip()
        return text if self.run_on_cluster.isChecked() and text else None

    @property
    def problem(self) -> str:
        """Why this cannot be run, "" where it can."""
        if not self.boxes["decompose"].value and not self.detect.value:
            return "Select at least one processing step."
        if self.detect.value and not self.model.key:
            return "Choose a model."
        if self._classifies and not self.classifier.key:
            return "Choose a classifier."
        if self.run_on_cluster.isChecked() and not self.scheduler:
            return "Enter the address of the dask scheduler."
        return ""

    @property
    def _classifies(self) -> bool:
        return bool(self.detect.value and self.classify.value)

    def _update(self, *_: Any) -> None:
        self.detect_options.setVisible(self.detect.value)
        self.classify_options.setVisible(self.classify.value)
        key = self.classifier.key if self._classifies else ""
        if key != self._described_key:  # a slider that moves shall read no file
            self._described_key, self._classifier_info = key, classifier_info(key)
        info = self._classifier_info
        tells_infected = bool(infected_types(info.get("classes") or []))
        self.one_page.setVisible(tells_infected and bool(self.boxes["reports"].value))
        self.classify_summary.setText(describe_classifier_settings(self._others, info))
        not_none(self.stain_summary.parentWidget()).setVisible(self.boxes["decompose"].value)
        self.workers.enabled = self.run_locally.isChecked()
        self.scheduler_address.enabled = self.run_on_cluster.isChecked()
        self.stain_summary.setText(describe_stain_settings(self._others))
        self.detect_summary.setText(describe_detect_settings(self._others))
        self.changed.emit()


def describe_stain_settings(settings: StudySettings) -> str:
    """How stains are decomposed, in one sentence."""
    count, iterations = settings.components, settings.iterations
    if settings.spectra is not None:
        count = len(settings.spectra[0])
        named = " and ".join(name for name in settings.stain_names if name)
        what = f"the spectra of {named}" if named else f"{count} given spectra"
        parts = [f"with {what}, kept fixed" if settings.fixed_spectra else f"starting from {what}"]
    else:
        parts = ["as many stains as needed" if count == "auto" else f"at most {count} stains"]
    if not settings.fixed_spectra:  # the minimum in any case
        parts.append("until converged" if iterations == "converge" else f"{iterations} iterations")
    for name, value in (("λ", settings.lam), ("γ", settings.gamma)):
        parts.append(f"{name} {value if value == 'auto' else format(value, '.3g')}")
    if settings.leave_out:
        parts.append(f"without {' and '.join(settings.leave_out)}")
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def classifier_info(key: str) -> dict[str, Any]:
    """The `info` of a classifier, {} where it cannot be read: the run will say why."""
    try:
        return read_info(key) if key else {}
    except (OSError, ValueError):
        return {}


def describe_classifier_settings(settings: StudySettings, info: Mapping[str, Any]) -> str:
    """Which cells are classified, and as what."""
    if not info:
        return ""
    classes = settings.classify_only or tuple(info.get("applies_to") or ())
    which = f"Cells of the class{'es' * (len(classes) > 1)} {', '.join(classes)}"
    return f"{which if classes else 'All cells'}, as {', '.join(info['classes'])}."


def describe_detect_settings(settings: StudySettings) -> str:
    """How cells are detected, beside model and confidence."""
    size = settings.object_size
    cells = "automatic cell size" if size == "auto" else f"cells of {size:.0f} pixels"
    where = "" if settings.device == "auto" else f", on {settings.device}"
    return f"IoU {settings.iou:.2f}, {cells}{where}."


def _indented(widget: QWidget) -> QWidget:
    made = QWidget()
    layout = QVBoxLayout(made)
    layout.setContentsMargins(_INDENT, 0, 0, 0)
    layout.addWidget(widget)
    return made
