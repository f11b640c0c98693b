"""Input images and output folder of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qtpy.QtCore import Signal
from qtpy.QtWidgets import QCheckBox, QFileDialog, QLineEdit, QTextEdit, QVBoxLayout, QWidget
from superqt.utils import qdebounced

from napari_beerlanet.core.batch.inputs import find_images
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES
from napari_beerlanet.ui.common.controls import button, heading, hint, row
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.tasks import Task

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
