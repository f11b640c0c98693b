"""The foot of the workspace: what runs in any tab, and the next step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from qtpy.QtCore import Qt, Signal
from qtpy.QtGui import QShowEvent
from qtpy.QtWidgets import (
    QHBoxLayout,
    QPushButton,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.ui.common.controls import hint, plain_tooltip, separator
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import Activity, activity_bar


class ActivityRow(QWidget):
    """An activity while it runs: the label of its tab, to go there, progress, and how to stop it.

    `changed` is emitted when it starts or ends, `clicked` with the place of the tab.
    """

    changed = Signal()
    clicked = Signal(int)

    def __init__(self, place: int, label: str, activity: Activity) -> None:
        super().__init__()
        self.place, self.label, self.activity = place, label, activity
        self.link = QToolButton()
        self.link.setText(label)
        self.link.setToolTip(f"Go to “{label}”.")
        self.link.setAutoRaise(True)
        self.link.setCursor(Qt.CursorShape.PointingHandCursor)
        self.link.clicked.connect(self._click)
        self.bar, self.stop = activity_bar(), QPushButton()
        self.bar.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.stop.clicked.connect(activity.stop)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(self.link)
        layout.addWidget(self.bar, 1)
        layout.addWidget(self.stop)
        self.hide()
        activity.changed.connect(self.update_state)
        self.update_state()

    def update_state(self) -> None:
        """Show how far it is."""
        self.activity.show_on(self.bar, self.stop)
        self.bar.setToolTip(
            plain_tooltip(f"{self.activity.text}: progress, and the estimated time left.")
        )
        if self.activity.running == self.isHidden():
            self.setVisible(self.activity.running)
            self.changed.emit()

    def _click(self) -> None:
        self.clicked.emit(self.place)


class Footer(QWidget):
    """Rows of what runs, one below the other, above the button for the next step.

    The space of one row is always kept, so that nothing moves when something starts; while nothing
    runs, `note` is shown there. `changed` is emitted when something starts or ends, `tab_requested`
    with the place of a tab to go to.
    """

    changed = Signal()
    tab_requested = Signal(int)

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[ActivityRow] = []
        self.next_button = QPushButton(Step.OPEN)
        self._spare = ActivityRow(0, "Stains", Activity(self, _nothing, "Cancel", ""))
        self.note = hint("")
        self.note.setWordWrap(False)
        policy = self.note.sizePolicy()
        policy.setHorizontalPolicy(QSizePolicy.Policy.Ignored)  # a long name widens nothing
        self.note.setSizePolicy(policy)
        self._activities = QVBoxLayout()
        self._activities.setSpacing(4)
        self._activities.addWidget(self._spare)
        self._activities.addWidget(self.note)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(8, 4, 8, 6)
        layout.setSpacing(4)
        layout.addWidget(separator())
        layout.addLayout(self._activities)
        layout.addWidget(self.next_button)
        self._keep_space()

    def watch(self, place: int, label: str, panel: Panel) -> None:
        """Show what runs in the panel of a tab from now on; tabs have places from left to right."""
        for activity in panel.findChildren(Activity):
            row = ActivityRow(place, label, activity)
            row.setMinimumHeight(self._spare.minimumHeight())
            row.clicked.connect(self.tab_requested)
            row.changed.connect(self._keep_space)
            row.changed.connect(self.changed)
            above = [other for other in self._rows if other.place <= place]
            self._rows.insert(len(above), row)
            self._activities.insertWidget(len(above), row)
        self._keep_space()

    @property
    def rows(self) -> dict[Activity, ActivityRow]:
        """What runs now and its row, from top to bottom."""
        return {row.activity: row for row in self._rows if row.activity.running}

    def close_down(self) -> None:
        """Show nothing more; panels may outlive the workspace."""
        for row in self._rows:
            row.activity.changed.disconnect(row.update_state)
        self._rows.clear()

    def show_note(self, text: str, more: str = "") -> None:
        """Show a sentence of one line while nothing runs, with `more` when the mouse is over it."""
        self.note.setText(text)
        self.note.setToolTip(plain_tooltip(more))

    def show_step(self, step: Step) -> None:
        """Show the next step on the button."""
        self.next_button.setText(step)
        self.next_button.setToolTip(STEP_TIPS[step])
        self.next_button.setEnabled(step not in WAITING_STEPS)

    def showEvent(self, event: QShowEvent | None) -> None:
        """The theme is known by now, and with it the height of a row."""
        parts = (self._spare.link, self._spare.bar, self._spare.stop)
        for part in parts:
            part.ensurePolished()
        height = max(part.sizeHint().height() for part in parts)
        for row in (self._spare, self.note, *self._rows):
            row.setMinimumHeight(height)
        super().showEvent(event)

    def _keep_space(self) -> None:
        """The note, also an empty one, takes the space as long as there is no row."""
        self.note.setVisible(not self.rows)


def _nothing() -> None:
    """The spare row has nothing to stop."""


# --- the next step --------------------------------------------------------------------------------


class Step(StrEnum):
    """What to do next; the value is the text of the button."""

    OPEN = "Next: open an image or a sample"
    FIND = "Next: find cells"
    FINDING = "Finding cells …"
    CLASSIFY = "Next: classify cells"
    CLASSIFYING = "Classifying cells …"
    CORRECT = "Next: correct them (Annotate)"
    DRAW = "Next: draw missed cells (Annotate)"
    ADD = "Next: add to project"
    ANSWER = "Next: answer the question (Annotate)"
    ADDING = "Adding to the project …"
    TRAIN = "Next: train"
    START = "Next: start training"
    TRAINING = "Training …"
    KEEP = "Next: compare and keep the model"
    FIND_AGAIN = "Next: find cells with the new model"
    OPEN_ANOTHER = "Next: open another image"


@dataclass(frozen=True)
class Situation:
    """What the next step depends on, of the chosen image, the project and what runs.

    `detected`: it was searched, `empty`: and nothing was found, `outdated`: by another model than
    the kept one that is loaded. `classifiable`: the loaded classifier is meant for the classes of
    its detections, and none has a type.
    `boxes`: number of annotations, `asked`: whether to add copies that nobody has reviewed,
    `added`: they are in the project as they are. `learned`: the loaded model was trained on the
    project as it is. `decide`: a run has ended, and its model is neither kept nor discarded.
    `at_start`: the tab “Train” is open and could start.
    """

    image: bool = False
    finding: bool = False
    detected: bool = False
    empty: bool = False
    outdated: bool = False
    classifiable: bool = False
    classifying: bool = False
    boxes: int = 0
    asked: bool = False
    adding: bool = False
    added: bool = False
    training: bool = False
    decide: bool = False
    learned: bool = False
    at_start: bool = False


def next_step(now: Situation) -> Step:
    """The step that leads on from here, around the loop: find, correct, add, train, keep."""
    if now.decide:
        return Step.KEEP
    if not now.image:
        return Step.OPEN
    if now.finding:
        return Step.FINDING
    if now.classifying:
        return Step.CLASSIFYING
    if now.adding:
        return Step.ADDING
    if now.outdated:
        return Step.FIND_AGAIN
    if now.boxes and not now.added:
        return Step.ANSWER if now.asked else Step.ADD
    if not now.boxes and now.classifiable:
        return Step.CLASSIFY
    if not now.boxes and now.detected:
        return Step.DRAW if now.empty else Step.CORRECT
    if not now.boxes:
        return Step.FIND
    if now.training:
        return Step.TRAINING
    if now.learned:
        return Step.OPEN_ANOTHER
    return Step.START if now.at_start else Step.TRAIN


STEP_TIPS = {
    Step.OPEN: "Open a stained image, or a sample to try the plugin on.",
    Step.FIND: "Search the image with the model and settings of “Cells”.",
    Step.FINDING: "The search is running; it can be cancelled above.",
    Step.CLASSIFY: "Classify the cells that the loaded classifier is meant for.",
    Step.CLASSIFYING: "The classification is running; it can be cancelled above.",
    Step.CORRECT: "Copy the detections to annotations, to correct what is wrong.",
    Step.DRAW: "No cell was found: draw a box around each that is there.",
    Step.ADD: "Cut the annotated regions into training crops of the project.",
    Step.ANSWER: "Say whether boxes that nobody has reviewed are training data.",
    Step.ADDING: "The image is being added to the project.",
    Step.TRAIN: "Fine-tune the model on the images of the project.",
    Step.START: "Start training with these settings.",
    Step.TRAINING: "The training is running; it can be stopped above.",
    Step.KEEP: "Compare the new model with the previous one, then keep or discard it.",
    Step.FIND_AGAIN: "Search the image again, with the model that you have kept.",
    Step.OPEN_ANOTHER: "The model has learned from this image: continue with the next one.",
}
WAITING_STEPS = frozenset({Step.FINDING, Step.CLASSIFYING, Step.ADDING, Step.TRAINING})
"""Steps that only take time."""
