"""The form of a benchmark: its tasks with their data and training, methods, seeds and output."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import (
    QAbstractItemView,
    QCheckBox,
    QFileDialog,
    QGridLayout,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QPushButton,
    QSpinBox,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.benchmark.settings import (
    METHODS,
    BenchmarkSettings,
    LaboratorySettings,
    TaskKind,
    TaskSettings,
)
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    button,
    combo_box,
    form,
    heading,
    hint,
    not_none,
    plain_tooltip,
    row,
)

_KINDS: dict[TaskKind, str] = {"detect": "Find cells (detector)", "classify": "Cell types"}
_METHOD_COLUMNS = 2
_LABORATORY_LINES = 3
_MAX_SEEDS, _MAX_EPOCHS, _MAX_SIDE = 20, 1000, 4096
_PATH = int(Qt.ItemDataRole.UserRole)  # of a laboratory's data
_SPLIT = _PATH + 1
_KEPT = ("backbone", "batch", "metrics", "ordered", "detector", "object_class", "options")
"""Settings of a task that the form has no widget for; those of a file stay as they are."""
OUT_SUFFIX = "-benchmark"
"""Added to the name of the training data's folder for that of the results."""


class TaskForm(QWidget):
    """Data and training of one task; `changed` whenever one is."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._shown: TaskSettings | None = None  # what `show_settings` was given
        self.kind = combo_box("What is learned: finding cells, or classifying them.", 12, True)
        for text in _KINDS.values():
            self.kind.addItem(text)
        self.train = QLineEdit()
        self.train.setToolTip(
            "What is trained on: a project, a data.yaml, or, for cell types, a folder per class."
        )
        self.train.setPlaceholderText("Project, data.yaml or folder")
        self.laboratories = QListWidget()
        self.laboratories.setToolTip(
            "Annotated images of other laboratories: what is measured. Double-click to rename."
        )
        self.laboratories.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.epochs, self.image_size = QSpinBox(), QSpinBox()
        self.epochs.setRange(0, _MAX_EPOCHS)
        self.epochs.setSpecialValueText("as in the paper")
        self.epochs.setToolTip(TaskSettings.spec("epochs").description)
        self.image_size.setRange(0, _MAX_SIDE)
        self.image_size.setSingleStep(32)
        self.image_size.setSpecialValueText("as usual")
        self.image_size.setToolTip(TaskSettings.spec("image_size").description)
        self.weights = QLineEdit()
        self.weights.setToolTip(TaskSettings.spec("weights").description)
        self.weights.setPlaceholderText("Random, or a file")
        self.kept = hint()
        self._lay_out()
        self._connect()

    def _lay_out(self) -> None:
        lines = self.laboratories.fontMetrics().lineSpacing()
        self.laboratories.setFixedHeight(_LABORATORY_LINES * (lines + 6) + 8)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        data = form()
        data.addRow("Task", self.kind)
        data.addRow("Train on", row(self.train, _browse_button(self._choose_train), stretch=0))
        layout.addLayout(data)
        layout.addWidget(hint("Measured on other laboratories:"))
        layout.addWidget(self.laboratories)
        self.add_folder = button(
            "Add folder …", "Add a folder of annotated images.", self._choose_laboratory
        )
        self.add_file = button(
            "Add data.yaml …", "Add a data set by its data.yaml.", self._choose_laboratory_file
        )
        self.remove = button(
            "Remove", "Remove the selected laboratories.", self.remove_laboratories
        )
        layout.addWidget(row(self.add_folder, self.add_file, self.remove))
        numbers = form()
        numbers.addRow("Epochs", self.epochs)
        layout.addLayout(numbers)
        self.more = CollapsibleGroup("More settings")
        more = form()
        more.addRow(
            "Start from", row(self.weights, _browse_button(self._choose_weights), stretch=0)
        )
        more.addRow("Image size", self.image_size)
        self.more.body.addLayout(more)
        self.more.body.addWidget(self.kept)
        layout.addWidget(self.more)

    def _connect(self) -> None:
        for number in (self.epochs, self.image_size):
            number.valueChanged.connect(lambda *_: self.changed.emit())
        for line in (self.train, self.weights):
            line.textChanged.connect(lambda *_: self.changed.emit())
        self.kind.activated.connect(lambda *_: self.changed.emit())
        self.laboratories.itemChanged.connect(lambda *_: self.changed.emit())

    # --- values -----------------------------------------------------------------------------------

    @property
    def task_kind(self) -> TaskKind:
        """detect or classify."""
        return list(_KINDS)[max(self.kind.currentIndex(), 0)]

    @property
    def title(self) -> str:
        """The task's name: that of its training data's folder, or the file's; "" without data."""
        text = self.train.text().strip()
        if self._shown is not None and text == self._shown.train:
            return self._shown.name
        place = Path(text).expanduser().absolute()
        return (place.parent.name if place.suffix else place.name) if text else ""

    @property
    def problem(self) -> str:
        """Why this cannot be run, "" where it can."""
        if not self.train.text().strip():
            return "Choose what to train on."
        return "" if self.laboratories.count() else "Add data of another laboratory."

    def settings(self, taken: Collection[str] = ()) -> TaskSettings:
        """With a name that is not `taken`; what is wrong is a `ValueError` of one sentence."""
        kind, train = self.task_kind, Path(self.train.text().strip()).expanduser().absolute()
        tests = tuple(
            LaboratorySettings(
                name=item.text().strip(),
                data=_data_of(item.data(_PATH), kind),
                split=item.data(_SPLIT),
            )
            for item in self._items()
        )
        chosen: dict[str, Any] = {
            "kind": kind,
            "train": _data_of(str(train), kind),
            "tests": tests,
            "weights": self.weights.text().strip() or None,
            "epochs": self.epochs.value() or None,
            "image_size": self.image_size.value() or None,
        }
        if self._shown is not None and self._shown.kind == kind:
            chosen |= {key: getattr(self._shown, key) for key in _KEPT}
        return TaskSettings(name=_free_name(self.title, taken), **chosen)

    def show_settings(self, task: TaskSettings) -> None:
        """Show the settings of a task; those without a widget are kept, and named."""
        self._shown = task
        self.kind.setCurrentIndex(list(_KINDS).index(task.kind))
        self.train.setText(task.train)
        self.laboratories.clear()
        for test in task.tests:
            self.add_laboratory(test.data, test.name, test.split)
        self.epochs.setValue(task.epochs or 0)
        self.image_size.setValue(task.image_size or 0)
        self.weights.setText(task.weights or "")
        kept = {key: getattr(task, key) for key in _KEPT}
        usual = {key: TaskSettings.default(key) for key in _KEPT}
        named = [
            f"{key.replace('_', ' ')} {_plain(v)}" for key, v in kept.items() if v != usual[key]
        ]
        self.kept.setText(f"Also from the file: {', '.join(named)}." if named else "")
        self.kept.setVisible(bool(named))

    def add_laboratory(self, path: str, name: str = "", split: str | None = None) -> None:
        """Add data to measure on; it is called after its folder."""
        place = Path(path)
        usual = place.parent.name if place.suffix in (".yaml", ".yml") else place.name
        item = QListWidgetItem(_free_name(name or usual, {item.text() for item in self._items()}))
        item.setData(_PATH, str(place))
        item.setData(_SPLIT, split)
        item.setToolTip(plain_tooltip(str(place)))
        item.setFlags(item.flags() | Qt.ItemFlag.ItemIsEditable)
        self.laboratories.addItem(item)
        self.changed.emit()

    def remove_laboratories(self) -> None:
        """Remove those that are selected."""
        for item in self.laboratories.selectedItems():
            self.laboratories.takeItem(self.laboratories.row(item))
        self.changed.emit()

    def _items(self) -> list[QListWidgetItem]:
        items = (self.laboratories.item(k) for k in range(self.laboratories.count()))
        return [item for item in items if item is not None]

    # --- dialogs ----------------------------------------------------------------------------------

    def _choose_train(self) -> None:
        path = QFileDialog.getExistingDirectory(self, "Choose training data", self.train.text())
        if path:
            self.train.setText(path)

    def _choose_laboratory(self) -> None:
        path = QFileDialog.getExistingDirectory(self, "Choose annotated images")
        if path:
            self.add_laboratory(path)

    def _choose_laboratory_file(self) -> None:
        paths, _ = QFileDialog.getOpenFileNames(self, "Choose data", "", "Data (*.yaml *.yml)")
        for path in paths:
            self.add_laboratory(path)

    def _choose_weights(self) -> None:
        kinds = "Weights (*.pt *.pth *.safetensors)"
        path, _ = QFileDialog.getOpenFileName(self, "Choose weights", "", kinds)
        if path:
            self.weights.setText(path)


