"""The panel "Run benchmark": the paper's table on the user's data, in a background process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Qt, QTimer, Signal
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
    QVBoxLayout,
    QWidget,
)
from superqt.utils import qdebounced

from napari_beerlanet.core.benchmark.settings import (
    METHODS,
    SETTINGS_FILE,
    BenchmarkSettings,
    LaboratorySettings,
    TaskKind,
    TaskSettings,
)
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.ui.benchmark.run_view import (
    BenchmarkProcess,
    BenchmarkView,
    find_running_benchmark,
    prepare_benchmark_folder,
    running_process,
)
from napari_beerlanet.ui.common.background_process import CloseConfirmation, RunEnd
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    DisabledReason,
    button,
    combo_box,
    form,
    heading,
    hint,
    row,
    separator,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_project_store

if TYPE_CHECKING:
    from napari import Viewer

_CLOSE_QUESTION = "A benchmark is running", "Continue the benchmark after the viewer is closed?"
_KINDS: dict[TaskKind, str] = {"detect": "Find cells (detector)", "classify": "Cell types"}
_METHOD_COLUMNS = 2
_LABORATORY_LINES = 3
_RESULTS_DELAY_MS = 400  # after the output folder was changed
_MAX_SEEDS, _MAX_EPOCHS = 20, 1000
_PATH = int(Qt.ItemDataRole.UserRole)  # of a laboratory's data
OUT_SUFFIX = "-benchmark"
"""Added to the name of the training data's folder for that of the results."""


class BenchmarkWidget(Panel):
    """The panel "Run benchmark"."""

    title = "Run benchmark"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        self.estimate_task, self._start_task = self.task(), self.task()
        self._find_task = self.task()
        self.form = BenchmarkForm()
        self.estimate_button = button(
            "Estimate",
            "Time a few steps of each kind on this machine, and say how long it will take.",
            self.estimate,
        )
        self.start_button = QPushButton("Start")
        self.start_button.setToolTip(
            "Train and measure every method with every seed, in a process of its own. Jobs that "
            "are done in the output folder are kept, and a training that was stopped resumes."
        )
        self.start_reason = DisabledReason(self.start_button)
        self.estimate_bar = TaskProgressBar(self.estimate_task)
        self.start_bar = TaskProgressBar(self._start_task, quiet=True)
        self.view = BenchmarkView(self)
        for part in (
            self.form,
            separator(),
            row(self.start_button, self.estimate_button, stretch=0),
            self.start_reason,
            self.estimate_bar,
            self.start_bar,
            self.view,
        ):
            self.body.addWidget(part)
        self.body.addStretch(1)
        self._load_soon = qdebounced(self._load, timeout=_RESULTS_DELAY_MS, parent=self)
        self.form.changed.connect(self._update)
        self.form.out.textChanged.connect(lambda *_: self._load_soon())
        self.start_button.clicked.connect(lambda *_: self.start())
        self.view.ended.connect(self._ended)
        self.connect_event(get_project_store(self.viewer).changed, self._project_changed)
        self.close_confirmation = CloseConfirmation(
            getattr(self.viewer.window, "_qt_window", None),
            lambda: self.view.process,
            self,
            _CLOSE_QUESTION,
        )
        self._project_changed()
        self._update()
        QTimer.singleShot(0, self._look_for_running)

    # --- settings ---------------------------------------------------------------------------------

    def _project_changed(self, project: Any = None) -> None:
        """The open project is what is trained on, unless other data are chosen."""
        store = get_project_store(self.viewer)
        if store.project is not None and not self.form.train.text() and not self.view.running:
            self.form.train.setText(str(store.project.path))

    def settings(self) -> BenchmarkSettings:
        """As the form has them; what is wrong is a `ValueError` of one sentence."""
        return self.form.settings()

    def _update(self) -> None:
        running = self.view.running or self._start_task.running
        reason = self.form.problem
        if running:
            reason = "A benchmark is running."
        self.start_reason.update_button(reason)
        self.estimate_button.setEnabled(not reason and not self.estimate_task.running)
        self.form.setEnabled(not running)
        out = self.form.out_folder
        resumes = out is not None and (out / SETTINGS_FILE).is_file()
        self.start_button.setText("Resume" if resumes else "Start")

    # --- running ----------------------------------------------------------------------------------

    def estimate(self) -> None:
        """Say how long it will take."""
        out = self.form.out_folder
        try:
            settings = self.settings()
        except ValueError as error:
            self.estimate_bar.show_error(error)
            return

        def work(report: Report) -> Any:
            from napari_beerlanet.core.benchmark.benchmark import estimate_benchmark

            report_progress(report, 0, 100, "loading")
            return estimate_benchmark(settings, out or Path(), report=report)

        self.estimate_task.start(work, self._show_estimate)

    def _show_estimate(self, estimate: Any) -> None:
        self.estimate_bar.set_message(estimate.sentence())

    def start(self) -> None:
        """Start the benchmark, or resume it."""
        out = self.form.out_folder
        if out is None or not self.start_button.isEnabled():
            return
        try:
            settings = self.settings()
        except ValueError as error:
            self.start_bar.show_error(error)
            return
        self._start_task.start(
            lambda report: _prepare_or_attach(settings, out),
            self._started,
            lambda _: self._update(),
        )
        self._update()

    def _started(self, folder_and_pid: tuple[Path, int | None]) -> None:
        out, pid = folder_and_pid
        self.start_bar.set_message("")
        self.estimate_bar.set_message("")
        self._follow(out, pid)

    def _follow(self, out: Path, pid: int | None) -> None:
        process = BenchmarkProcess(out, self, stop_timeouts=(60.0, 90.0))
        self.view.follow(process)
        if pid is None:
            process.start()
        elif not process.attach_to_pid(pid):
            self.view.detach()
        self._update()

    def _ended(self, end: RunEnd) -> None:
        if end.state in (RunState.FAILED, RunState.INTERRUPTED):
            notify_error(self.view.message.text() or "The benchmark has failed.")
        self._update()
        self.show_soon(self.view.results)

    def _load(self) -> None:
        """Show what is in the output folder already."""
        if not self.view.running:
            self.view.load(self.form.out_folder)
            self._update()

    # --- a benchmark that runs --------------------------------------------------------------------

    def _look_for_running(self) -> None:
        if not self._closed:
            self._find_task.start(lambda report: _find_running(), self._on_running)

    def _on_running(self, found: tuple[Path, int, BenchmarkSettings | None] | None) -> None:
        if found is None or self.view.running:
            return
        out, pid, settings = found
        if settings is not None:
            self.form.show_settings(settings, out)
        self._follow(out, pid)

    def on_closed(self) -> None:
        """The benchmark continues; it is shown again when the panel is next opened."""
        self.close_confirmation.end()
        self.view.detach()


