"""The Annotate panel: boxes around objects, where all of them are marked, into a project."""

from __future__ import annotations

from typing import Any

from qtpy.QtWidgets import QDoubleSpinBox, QFileDialog, QLabel, QVBoxLayout, QWidget

from napari_beerlanet.ui.annotate_adding import FILES
from napari_beerlanet.ui.annotate_class_table import ClassTable
from napari_beerlanet.ui.annotate_flow import AnnotateFlow
from napari_beerlanet.ui.annotate_images import WHOLE
from napari_beerlanet.ui.annotate_keys import HELP
from napari_beerlanet.ui.annotate_question import Question
from napari_beerlanet.ui.controls import button, form, heading, hint, row
from napari_beerlanet.ui.empty import EmptyState
from napari_beerlanet.ui.layers import ImageChoice
from napari_beerlanet.ui.panel import Panel
from napari_beerlanet.ui.project_bar import ProjectBar
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.session import session


class AnnotatePanel(Panel):
    """Annotate the images of a viewer."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__(napari_viewer)
        self.flow = AnnotateFlow(self)
        self.store = self.flow.store
        self._build()
        self._connect()
        self._take_image(self.image.layer)
        if self.store.project is None:
            self.project.reopen()

    # --- parts ------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.empty = EmptyState(self)
        self.image = ImageChoice(self)
        self.project = ProjectBar(self, lambda: self._classes_to_start_with())
        choice = form()
        choice.addRow("Image", self.image)
        choice.addRow("Project", self.project)
        self.body.addWidget(self.empty)
        self.body.addLayout(choice)
        self.work = QWidget()
        self.body.addWidget(self.work)
        self.body.addStretch(1)
        inside = QVBoxLayout(self.work)
        inside.setContentsMargins(0, 0, 0, 0)
        for part in (*self._class_parts(), *self._box_parts(), *self._region_parts()):
            inside.addWidget(part)
        for part in self._project_parts():
            inside.addWidget(part)

    def _class_parts(self) -> list[QWidget]:
        self.classes = ClassTable(self, self.store.classes, self._counts, self._rename)
        self.from_model = button(
            "Classes of the model",
            "Add the classes of the loaded model, in its colours.",
            self.flow.take_model_classes,
        )
        return [heading("Classes"), self.classes, row(self.from_model)]

    def _box_parts(self) -> list[QWidget]:
        self.annotate = button(
            "Annotate",
            "Draw boxes on the image, or go on with those that were saved.",
            self.flow.begin,
        )
        self.help = hint(HELP)
        self.question = Question()
        self.confidence = QDoubleSpinBox()
        self.confidence.setRange(0, 1)
        self.confidence.setSingleStep(0.05)
        self.confidence.setPrefix("from ")
        self.confidence.setToolTip("Copy detections of at least this confidence; 0 copies all.")
        self.copy = button(
            "Copy detections",
            "Copy what was found in this image, with your changes, to correct it here. Copies are "
            "faintly filled until you have looked at them.",
            lambda: self.flow.copy_detections(self.confidence.value()),
        )
        self.import_ = button(
            "Import …",
            "Put boxes of a file onto the image: YOLO, COCO, Pascal VOC, GeoJSON (QuPath) or CSV.",
            self._ask_import,
        )
        tools = row(self.copy, self.confidence, self.import_)
        return [heading("Boxes"), self.annotate, self.help, self.question, tools]

    def _region_parts(self) -> list[QWidget]:
        self.coverage = hint()
        self.whole = button(
            "Whole image",
            "You have found every object of the image: where there is no box, there is nothing.",
            self.flow.mark_whole,
        )
        self.parts = button(
            "Draw regions",
            "Draw where you have found every object; the rest is left out of training.",
            self.flow.draw_regions,
        )
        return [heading("Annotated regions"), self.coverage, row(self.whole, self.parts)]

    def _project_parts(self) -> list[QWidget]:
        self.add = button(
            "Add this image to the project",
            "Cut the annotated regions into pieces to train on; adding again updates them.",
            self.flow.add_to_project,
        )
        self.bar = RunBar(self.flow.running)
        self.said = QLabel()
        self.said.setWordWrap(True)
        self.said.setTextInteractionFlags(self.said.textInteractionFlags().TextSelectableByMouse)
        self.split = hint()
        self.saved = hint()
        return [heading("Training data"), self.add, self.bar, self.said, self.split, self.saved]

    # --- what happens -----------------------------------------------------------------------------

    def _connect(self) -> None:
        self.image.chosen.connect(self._take_image)
        self.flow.said.connect(self.said.setText)
        self.flow.began.connect(self.refresh)
        self.flow.running.started.connect(self.refresh)
        self.flow.running.ended.connect(self.refresh)
        self.store.changed.connect(self.refresh)
        self.store.differs.connect(self.refresh)
        self.store.autosave.said.connect(self._show_saved)
        self.listen(self.store.projects.changed, self.refresh)
        self.listen(self.store.projects.updated, self.refresh)
        self.listen(session(self.viewer).model_changed, self.refresh)
        self.listen(self.viewer.layers.events.inserted, self.refresh)
        self.listen(self.viewer.layers.events.removed, self.refresh)
        self.listen(self.viewer.dims.events.current_step, self._show_coverage)

    def _take_image(self, layer: Any) -> None:
        self.flow.image = layer
        self.refresh()

    def refresh(self, event: Any = None) -> None:
        """Show things as they are now."""
        made, some = self.flow.annotated, self.flow.image is not None
        self.empty.setVisible(not some)
        self.empty.update_text()
        self.work.setEnabled(some)
        self.from_model.setVisible(session(self.viewer).model is not None)
        self.annotate.setText("Annotate" if made is None else "Go on drawing")
        for part in (self.copy, self.confidence, self.import_, self.whole, self.parts):
            part.setEnabled(made is not None)
        self.add.setEnabled(made is not None and not self.flow.running.running)
        self._ask()
        self._show_coverage()
        project = self.store.project
        self.split.setText("\n".join(project.split_notes()) if project else "")
        self._show_saved()
        self.classes.refresh()

    def _show_saved(self, text: str = "") -> None:
        """Muted while all is well."""
        self.saved.setText(self.store.autosave.text)
        self.saved.setEnabled(self.store.autosave.failing)

    def _show_coverage(self, event: Any = None) -> None:
        self.coverage.setText(self._coverage())

    def _coverage(self) -> str:
        made = self.flow.annotated
        if made is None:
            return "Only there does empty space mean that nothing is there."
        if made.coverage == WHOLE and not made.regions.touched:
            return "The whole image counts as annotated."
        count = len(made.regions.read(self.flow.plane)[0])
        if not count:
            return "Nothing is marked as annotated yet."
        return "1 region is annotated." if count == 1 else f"{count} regions are annotated."

    def _ask(self) -> None:
        """Ask what has to be decided about the chosen image."""
        made = self.flow.annotated
        waiting = [found for image, found in self.store.pending if image is made]
        about = None
        if made is not None and waiting:
            about = ("whose", made)
        elif made is not None and made.coverage is None:
            about = ("coverage", made)
        if about == self.question.about:
            return
        if about is None:
            self.question.withdraw()
        elif about[0] == "whose":
            found = waiting[0]
            keep, take = (lambda: self.store.keep(made)), (lambda: self.store.take(made, found))
            self.question.ask_whose(about, made, found, keep, take)
        else:
            self.question.ask_coverage(about, made, self.whole, self.parts)

    def _ask_import(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Boxes of this image", "", FILES)
        if path:
            self.flow.import_file(path)

    # --- classes ----------------------------------------------------------------------------------

    def _counts(self) -> dict[str, int]:
        made = self.flow.annotated
        return made.boxes.counts() if made is not None else {}

    def _classes_to_start_with(self) -> list[str]:
        if not self.store.classes.names:
            self.flow.take_model_classes()
        return list(self.store.classes.names)

    def _rename(self, old: str, new: str) -> None:
        project, classes = self.store.project, self.store.classes
        name = classes.checked(new, old)
        if project is not None and old in project.classes:
            project.rename_class(old, name)
        classes.rename(old, name)

    def ended(self) -> None:
        """The panel goes; what is drawn stays, and goes on being saved."""
        self.store.autosave.flush()