class BenchmarkForm(QWidget):
    """Tasks, methods, seeds and where results go; `changed` whenever one is.

    `opened` with the path of a benchmark.yaml that the user has chosen.
    """

    changed = Signal()
    opened = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self._suggested_out = ""
        self._shown: BenchmarkSettings | None = None  # what `show_settings` was given
        self.tasks = QTabWidget()
        self.tasks.setDocumentMode(True)
        not_none(self.tasks.tabBar()).setAutoHide(True)
        self.methods = {name: QCheckBox(method.title) for name, method in METHODS.items()}
        for name, box in self.methods.items():
            about = METHODS[name].description
            box.setToolTip(f"{about[:1].upper()}{about[1:]}.")
            box.setChecked(True)
        self.seeds, self.workers = QSpinBox(), QSpinBox()
        self.seeds.setRange(1, _MAX_SEEDS)
        self.seeds.setValue(len(BenchmarkSettings.default("seeds")))
        self.seeds.setToolTip("Every training is repeated with so many random seeds.")
        self.workers.setRange(1, max(os.cpu_count() or 1, 1))
        self.workers.setToolTip(
            "Jobs side by side on this machine; each gets its share of the processor's cores."
        )
        self.out = QLineEdit()
        self.out.setToolTip("Where tables, page and trainings go; a run there resumes.")
        self.out.setPlaceholderText("Created if it does not exist")
        self._lay_out()
        for box in self.methods.values():
            box.toggled.connect(lambda *_: self.changed.emit())
        for number in (self.seeds, self.workers):
            number.valueChanged.connect(lambda *_: self.changed.emit())
        self.out.textChanged.connect(lambda *_: self.changed.emit())
        self.add_task()

    def _lay_out(self) -> None:
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        self.add_button = button(
            "Add task",
            "Add another task to the same run, for instance classifying the cells as well.",
            self.add_task,
        )
        self.remove_button = button("Remove task", "Remove the task above.", self.remove_task)
        self.open_button = button(
            "Open …",
            "Open a benchmark.yaml, your own or that of an earlier run, and show its settings.",
            self._choose_settings,
        )
        layout.addWidget(self.tasks)
        layout.addWidget(row(self.add_button, self.remove_button, self.open_button))
        layout.addWidget(heading("Methods"))
        grid = QGridLayout()
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setSpacing(4)
        for place, box in enumerate(self.methods.values()):
            grid.addWidget(box, *divmod(place, _METHOD_COLUMNS))
        layout.addLayout(grid)
        numbers = form()
        numbers.addRow("Seeds", self.seeds)
        numbers.addRow("Workers", self.workers)
        numbers.addRow("Output", row(self.out, _browse_button(self._choose_out), stretch=0))
        layout.addLayout(numbers)

    # --- tasks ------------------------------------------------------------------------------------

    @property
    def task(self) -> TaskForm:
        """The form of the task that is shown."""
        return self.task_forms[max(self.tasks.currentIndex(), 0)]

    @property
    def task_forms(self) -> list[TaskForm]:
        """The forms of all tasks."""
        pages = (self.tasks.widget(k) for k in range(self.tasks.count()))
        return [page for page in pages if isinstance(page, TaskForm)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is chosen to train on."""
        return not any(page.train.text().strip() for page in self.task_forms)

    def add_task(self) -> None:
        """Add an empty task, and show it."""
        page = TaskForm()
        page.changed.connect(self._task_changed)
        self.tasks.setCurrentIndex(self.tasks.addTab(page, ""))
        self._task_changed()

    def remove_task(self) -> None:
        """Remove the task that is shown; one stays."""
        if self.tasks.count() > 1:
            page = self.task
            self.tasks.removeTab(self.tasks.currentIndex())
            page.deleteLater()
            self._task_changed()

    def _task_changed(self) -> None:
        """Name the tabs, and suggest a folder beside the first training data."""
        for place, page in enumerate(self.task_forms):
            self.tasks.setTabText(place, page.title or f"Task {place + 1}")
        self.remove_button.setEnabled(self.tasks.count() > 1)
        if self.out.text() == self._suggested_out:
            text = self.task_forms[0].train.text().strip()
            place_ = Path(text).expanduser()
            folder = place_.parent if place_.suffix in (".yaml", ".yml") else place_
            named = folder.with_name(folder.name + OUT_SUFFIX) if folder.name else None
            self._suggested_out = str(named) if named is not None and text else ""
            self.out.setText(self._suggested_out)
        self.changed.emit()

    # --- values -----------------------------------------------------------------------------------

    @property
    def out_folder(self) -> Path | None:
        """Where results go."""
        text = self.out.text().strip()
        return Path(text).expanduser().absolute() if text else None

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """Names of the checked methods."""
        return tuple(name for name, box in self.methods.items() if box.isChecked())

    @property
    def problem(self) -> str:
        """Why this cannot be run, "" where it can."""
        several = self.tasks.count() > 1
        for place, page in enumerate(self.task_forms):
            if page.problem:
                which = f"{self.tasks.tabText(place)}: " if several else ""
                return which + page.problem
        if not self.chosen_methods:
            return "Choose a method."
        return "" if self.out_folder is not None else "Choose a folder for the results."

    def settings(self) -> BenchmarkSettings:
        """What is wrong is a `ValueError` of one sentence."""
        tasks: list[TaskSettings] = []
        for page in self.task_forms:
            tasks.append(page.settings({task.name for task in tasks}))
        shown, seeds = self._shown, tuple(range(self.seeds.value()))
        chosen: dict[str, Any] = {"tasks": tuple(tasks), "methods": self.chosen_methods}
        if shown is None:
            return BenchmarkSettings(**chosen, seeds=seeds)
        return shown.replace(
            **chosen, seeds=shown.seeds if len(shown.seeds) == len(seeds) else seeds
        )

    def show_settings(self, settings: BenchmarkSettings, out: Path) -> None:
        """Show the settings of a benchmark; those without a widget are kept."""
        self._shown = settings
        while self.tasks.count() > 1:
            self.remove_task()
        for place, task in enumerate(settings.tasks):
            if place:
                self.add_task()
            self.task_forms[place].show_settings(task)
        self.tasks.setCurrentIndex(0)
        for name, box in self.methods.items():
            box.setChecked(name in settings.methods)
        self.seeds.setValue(len(settings.seeds))
        self.out.setText(str(out))

    # --- dialogs ----------------------------------------------------------------------------------

    def _choose_settings(self) -> None:
        kinds = "Benchmarks (*.yaml *.yml)"
        path, _ = QFileDialog.getOpenFileName(self, "Open a benchmark", self.out.text(), kinds)
        if path:
            self.opened.emit(Path(path))

    def _choose_out(self) -> None:
        path = QFileDialog.getExistingDirectory(self, "Choose the output folder", self.out.text())
        if path:
            self.out.setText(path)


def _browse_button(choose: Any) -> QPushButton:
    return button("…", "Choose it.", choose)


def _free_name(name: str, taken: Collection[str]) -> str:
    """The name, with a number behind it where it is taken."""
    numbered = (name if k == 1 else f"{name} {k}" for k in itertools.count(1))
    return next(one for one in numbered if one not in taken)


def _plain(value: Any) -> str:
    """A setting in few words."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {one}" for key, one in value.items())
    return str(value)


def _data_of(path: str, kind: TaskKind) -> str:
    """A folder's own data.yaml, where it has one and boxes are asked for; else the path itself."""
    beside = Path(path) / "data.yaml"
    return str(beside) if kind == "detect" and beside.is_file() else path