def _prepare_or_attach(settings: BenchmarkSettings, out: Path) -> tuple[Path, int | None]:
    """Write the settings; a run in that folder is followed instead: its process."""
    pid = running_process(out)
    return (out, pid) if pid is not None else (prepare_benchmark_folder(settings, out), None)


def _find_running() -> tuple[Path, int, BenchmarkSettings | None] | None:
    found = find_running_benchmark()
    if found is None:
        return None
    try:
        return (*found, BenchmarkSettings.read(found[0] / SETTINGS_FILE))
    except ValueError:
        return (*found, None)


class BenchmarkForm(QWidget):
    """Data, methods, seeds and epochs of one task; `changed` whenever one is."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._suggested_out = ""
        self.kind = combo_box("What is learned: to find cells, or to tell their types.", 12, True)
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
        self.methods = {name: QCheckBox(method.title) for name, method in METHODS.items()}
        for name, box in self.methods.items():
            about = METHODS[name].description
            box.setToolTip(f"{about[:1].upper()}{about[1:]}.")
            box.setChecked(True)
        self.seeds, self.epochs = QSpinBox(), QSpinBox()
        self.seeds.setRange(1, _MAX_SEEDS)
        self.seeds.setValue(len(BenchmarkSettings.default("seeds")))
        self.seeds.setToolTip("Every training is repeated with so many random seeds.")
        self.epochs.setRange(0, _MAX_EPOCHS)
        self.epochs.setSpecialValueText("as in the paper")
        self.epochs.setToolTip(TaskSettings.spec("epochs").description)
        self.weights = QLineEdit()
        self.weights.setToolTip(TaskSettings.spec("weights").description)
        self.weights.setPlaceholderText("Random, or a file")
        self.out = QLineEdit()
        self.out.setToolTip("Where tables, page and trainings go; a run there resumes.")
        self.out.setPlaceholderText("Created if it does not exist")
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
        data.addRow("Train on", row(self.train, self._browse_button(self._choose_train), stretch=0))
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
        layout.addWidget(heading("Methods"))
        grid = QGridLayout()
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setSpacing(4)
        for place, box in enumerate(self.methods.values()):
            grid.addWidget(box, *divmod(place, _METHOD_COLUMNS))
        layout.addLayout(grid)
        numbers = form()
        numbers.addRow("Seeds", self.seeds)
        numbers.addRow("Epochs", self.epochs)
        layout.addLayout(numbers)
        self.more = CollapsibleGroup("More settings")
        more = form()
        browse = self._browse_button(self._choose_weights)
        more.addRow("Start from", row(self.weights, browse, stretch=0))
        self.more.body.addLayout(more)
        layout.addWidget(self.more)
        where = form()
        where.addRow("Output", row(self.out, self._browse_button(self._choose_out), stretch=0))
        layout.addLayout(where)

    def _browse_button(self, choose: Any) -> QPushButton:
        return button("…", "Choose it.", choose)

    def _connect(self) -> None:
        for box in self.methods.values():
            box.toggled.connect(lambda *_: self.changed.emit())
        for number in (self.seeds, self.epochs):
            number.valueChanged.connect(lambda *_: self.changed.emit())
        for line in (self.weights, self.out):
            line.textChanged.connect(lambda *_: self.changed.emit())
        self.kind.activated.connect(lambda *_: self.changed.emit())
        self.train.textChanged.connect(self._train_changed)
        self.laboratories.itemChanged.connect(lambda *_: self.changed.emit())

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
    def task_kind(self) -> TaskKind:
        """detect or classify."""
        return list(_KINDS)[max(self.kind.currentIndex(), 0)]

    @property
    def problem(self) -> str:
        """Why this cannot be run, "" where it can."""
        if not self.train.text().strip():
            return "Choose what to train on."
        if not self.laboratories.count():
            return "Add data of another laboratory."
        if not self.chosen_methods:
            return "Choose a method."
        return "" if self.out_folder is not None else "Choose a folder for the results."

    def settings(self) -> BenchmarkSettings:
        """What is wrong is a `ValueError` of one sentence."""
        kind, train = self.task_kind, Path(self.train.text().strip()).expanduser().absolute()
        tests = [
            LaboratorySettings(name=item.text().strip(), data=_data_of(item.data(_PATH), kind))
            for item in self._items()
        ]
        task = TaskSettings(
            name=train.parent.name if train.suffix else train.name,
            kind=kind,
            train=_data_of(str(train), kind),
            tests=tuple(tests),
            weights=self.weights.text().strip() or None,
            epochs=self.epochs.value() or None,
        )
        return BenchmarkSettings(
            tasks=(task,), methods=self.chosen_methods, seeds=tuple(range(self.seeds.value()))
        )

    def show_settings(self, settings: BenchmarkSettings, out: Path) -> None:
        """Show the settings of a benchmark: of its first task."""
        task = settings.tasks[0]
        self.kind.setCurrentIndex(list(_KINDS).index(task.kind))
        self.train.setText(task.train)
        self.laboratories.clear()
        for test in task.tests:
            self.add_laboratory(test.data, test.name)
        for name, box in self.methods.items():
            box.setChecked(name in settings.methods)
        self.seeds.setValue(len(settings.seeds))
        self.epochs.setValue(task.epochs or 0)
        self.weights.setText(task.weights or "")
        self.out.setText(str(out))

    def add_laboratory(self, path: str, name: str = "") -> None:
        """Add data to measure on; it is called after its folder."""
        place = Path(path)
        usual = place.parent.name if place.suffix in (".yaml", ".yml") else place.name
        taken = {item.text() for item in self._items()}
        name = name or usual
        numbered = (name if k == 1 else f"{name} {k}" for k in itertools.count(1))
        item = QListWidgetItem(next(one for one in numbered if one not in taken))
        item.setData(_PATH, str(place))
        item.setToolTip(str(place))
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

    def _train_changed(self, text: str) -> None:
        """Suggest a folder beside the training data, unless the user has chosen one."""
        if self.out.text() == self._suggested_out:
            place = Path(text.strip()).expanduser()
            folder = place.parent if place.suffix in (".yaml", ".yml") else place
            named = folder.with_name(folder.name + OUT_SUFFIX) if folder.name else None
            self._suggested_out = str(named) if named is not None and text.strip() else ""
            self.out.setText(self._suggested_out)
        self.changed.emit()

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

    def _choose_out(self) -> None:
        path = QFileDialog.getExistingDirectory(self, "Choose the output folder", self.out.text())
        if path:
            self.out.setText(path)


def _data_of(path: str, kind: TaskKind) -> str:
    """A folder's own data.yaml, where it has one and boxes are asked for; else the path itself."""
    beside = Path(path) / "data.yaml"
    return str(beside) if kind == "detect" and beside.is_file() else path
