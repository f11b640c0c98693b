"""The Annotate panel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from napari.layers import Image
from qtpy.QtCore import QTimer, Signal
from qtpy.QtWidgets import (
    QButtonGroup,
    QDoubleSpinBox,
    QFileDialog,
    QFrame,
    QLabel,
    QMenu,
    QPushButton,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.ui.annotate.actions import AnnotationActions, unreviewed_answer
from napari_beerlanet.ui.annotate.annotated_image import (
    MAX_WHOLE_IMAGE_PIXELS,
    WHOLE_IMAGE,
    AnnotatedImage,
)
from napari_beerlanet.ui.annotate.classes import ClassTable
from napari_beerlanet.ui.annotate.key_bindings import KEY_HELP, TYPE_KEY_HELP
from napari_beerlanet.ui.annotate.project_bar import ProjectBar, ProjectImages
from napari_beerlanet.ui.annotate.store import Conflict
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    DisabledReason,
    button,
    form,
    heading,
    hint,
    plain_tooltip,
    row,
    wrapping_label,
)
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.viewer.empty_state import EmptyState
from napari_beerlanet.ui.viewer.layers import ImagePicker

if TYPE_CHECKING:
    from napari import Viewer

_BOX_FILES = "Boxes (*.txt *.json *.geojson *.xml *.csv);;All files (*)"
_DATASET_FILES = "Annotations (*.yaml *.yml *.json *.geojson *.xml *.txt);;All files (*)"
_HIGHLIGHT_MS = 1500
_HIGHLIGHT_COLOUR = "#e69f00"  # seen in both themes, and by the colour-blind

AnswerCallback = Callable[[], None]
AnswerButton = tuple[str, str, AnswerCallback]
"""The button's text, its tooltip, its action."""


