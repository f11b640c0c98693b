"""What a review is good for: a report to hand on, and annotations to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtpy.QtWidgets import QFileDialog, QHBoxLayout, QWidget

from napari_beerlanet.core.decompose import Decomposition, decompose
from napari_beerlanet.core.files import FileError
from napari_beerlanet.core.progress import Report, tell, within
from napari_beerlanet.core.report import Subject, pixels_hash, write_report
from napari_beerlanet.ui.controls import button, row
from napari_beerlanet.ui.notices import complain
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.session import session

PLUGIN, ANNOTATE = "napari-beerlanet", "Annotate"
_MOST = 1e8  # pixels of an image that a report is made of


class ReviewOut(QWidget):
    """Two buttons and the state of what they do."""

    def __init__(self, panel: Any) -> None:
        super().__init__()
        self._panel, self.task = panel, panel.task()
        self.report = button(
            "Report …",
            "Write counts, curves, pictures and the model's record into one HTML file.",
            self._ask,
        )
        self.send = button(
            "Accepted to project",
            "Copy what you accepted, moved or drew, with your classes, to the annotations of this "
            "image, which are saved in the open project; a model can learn from them.",
            self.send_accepted,
        )
        self.bar = RunBar(self.task)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(row(self.report, self.send))

    def _ask(self) -> None:
        target = self._panel.target
        if target is not None:
            path, _ = QFileDialog.getSaveFileName(
                self, "Write a report", f"{target.source.name}.report.html", "Report (*.html)"
            )
            if path:
                self.write(Path(path))

    def write(self, path: Path) -> None:
        """Write a report of what is reviewed, off the GUI thread."""
        panel = self._panel
        target, review, against = panel.target, panel.review, panel.against
        if target is None or review is None:
            return
        plane, found = target.plane, review.judged()
        if plane.shape[0] * plane.shape[1] > _MOST:
            complain(f"“{target.source.name}” is too large for a report; crop the part you mean.")
            return
        model, stains = target.model, session(panel.viewer).decompositions.get(target.source)
        if not isinstance(stains, Decomposition) or stains.densities.shape[1:] != plane.shape:
            stains = None  # of a part, or of a slide that is never in memory
        rest = {
            "name": target.source.name,
            "found": found,
            "confidence": max(panel.filter.confidence.value()[0], 0.0),
            "colours": target.colours,
            "quality": against.quality_of(found),
            "level": against.panel.level.value(),
            "model": dict(model.info) if model is not None else {},
        }

        key = session(panel.viewer).model_key if model is not None else None

        def work(report: Report) -> Path:
            tell(report, 0, 10, "reading the image")
            pixels = plane.read()
            part = within(report, 0.1, 0.7)
            apart = stains or decompose(pixels, iterations="converge", report=part)
            tell(report, 7, 10, "writing")
            hashes = {"the pixels": pixels_hash(pixels), **_checkpoint(key)}
            write_report(path, Subject(pixels=pixels, decomposition=apart, hashes=hashes, **rest))
            return path

        self.task.start(work, lambda written: self.bar.say(f"The report is in {written}."))

    def send_accepted(self) -> None:
        """Open the annotations of the image and add what was accepted."""
        panel = self._panel
        if panel.review is None or panel.target is None:
            return
        decided = panel.target.to_learn_from(panel.review)
        if not len(decided):
            complain("Nothing is accepted yet: accept boxes first (Y).")
            return
        annotate = _annotate_panel(panel.viewer)
        annotate.image.choose(panel.target.source)
        annotate.flow.take(decided, "accept in review")


def _checkpoint(key: Any) -> dict[str, str]:
    """The digest of the model's file, by what it is of; none where there is no file."""
    from napari_beerlanet.core.checkpoint import checkpoint_hash

    try:
        return {"the checkpoint": checkpoint_hash(key)} if key else {}
    except (OSError, FileError):
        return {}  # it was moved since it was loaded


def _annotate_panel(viewer: Any) -> Any:
    """The open Annotate panel, or a new one."""
    from napari_beerlanet.ui.annotate_panel import AnnotatePanel

    for inner in viewer.window.dock_widgets.values():
        if isinstance(inner, AnnotatePanel):
            return inner
    return viewer.window.add_plugin_dock_widget(PLUGIN, ANNOTATE, tabify=True)[1]
