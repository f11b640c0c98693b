"""Export a review: an HTML report, or accepted boxes as annotations of the open project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtpy.QtWidgets import QFileDialog, QHBoxLayout, QWidget

from napari_beerlanet.core.boxes.classes import infected_types
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import FileError, pixel_hash
from napari_beerlanet.core.report.report import write_report
from napari_beerlanet.core.report.subject import ReportSubject
from napari_beerlanet.core.review.review import Review
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.ui.common.controls import button, row
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel, open_panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.evaluate.annotation_tab import AnnotationComparisonTab
from napari_beerlanet.ui.review.filter import FilterForm
from napari_beerlanet.ui.review.target import ReviewTarget

ANNOTATE_TITLE = "Annotate"
_MAX_REPORT_PIXELS = 1e8  # larger images get no report
_ONE_PAGE = "Malaria smear on one page (*.html)"


class ReviewExport(QWidget):
    """Buttons to write a report, and to add accepted boxes to the project."""

    def __init__(
        self, panel: Panel, filter_form: FilterForm, annotation_tab: AnnotationComparisonTab
    ) -> None:
        super().__init__()
        self._viewer, self.task = panel.viewer, panel.task()
        self._filter, self._annotation_tab = filter_form, annotation_tab
        self._target: ReviewTarget | None = None
        self._review: Review | None = None
        self.report_button = button(
            "Report …",
            "Write counts, curves, pictures and the model's record to one HTML file.",
            self._browse,
        )
        self.add_accepted_button = button(
            "Add accepted to project",
            "Copy the boxes that you accepted, moved or drew to the annotations of this image, for "
            "training. They are saved in the open project.",
            self.add_accepted_to_project,
        )
        self.bar = TaskProgressBar(self.task)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(row(self.report_button, self.add_accepted_button))

    def set_review(self, target: ReviewTarget | None, review: Review | None) -> None:
        """Export another review."""
        self._target, self._review = target, review

    def _browse(self) -> None:
        if self._target is not None:
            name = f"{self._target.source.name}.report.html"
            types = self._review.type_names if self._review is not None else []
            kinds = ["Report (*.html)", *([_ONE_PAGE] if infected_types(types) else [])]
            path, kind = QFileDialog.getSaveFileName(self, "Save report", name, ";;".join(kinds))
            if path:
                self.write_report(Path(path), one_page=kind == _ONE_PAGE)

    def write_report(self, path: Path, one_page: bool = False) -> None:
        """Write a report of the review, off the GUI thread; see `render_report`."""
        target, review, annotation_tab = self._target, self._review, self._annotation_tab
        if target is None or review is None:
            return
        plane, detections = target.plane, review.reviewed()
        if plane.shape[0] * plane.shape[1] > _MAX_REPORT_PIXELS:
            notify_error(
                f"“{target.source.name}” is too large for a report; crop the part of interest."
            )
            return
        session, model = get_session(self._viewer), target.model
        stains = session.decompositions.get(target.source)
        if not isinstance(stains, Decomposition) or stains.densities.shape[1:] != plane.shape:
            stains = None  # of a part of the image, or of a slide that is never in memory
        facts: dict[str, Any] = {
            "name": target.source.name,
            "detections": detections,
            "confidence": max(self._filter.min_confidence, 0.0),
            "colours": target.colours,
            "type_colours": dict(
                zip(review.type_names, target.type_colours(review.type_names), strict=True)
            ),
            "evaluation": annotation_tab.evaluate(detections),
            "iou": annotation_tab.metrics.iou_threshold.value(),
            "model": dict(model.info) if model is not None else {},
        }
        key = session.model_key if model is not None else None
        classifier, classifier_key = session.classifier, session.classifier_key
        if classifier is None or detections.report.get("classifier") != classifier.info.get("name"):
            classifier_key = None  # another one than gave these types
        else:
            facts["classifier"] = dict(classifier.info)

        def work(report: Report) -> Path:
            report_progress(report, 0, 10, "reading the image")
            pixels = plane.read()
            fit_progress = subprogress(report, 0.1, 0.7)
            fitted = stains
            if fitted is None and not one_page:
                fitted = decompose(pixels, iterations="converge", report=fit_progress)
            report_progress(report, 7, 10, "writing")
            hashes = {
                "the pixels": pixel_hash(pixels),
                **_checkpoint_digest("the checkpoint", key),
                **_checkpoint_digest("the classifier", classifier_key),
            }
            subject = ReportSubject(pixels=pixels, decomposition=fitted, hashes=hashes, **facts)
            write_report(path, subject, one_page)
            return path

        self.task.start(work, lambda written: self.bar.set_message(f"Report saved: {written}"))

    def add_accepted_to_project(self) -> None:
        """Open the annotations of the image and add the accepted boxes."""
        if self._review is None or self._target is None:
            return
        accepted = self._target.accepted_detections(self._review)
        if not len(accepted):
            notify_error("No boxes are accepted yet: accept some first (Y).")
            return
        annotate = open_panel(self._viewer, ANNOTATE_TITLE)
        annotate.image.choose(self._target.source)
        plane = self._target.plane.index
        annotate.annotation_actions.add_confirmed(accepted, plane, "accept in review")


def _checkpoint_digest(what: str, key: str | None) -> dict[str, str]:
    """The hash of the model's file, named for the report; empty where there is no file."""
    from napari_beerlanet.core.checkpoints.checkpoint import checkpoint_hash

    try:
        return {what: checkpoint_hash(key)} if key else {}
    except (OSError, FileError):
        return {}  # moved since it was loaded