class AnnotateWidget(Panel):
    """Annotate the images of a viewer."""

    title = "Annotate"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        self.annotation_actions = AnnotationActions(self)
        self.store = self.annotation_actions.store
        self._add_to_new_project = False
        self._build()
        self._connect()
        self._choose_image(self.image.layer)
        if self.store.project is None:
            self.project.reopen()
        self.store.show_saved()

    # --- layout -----------------------------------------------------------------------------------

    def _build(self) -> None:
        self.empty = EmptyState(self)
        self.image = ImagePicker(self)
        self.project = ProjectBar(self, lambda: self._initial_classes())
        pickers = form()
        pickers.addRow("Image", self.image)
        pickers.addRow("Project", self.project)
        self.body.addWidget(self.empty)
        self.body.addLayout(pickers)
        self.image_section = QWidget()
        layout = QVBoxLayout(self.image_section)
        layout.setContentsMargins(0, 0, 0, 0)
        for widget in (
            *self._class_widgets(),
            self._type_widgets(),
            *self._box_widgets(),
            *self._region_widgets(),
        ):
            layout.addWidget(widget)
        self.body.addWidget(self.image_section)
        for widget in self._project_widgets():
            self.body.addWidget(widget)
        self.body.addStretch(1)

    def _class_widgets(self) -> list[QWidget]:
        self.classes = ClassTable(self, self.store.classes, self._counts, self._saved_rename)
        self.model_classes = button(
            "Add classes of the model",
            "Add the classes of the loaded model, with its colours.",
            self.annotation_actions.add_model_classes,
        )
        return [heading("Classes"), self.classes, row(self.model_classes)]

    def _type_widgets(self) -> QWidget:
        self.type_section = CollapsibleGroup("Cell types")
        self.types = ClassTable(self, self.store.types, self._type_counts, self._saved_type_rename)
        self.keys_set = QButtonGroup(self)
        buttons = []
        for name in ("class", "type"):
            choice = QRadioButton(name)
            choice.setToolTip(f"The keys 1 to 9 set the {name} of boxes, which have its colours.")
            self.keys_set.addButton(choice)
            buttons.append(choice)
        self.keys_set_class, self.keys_set_type = buttons
        self.keys_set_type.toggled.connect(self.store.types.activate)
        self.select_in_region = button(
            "Select in region",
            "Draw around boxes to select them; then a key gives all of them a type.",
            self.annotation_actions.select_in_region,
        )
        self.type_section.body.addWidget(row(QLabel("Keys set:"), *buttons))
        self.type_section.body.addWidget(self.types)
        self.type_section.body.addWidget(row(self.select_in_region))
        self.type_section.header.setChecked(bool(self.store.types.names))
        self._show_keys_set()
        return self.type_section

    def _show_keys_set(self) -> None:
        active = self.store.types.active
        with signals_blocked(self.keys_set_type):
            (self.keys_set_type if active else self.keys_set_class).setChecked(True)
        if hasattr(self, "help"):
            self.help.setText(TYPE_KEY_HELP if active else KEY_HELP)

    def _box_widgets(self) -> list[QWidget]:
        self.annotate = button(
            "Annotate",
            "Draw boxes on the image; its saved annotations are loaded.",
            self.annotation_actions.start,
        )
        self.shown_from = wrapping_label()
        self.help = hint(TYPE_KEY_HELP if self.store.types.active else KEY_HELP)
        self.question = QuestionFrame()
        self.confidence = QDoubleSpinBox()
        self.confidence.setRange(0, 1)
        self.confidence.setSingleStep(0.05)
        self.confidence.setPrefix("≥ ")
        self.confidence.setToolTip("Minimum confidence of the detections to copy; 0 copies all.")
        self.copy = button(
            "Copy detections",
            "Copy the detections of this image, with your edits, to correct them here. Copies are "
            "faintly filled until you have confirmed or changed them.",
            lambda: self.annotation_actions.copy_detections(self.confidence.value()),
        )
        self.import_boxes = button(
            "Import boxes …",
            "Add the boxes of a file to this image: YOLO, COCO, Pascal VOC, GeoJSON (QuPath) or "
            "CSV.",
            self._choose_box_file,
        )
        self.copy_reason = DisabledReason(self.copy)
        tools = row(self.copy, self.confidence, self.import_boxes)
        return [
            heading("Boxes"),
            self.annotate,
            self.shown_from,
            self.help,
            self.question,
            tools,
            self.copy_reason,
        ]

    def _region_widgets(self) -> list[QWidget]:
        self.coverage = hint()
        self.whole_image = button(
            "Whole image",
            "Every cell in the image has a box: where there is no box, there is no cell.",
            self.annotation_actions.mark_whole_image,
        )
        self.draw_regions = button(
            "Draw regions",
            "Draw the regions in which every cell has a box; the rest is not used for training.",
            self.annotation_actions.draw_regions,
        )
        buttons = row(self.whole_image, self.draw_regions)
        return [heading("Annotated regions"), self.coverage, buttons]

    def _project_widgets(self) -> list[QWidget]:
        self.add = button(
            "Add image to project",
            "Cut the annotated regions into training crops; adding again updates them.",
            lambda: self.annotation_actions.add_to_project(),
        )
        self.unreviewed = hint()
        self.add_question = QuestionFrame()
        self.import_dataset = QPushButton("Import annotations …")
        self.import_dataset.setToolTip(
            "Import images that were annotated elsewhere into the project: a YOLO dataset "
            "(data.yaml), COCO, Pascal VOC or GeoJSON (QuPath). Each image counts as annotated "
            "completely."
        )
        menu = QMenu(self.import_dataset)
        self.import_folder_action = menu.addAction("Folder …", self._choose_dataset_folder)
        self.import_file_action = menu.addAction(
            "File (data.yaml, COCO, …) …", self._choose_dataset_file
        )
        self.import_dataset.setMenu(menu)
        self.add_reason, self.import_reason = DisabledReason(self.add), hint()
        self.bar = TaskProgressBar(self.annotation_actions.project_task)
        self.message = wrapping_label()
        self.split = hint()
        self.saved = hint()
        buttons = row(self.add, self.import_dataset)
        question = (self.unreviewed, buttons, self.add_question)
        self.project_images = ProjectImages()
        self.remove_question = QuestionFrame()
        content = (self.split, self.project_images, self.remove_question)
        before = (heading("Training data"), *question, self.add_reason, self.import_reason)
        return [
            *(*before, self.bar, self.message, *content),
            self.saved,
        ]

    def _connect(self) -> None:
        actions = self.annotation_actions
        self.image.chosen.connect(self._choose_image)
        actions.message.connect(self._show_message)
        actions.started.connect(self.refresh)
        actions.file_changed.connect(self.refresh)
        actions.unreviewed_found.connect(self._ask_unreviewed)
        self.project_images.remove_requested.connect(self._ask_removal)
        actions.project_task.started.connect(self.refresh)
        actions.project_task.ended.connect(self._project_task_ended)
        self.store.changed.connect(self.refresh)
        self.store.conflict_found.connect(self.refresh)
        self.store.autosave.message_changed.connect(self._show_saved)
        self.connect_event(self.store.projects.changed, self.refresh)
        self.connect_event(self.store.projects.updated, self.refresh)
        self.connect_event(self.store.projects.changed, self._project_opened)
        self.connect_event(get_session(self.viewer).model_changed, self.refresh)
        self.connect_event(self.viewer.layers.events.inserted, self.refresh)
        self.connect_event(self.viewer.layers.events.removed, self.refresh)
        self.connect_event(self.viewer.dims.events.current_step, self._show_coverage)
        self.connect_event(self.store.types.active_changed, self._show_keys_set)
        self.connect_event(self.store.types.changed, self._show_types)

    # --- state ------------------------------------------------------------------------------------

    def _choose_image(self, layer: Image | None) -> None:
        if layer is not self.annotation_actions.image:
            self.message.setText("")  # it was about the image before
        self.annotation_actions.image = layer
        self.add_question.dismiss()
        self.refresh()

    def refresh(self, event: Any = None) -> None:
        """Update all controls."""
        actions = self.annotation_actions
        annotated, project = actions.annotated, self.store.project
        has_image, busy = actions.image is not None, actions.project_task.running
        self.empty.setVisible(not has_image)
        self.empty.update_text()
        self.image_section.setEnabled(has_image)
        self.model_classes.setVisible(get_session(self.viewer).model is not None)
        self.annotate.setText("Annotate" if annotated is None else "Continue drawing")
        self._show_origin()
        for widget in (self.whole_image, self.draw_regions, self.select_in_region):
            widget.setEnabled(annotated is not None)
        first = "" if annotated is not None else "Press “Annotate” first."
        if not has_image:
            first = "Open an image first."
        self.copy_reason.update_button("" if has_image else first)
        self.add_reason.update_button(first or ("An image is being added." if busy else ""))
        self.import_dataset.setEnabled(project is not None and not project.read_only and not busy)
        reason = "To import annotations, make or open a project first." if project is None else ""
        self.import_reason.setText(reason)
        self.import_reason.setVisible(bool(reason))
        self._ask()
        self._show_unreviewed()
        self._show_coverage()
        self.split.setText("\n".join(project.split_notes()) if project else "")
        self._show_project_images()
        self._show_saved()
        self.classes.refresh()
        self.types.refresh()

    def _show_origin(self) -> None:
        """Where annotations come from that are shown, but nobody works on yet."""
        annotated, image = self.annotation_actions.annotated, self.annotation_actions.image
        text = "" if annotated is None else annotated.shown_from
        if annotated is None and image is not None:
            text = self.store.lookup_notes.get(image, "")
        self.shown_from.setText(text)
        self.shown_from.setVisible(bool(text))

    def _project_task_ended(self, outcome: TaskOutcome) -> None:
        if outcome is TaskOutcome.CANCELLED and self.annotation_actions.importing:
            self.bar.set_message(
                "Import cancelled; the images imported so far stay in the project."
            )
        self.refresh()

    def _show_unreviewed(self) -> None:
        annotated = self.annotation_actions.annotated
        copies, types = (0, 0) if annotated is None else annotated.boxes.unreviewed()
        total = 0 if annotated is None else sum(annotated.boxes.counts().values())
        self.unreviewed.setText(describe_unreviewed(copies, total, types))
        self.unreviewed.setVisible(bool(copies or types) and self.add_question.about is None)
        if not copies and not types:
            self.add_question.dismiss()

    def _show_project_images(self) -> None:
        project, busy = self.store.project, self.annotation_actions.project_task.running
        self.project_images.refresh(project, busy)
        about = self.remove_question.about
        present = set() if project is None else {crop.source for crop in project.crops}
        if isinstance(about, tuple) and (busy or not present.issuperset(about)):
            self.remove_question.dismiss()

    def _ask_removal(self, ids: list[str], names: list[str]) -> None:
        def remove() -> None:
            self.annotation_actions.remove_from_project(ids, names)

        self.remove_question.ask_removal(ids, names, remove)

    def _ask_unreviewed(self, copies: int, total: int, types: int) -> None:
        add = self.annotation_actions.add_to_project
        self.add_question.ask_unreviewed(
            copies, total, types, lambda: add("use"), lambda: add("hide"), unreviewed_answer()
        )
        self._show_unreviewed()
        self.show_soon(self.add_question)

    def _show_message(self, text: str) -> None:
        self.message.setText(text)
        if text:
            self.show_soon(self.message)

    def _show_saved(self, text: str = "") -> None:
        """Muted unless saving fails."""
        self.saved.setText(self.store.autosave.message)
        folder = self.store.autosave.drafts.folder
        self.saved.setToolTip(plain_tooltip(f"Drafts are saved in {folder}"))
        self.saved.set_kind("hint" if not self.store.autosave.failing else "")

    def _show_coverage(self, event: Any = None) -> None:
        self.coverage.setText(self._coverage())

    def _coverage(self) -> str:
        annotated = self.annotation_actions.annotated
        if annotated is None:
            rule = "Only inside annotated regions does the absence of a box mean background."
            return f"{rule} Press “Annotate” first."
        plane = self.annotation_actions.plane
        by_default = annotated.coverage == WHOLE_IMAGE and not annotated.regions.edited
        if by_default or annotated.is_whole(plane):
            return "The whole image counts as annotated."
        count = len(annotated.regions.read(plane)[0])
        if not count:
            return "No region is marked as annotated yet."
        return f"{count_of(count, 'region is', 'regions are')} annotated."

    def _ask(self) -> None:
        """Show the question that has to be answered about the chosen image, if there is one."""
        actions = self.annotation_actions
        annotated, changed = actions.annotated, actions.changed_file
        conflict = next((c for c in self.store.conflicts if c.image is annotated), None)
        about: tuple[str, object] | None = None
        if changed is not None and changed.image is actions.image:
            about = ("changed file", changed)
        elif conflict is not None:
            about = ("conflict", conflict)
        elif annotated is not None and annotated.coverage is None:
            about = ("coverage", annotated)
        if about == self.question.about:
            return
        if about is None:
            self.question.dismiss()
        elif changed is not None and about[1] is changed:
            self.question.ask_changed_file(
                about, changed.image.name, actions.use_existing_annotations, actions.start_anew
            )
        elif conflict is not None:
            self._ask_conflict(about, conflict)
        elif annotated is not None:
            self.question.ask_coverage(about, annotated, self.whole_image, self.draw_regions)

    def _ask_conflict(self, about: object, conflict: Conflict) -> None:
        def keep() -> None:
            self.store.keep_drawn(conflict.image)

        def use() -> None:
            self.store.use_project(conflict)

        if conflict.previous:
            self.question.ask_changed_file(about, conflict.image.name, use, keep)
        else:
            self.question.ask_which_boxes(about, conflict, keep, use)

    def add_image(self) -> None:
        """Add the image to the project; where there is none, the user chooses a folder for one."""
        self._add_to_new_project = self.store.project is None
        if self._add_to_new_project:
            self.project.choose_new_folder()
        else:
            self.annotation_actions.add_to_project()

    def point_to_question(self) -> None:
        """Show the question that has to be answered before the image is added."""
        if self.add_question.about is not None:
            self.reveal(self.add_question)
            self.add_question.highlight()

    def _project_opened(self, project: Any = None) -> None:
        waiting, self._add_to_new_project = self._add_to_new_project, False
        if waiting and project is not None:
            self.annotation_actions.add_to_project()

    # --- dialogs ----------------------------------------------------------------------------------

    def _choose_box_file(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Boxes of this image", "", _BOX_FILES)
        if path:
            self.annotation_actions.import_boxes(path)

    def _choose_dataset_folder(self) -> None:
        path = QFileDialog.getExistingDirectory(self, "Folder of annotated images")
        if path:
            self.annotation_actions.import_dataset(path)

    def _choose_dataset_file(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Dataset or annotations", "", _DATASET_FILES)
        if path:
            self.annotation_actions.import_dataset(path)

    # --- classes ----------------------------------------------------------------------------------

    def _counts(self) -> dict[str, int]:
        annotated = self.annotation_actions.annotated
        return annotated.boxes.counts() if annotated is not None else {}

    def _type_counts(self) -> dict[str, int]:
        annotated = self.annotation_actions.annotated
        return annotated.boxes.type_counts() if annotated is not None else {}

    def _show_types(self) -> None:
        """Open the section when there are types for the first time."""
        number = len(self.store.types.names)
        if number and self.type_section.header.text() == "Cell types":
            self.type_section.header.setChecked(True)
        self.type_section.header.setText(f"Cell types ({number})" if number else "Cell types")

    def _saved_type_rename(self, name: str) -> Callable[[str, str], None] | None:
        project = self.store.project
        return project.rename_type if project is not None and name in project.types else None

    def _saved_rename(self, name: str) -> Callable[[str, str], None] | None:
        project = self.store.project
        return project.rename_class if project is not None and name in project.classes else None

    def _initial_classes(self) -> list[str]:
        if not self.store.classes.names:
            self.annotation_actions.add_model_classes()
        return list(self.store.classes.names)

    def on_closed(self) -> None:
        """Annotations stay in their layers and continue to be saved."""
        self.store.autosave.flush()


class QuestionFrame(QFrame):
    """A question in the panel with a button for each answer; hidden while there is none.

    `changed` is emitted when a question is asked or goes.
    """

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._highlight_timer = QTimer(self)
        self._highlight_timer.setSingleShot(True)
        self._highlight_timer.setInterval(_HIGHLIGHT_MS)
        self._highlight_timer.timeout.connect(lambda: self.setStyleSheet(""))
        self.setFrameShape(QFrame.Shape.StyledPanel)
        self.text = heading("")
        self.text.setWordWrap(True)
        self.about: object = None
        self.buttons: list[QPushButton] = []
        self._button_row = row()
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(8, 6, 8, 6)
        self._layout.addWidget(self.text)
        self._layout.addWidget(self._button_row)
        self.hide()

    def ask(self, about: object, text: str, *answers: AnswerButton) -> None:
        """Show a question in place of the last; any answer hides it."""
        self.about = about
        self.text.setText(text)
        self.buttons = [button(label, tip, self._on_answer(act)) for label, tip, act in answers]
        old, self._button_row = self._button_row, row(*self.buttons)
        self._layout.replaceWidget(old, self._button_row)
        old.hide()
        old.deleteLater()
        self.show()
        self.changed.emit()

    def highlight(self) -> None:
        """Draw attention to the question for a moment; the answer that is offered has the focus."""
        self.setStyleSheet(f"QuestionFrame {{ border: 2px solid {_HIGHLIGHT_COLOUR}; }}")
        self._highlight_timer.start()
        offered = [one for one in self.buttons if one.isDefault()] or self.buttons
        offered[0].setFocus()

    def ask_changed_file(
        self, about: object, name: str, use: AnswerCallback, restart: AnswerCallback
    ) -> None:
        """Whether the annotations of an earlier version of an image's file still hold."""
        self.ask(
            about,
            f"“{name}” has changed since it was annotated.",
            (
                "Use the existing annotations",
                "It is the same picture, saved again: continue with its annotations.",
                use,
            ),
            (
                "Start over",
                "It is another picture: annotate it as a new image. The annotations of the "
                "earlier one are kept.",
                restart,
            ),
        )

    def ask_which_boxes(
        self, about: object, conflict: Conflict, keep: AnswerCallback, use: AnswerCallback
    ) -> None:
        """Which boxes of an image are right: those drawn, or those in the project."""
        theirs = sum(len(annotations) for annotations in conflict.theirs.values())
        drawn = len(conflict.image.boxes.all())
        self.ask(
            about,
            f"The project has other boxes of this image ({theirs}) than are drawn here ({drawn}). "
            "Which ones should it keep?",
            ("Those drawn here", "Replace the project's boxes with those drawn here.", keep),
            (
                "The project's",
                "Show the project's boxes; those drawn here are kept among the drafts.",
                use,
            ),
        )

    def ask_coverage(
        self, about: object, annotated: AnnotatedImage, whole: QPushButton, regions: QPushButton
    ) -> None:
        """Which part of an image is annotated; the answers click the panel's own buttons."""
        size = annotated.shape[0] * annotated.shape[1]
        large = f"This image is larger than a field of view ({size / 1e6:.1f} megapixels). "
        self.ask(
            about,
            f"{large if size > MAX_WHOLE_IMAGE_PIXELS else ''}Where will you annotate every cell?",
            ("In the whole image", whole.toolTip(), whole.click),
            ("In regions I draw", regions.toolTip(), regions.click),
        )

    def ask_unreviewed(
        self,
        copies: int,
        total: int,
        types: int,
        use: AnswerCallback,
        hide: AnswerCallback,
        last_answer: str,
    ) -> None:
        """Whether copies and types that nobody has reviewed are training data.

        The last answer is offered.
        """
        self.ask(
            "unreviewed",
            describe_unreviewed(copies, total, types),
            ("Add all", "Use copies and types as they are; they count as correct.", use),
            (
                "Only reviewed",
                "Leave out what was not reviewed: the model learns it neither as a cell nor as "
                "background, and no type from a cell whose type was not reviewed.",
                hide,
            ),
            ("Cancel", "Add nothing; review the boxes first (Tab, then C to confirm).", _nothing),
        )
        self.buttons[1].setEnabled(copies < total)
        chosen = self.buttons[1 if last_answer == "hide" and copies < total else 0]
        chosen.setDefault(True)
        chosen.setFocus()

    def ask_removal(self, ids: list[str], names: list[str], remove: AnswerCallback) -> None:
        """Whether images shall leave the training data; `about` are their ids."""
        which = f"“{names[0]}”" if len(names) == 1 else f"{len(names)} images"
        self.ask(
            tuple(ids),
            f"Remove {which} from the training data? The training crops are deleted; the "
            "annotations are kept, and adding the image again brings it back.",
            ("Remove", "Delete the training crops of the selected images.", remove),
            ("Cancel", "Change nothing.", _nothing),
        )

    def dismiss(self) -> None:
        """Hide the question."""
        asked, self.about = self.about is not None, None
        self.hide()
        if asked:
            self.changed.emit()

    def _on_answer(self, act: AnswerCallback) -> AnswerCallback:
        def answer() -> None:
            self.dismiss()
            act()

        return answer


def describe_unreviewed(copies: int, total: int, types: int = 0) -> str:
    """How many boxes, and types of other boxes, nobody has looked at; "" for none."""
    of_all = f"{copies} of {count_of(total, 'box', 'boxes')}"
    was = "was" if copies == 1 else "were"
    sentences = [f"{of_all} {was} copied from detections and not reviewed."] if copies else []
    if types:
        were = "type was" if types == 1 else "types were"
        sentences.append(f"{types} {were} given by a classifier and not reviewed.")
    return " ".join(sentences)


def _nothing() -> None:
    """The answer that changes nothing."""
