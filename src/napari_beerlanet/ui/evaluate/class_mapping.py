"""Which class of the model a class of the annotations is: asked once, and remembered.

A YOLO label file only numbers its classes, and people use other names. Unless it is said which are
the same, every box is of a wrong class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from napari.layers import Shapes
from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QGridLayout, QVBoxLayout, QWidget
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.storage import read_json_or_empty
from napari_beerlanet.core.evaluation.live import classes_by_order, unknown_classes
from napari_beerlanet.ui.common.controls import (
    ElidingComboBox,
    button,
    combo_box,
    hint,
    plain_label,
    plain_tooltip,
    row,
)
from napari_beerlanet.ui.common.recent import save_preference, user_data_folder
from napari_beerlanet.ui.common.session import get_project_store
from napari_beerlanet.ui.viewer.layers import Role, role_of

if TYPE_CHECKING:
    from napari.viewer import Viewer

_OTHER_CLASS = "none of these"
_CHOICES_PER_LINE = 2
_MAX_REMEMBERED = 200  # folders and projects


@dataclass(frozen=True)
class ClassMapping:
    """The model's names of classes by those of the annotations, where they differ.

    `unknown` are the annotations' classes that the model does not have under this name, `classes`
    those of the model. `confirmed`: the user has said so. `by_order`: else it is a guess.
    """

    mapping: Mapping[str, str] = field(default_factory=dict)
    unknown: Sequence[str] = ()
    classes: Sequence[str] = ()
    confirmed: bool = False
    by_order: bool = False

    @classmethod
    def resolve(
        cls, names: Sequence[str], model_names: Sequence[str], remembered: Mapping[str, str]
    ) -> ClassMapping:
        """As remembered, or else by order where the annotations only have numbers.

        `remembered` has "" for a class that the user has said to be none of the model's.
        """
        unknown = unknown_classes(names, model_names)
        guessed = classes_by_order(unknown, model_names) if len(unknown) == len(names) else {}
        said = {n: remembered[n] for n in unknown if remembered.get(n) in ("", *model_names)}
        mapping = {name: to for name, to in {**guessed, **said}.items() if to}
        confirmed = bool(unknown) and len(said) == len(unknown)
        return cls(mapping, unknown, list(model_names), confirmed, bool(guessed))

    def own_names(self) -> dict[str, str]:
        """The annotations' name of each class of the model, where it has exactly one."""
        targets = list(self.mapping.values())
        return {to: name for name, to in self.mapping.items() if targets.count(to) == 1}

    def text(self) -> str:
        """What is taken for what, and why."""
        pairs = ", ".join(f"{name} = {to}" for name, to in self.mapping.items())
        if self.confirmed:
            return f"Classes of the annotations: {pairs or 'none is one of the model’s'}."
        if self.by_order:
            return (
                "The annotations only number their classes. They are taken in the order of the "
                "model's classes; is that correct?"
            )
        return "The model has no class of this name. Which one is meant?"


class ClassMappingForm(QWidget):
    """A choice for each class of the annotations that the model does not have; hidden without any.

    `changed` carries all choices by the annotations' names, "" for none of the model's classes.
    """

    changed = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.choices: dict[str, ElidingComboBox] = {}
        self.text = hint()
        self.confirm = button(
            "Correct", "Do not ask again for annotations from this folder or project.", self._accept
        )
        self.change = button("Change …", "Choose other classes.", lambda: self._expand(True))
        self._shown, self._grid = ClassMapping(), QWidget()
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(4)
        self._layout.addWidget(row(self.text, self.change, stretch=0))
        self._layout.addWidget(self._grid)
        self._layout.addWidget(self.confirm, alignment=Qt.AlignmentFlag.AlignLeft)
        self.hide()

    @property
    def mapping(self) -> dict[str, str]:
        """The model's names by those of the annotations."""
        return dict(self._shown.mapping)

    def show_mapping(self, shown: ClassMapping) -> None:
        """Show which classes are taken for which."""
        before, self._shown = self._shown, shown
        if (shown.unknown, shown.classes) != (before.unknown, before.classes):
            self._rebuild()
            self._expand(not shown.confirmed)
        for name, box in self.choices.items():
            with signals_blocked(box):
                box.setCurrentText(shown.mapping.get(name, _OTHER_CLASS))
        self.text.setText(shown.text())
        self.setVisible(bool(shown.unknown))

    def _rebuild(self) -> None:
        old, self._grid = self._grid, QWidget()
        self._layout.replaceWidget(old, self._grid)
        old.hide()
        old.deleteLater()
        grid = QGridLayout(self._grid)
        grid.setContentsMargins(0, 0, 0, 0)
        self.choices = {}
        for k, name in enumerate(self._shown.unknown):
            line, column = divmod(k, _CHOICES_PER_LINE)
            box = combo_box(
                plain_tooltip(f"Which class of the model “{name}” is."), 6, expanding=True
            )
            box.addItems([*self._shown.classes, _OTHER_CLASS])
            box.currentIndexChanged.connect(lambda *_: self._emit())
            self.choices[name] = box
            grid.addWidget(plain_label(f"{name} ="), line, 2 * column)
            grid.addWidget(box, line, 2 * column + 1)

    def _expand(self, expanded: bool) -> None:
        for widget in (self._grid, self.confirm):
            widget.setVisible(expanded)
        self.change.setVisible(not expanded)

    def _accept(self) -> None:
        self._expand(False)
        self._emit()

    def _emit(self) -> None:
        last = len(self._shown.classes)
        self.changed.emit(
            {n: b.currentText() if b.currentIndex() < last else "" for n, b in self.choices.items()}
        )


# --- what is remembered ---------------------------------------------------------------------------


def mapping_place(viewer: Viewer, layer: Shapes) -> str | None:
    """What classes are remembered for: the project, or the folder of the file; None for neither.

    All label files of a folder number their classes alike.
    """
    project = get_project_store(viewer).project
    if role_of(layer) == Role.ANNOTATIONS and project is not None:
        return str(project.path)
    path = layer.source.path
    if not path:
        return None
    file = Path(path).absolute()
    return str(file if file.is_dir() else file.parent)


def remembered_classes(place: str | None) -> dict[str, str]:
    """The model's classes by those of the annotations, as last said for a place."""
    known = read_json_or_empty(_remembered_file()).get(place or "", {})
    return {str(name): str(to) for name, to in known.items()} if isinstance(known, dict) else {}


def remember_classes(place: str, chosen: Mapping[str, str]) -> None:
    """Save what a user has said; ignored where the user's folder cannot be written to."""
    content = read_json_or_empty(_remembered_file())
    before = remembered_classes(place)
    content.pop(place, None)  # the newest last
    content[place] = {**before, **chosen}
    newest = dict(list(content.items())[-_MAX_REMEMBERED:])
    save_preference(_remembered_file(), newest)


def _remembered_file() -> Path:
    return user_data_folder() / "class_names.json"
