"""Which images a batch is about and where its results go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qtpy.QtCore import QTimer, Signal
from qtpy.QtWidgets import QCheckBox, QFileDialog, QLineEdit, QTextEdit, QVBoxLayout, QWidget

from napari_beerlanet.core.files import SUFFIXES
from napari_beerlanet.core.inputs import find_images
from napari_beerlanet.core.progress import Report
from napari_beerlanet.ui.controls import button, heading, hint, row
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.tasks import Task

_SOON = 300  # milliseconds after the last key
_LINES = 3
_WHAT = "Folders, files, or patterns such as slides/*.svs; one per line."
RESULTS = "-results"
"""Added to the name of the images' folder for that of the results, unless another is chosen."""


class Places(QWidget):
    """Images and folder of results; `changed` whenever one of them is another."""

    changed = Signal()

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.found = 0
        self._task, self._proposed = task, ""
        self._make()
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(_SOON)
        self._soon.timeout.connect(self._count)
        self.images.textChanged.connect(self._images_changed)
        self.recursive.toggled.connect(lambda *_: self._images_changed())
        self.out.textChanged.connect(lambda *_: self.changed.emit())

    def _make(self) -> None:
        self.images = QTextEdit()
        self.images.setToolTip(_WHAT)
        self.images.setLineWrapMode(QTextEdit.LineWrapMode.NoWrap)
        self.images.setTabChangesFocus(True)
        self.images.setAcceptRichText(False)
        self.images.setFixedHeight(_LINES * self.images.fontMetrics().lineSpacing() + 16)
        self.folder = button("Add folder …", "Add all images of a folder.", self._ask_folder)
        self.files = button("Add files …", "Add images one by one.", self._ask_files)
        self.recursive = QCheckBox("and folders in it")
        self.recursive.setToolTip("Look into the folders within folders, too.")
        self.counted, self.bar = hint(_WHAT), RunBar(self._task, quiet=True)
        self.out = QLineEdit()
        self.out.setPlaceholderText("A folder; it is made if it is not there")
        self.out.setToolTip(
            "Where results go. What is done there already, with the same settings, is kept, so a "
            "run that was stopped goes on."
        )
        self.choose_out = button("Choose …", "Choose the folder of results.", self._ask_out)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(heading("Images"))
        layout.addWidget(self.images)
        layout.addWidget(row(self.folder, self.files, self.recursive))
        layout.addWidget(self.counted)
        layout.addWidget(self.bar)
        layout.addWidget(heading("Results"))
        layout.addWidget(row(self.out, self.choose_out, stretch=0))

    # --- what is set ------------------------------------------------------------------------------

    @property
    def given(self) -> tuple[str, ...]:
        """Files, folders and patterns."""
        lines = (line.strip() for line in self.images.toPlainText().splitlines())
        return tuple(line for line in lines if line)

    @property
    def results(self) -> Path | None:
        """The folder of results, None as long as there is none."""
        text = self.out.text().strip()
        return Path(text).expanduser().absolute() if text else None

    def show_places(self, images: Sequence[str], out: Path | None, recursive: bool = False) -> None:
        """Show these."""
        self.recursive.setChecked(recursive)
        self.images.setPlainText("\n".join(images))
        if out is not None:
            self.out.setText(str(out))

    def _add(self, paths: Sequence[str]) -> None:
        new = [path for path in paths if path and path not in self.given]
        self.images.setPlainText("\n".join([*self.given, *new]))

    def _ask_folder(self) -> None:
        start = self.given[-1] if self.given else ""
        self._add([QFileDialog.getExistingDirectory(self, "A folder of images", start)])

    def _ask_files(self) -> None:
        kinds = "Images (" + " ".join(f"*{s}" for s in sorted(SUFFIXES)) + ");;All files (*)"
        self._add(QFileDialog.getOpenFileNames(self, "Images", "", kinds)[0])

    def _ask_out(self) -> None:
        start = str(self.results or "")
        found = QFileDialog.getExistingDirectory(self, "A folder for the results", start)
        if found:
            self.out.setText(found)

    # --- how many there are -----------------------------------------------------------------------

    def _images_changed(self) -> None:
        self.found = 0
        self._propose()
        self._soon.start()
        self.changed.emit()

    def _propose(self) -> None:
        """A folder beside the first, as long as nobody has chosen another."""
        if self.out.text() not in ("", self._proposed):
            return
        plain = [one for one in self.given if not set(one) & set("*?[")]
        first = Path(plain[0]) if plain else None
        if first is None or not first.is_absolute():
            return
        folder = first.parent if first.suffix else first
        self._proposed = str(folder.with_name(folder.name + RESULTS)) if folder.name else ""
        self.out.setText(self._proposed)

    def _count(self) -> None:
        given, out, recursive = self.given, self.results or Path(), self.recursive.isChecked()
        if given:
            self._task.start(lambda report: count(given, out, recursive, report), self._counted)
        else:
            self._counted((0, ""))

    def _counted(self, result: tuple[int, str]) -> None:
        self.found, missing = result
        words = f"{self.found:,} image{'s' * (self.found != 1)}" if self.given else _WHAT
        self.counted.setText(f"{words}; not found: {missing}" if missing else words)
        self.changed.emit()


def count(given: Sequence[str], out: Path, recursive: bool, report: Report) -> tuple[int, str]:
    """How many images there are, and the first of what is not there. Off the GUI thread."""
    found = list(find_images([str(Path(one).expanduser()) for one in given], out, recursive))
    missing = [path for path in found if not path.is_file()]
    return len(found) - len(missing), str(missing[0]) if missing else ""
