"""Annotation classes and cell types: names, colours, that of new boxes, tables to edit them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from psygnal import Signal
from qtpy.QtCore import QSignalBlocker, Qt
from qtpy.QtGui import QColor
from qtpy.QtWidgets import (
    QAbstractItemView,
    QColorDialog,
    QHeaderView,
    QLineEdit,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.boxes.classes import parse_colour
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.ui.common.controls import button, colour_icon, not_none, row
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.session import ClassPalette

if TYPE_CHECKING:
    from napari_beerlanet.core.detection.detector import Detector

NUMBER_KEYS = 9
"""Classes that have a number key."""


class ClassList:
    """Names in the order of their number keys, each with a colour "#rrggbb".

    `changed` is emitted for names and colours, `renamed` with the old name and the new one,
    `current_changed` for the class of new boxes.
    """

    changed = Signal()
    renamed = Signal(str, str)
    current_changed = Signal()
    noun, plural = "class", "classes"

    def __init__(self, palette: ClassPalette | None = None) -> None:
        """`palette`: the viewer's, where there is one."""
        self.names: list[str] = []
        self.palette = ClassPalette() if palette is None else palette
        self._current = 0
        self.palette.changed.connect(self.changed.emit)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def current(self) -> str | None:
        """The class of new boxes, None if there is no class yet."""
        return self.names[self._current] if self._current < len(self.names) else None

    @property
    def current_index(self) -> int:
        """The index of the class of new boxes."""
        return self._current

    def choose(self, index: int) -> bool:
        """Make the class of this index that of new boxes; False if there is none."""
        if not 0 <= index < len(self.names):
            return False
        if index != self._current:
            self._current = index
            self.current_changed.emit()
        return True

    def add(self, names: Iterable[str], colours: Mapping[str, str] | None = None) -> list[str]:
        """Append the classes that are new, and return them."""
        cleaned = [" ".join(str(name).split()) for name in names]
        new = [name for name in dict.fromkeys(cleaned) if name and name not in self.names]
        self.names += new
        if colours:
            self.palette.use_model(colours)
        if new or colours:
            self.changed.emit()
        return new

    def place_first(self, names: Sequence[str]) -> None:
        """Put these first, in this order: a project's labels are numbers."""
        chosen = self.current
        self.names = list(dict.fromkeys([*names, *self.names]))
        self._current = self.names.index(chosen) if chosen in self.names else 0
        self.changed.emit()
        self.current_changed.emit()

    def valid_name(self, new: str, old: str) -> str:
        """A new name for a class, with white space normalised, or a ValueError."""
        name = " ".join(new.split())
        if not name:
            raise ValueError(f"A {self.noun} needs a name.")
        if name != old and name in self.names:
            raise ValueError(f"There is a {self.noun} {name} already; names must differ.")
        return name

    def rename(self, old: str, new: str) -> None:
        """Rename a class; it keeps its colour."""
        name = self.valid_name(new, old)
        self.palette.choose(name, self.colour(old))
        self.names = [name if other == old else other for other in self.names]
        self.renamed.emit(old, name)
        self.changed.emit()

    def remove(self, name: str) -> None:
        """Remove a class."""
        chosen = self.current
        self.names = [other for other in self.names if other != name]
        self._current = self.names.index(chosen) if chosen in self.names else 0
        self.changed.emit()
        self.current_changed.emit()

    def colour(self, name: str) -> str:
        """As "#rrggbb", the same as in all other layers."""
        return self.palette.colour(name)

    def recolour(self, name: str, colour: str) -> None:
        """Set the colour of a class."""
        self.palette.choose(name, colour)

    def rgba(self, names: Sequence[str]) -> npt.NDArray[np.float32]:
        """(n, 4) from 0 to 1, of each name."""
        table = {name: (*parse_colour(self.colour(name)), 255) for name in set(names)}
        values = [table[name] for name in names]
        return np.array(values, np.float32).reshape(-1, 4) / np.float32(255)


class TypeList(ClassList):
    """Cell types. While they are `active`, number keys set the type of boxes, not the class.

    `active_changed` is emitted when that changes.
    """

    active_changed = Signal()
    noun, plural = "type", "types"

    def __init__(self, palette: ClassPalette | None = None) -> None:
        super().__init__(palette)
        self.active = False

    def activate(self, active: bool) -> None:
        """Let number keys set the type, or the class."""
        if active != self.active:
            self.active = active
            self.active_changed.emit()

    def rgba(self, names: Sequence[str]) -> npt.NDArray[np.float32]:
        """(n, 4) from 0 to 1, of each name; grey where there is none."""
        colours = np.tile(np.array(_UNTYPED_RGBA, np.float32), (len(names), 1))
        typed = [k for k, name in enumerate(names) if name]
        colours[typed] = super().rgba([names[k] for k in typed])
        return colours


_UNTYPED_RGBA = (0.6, 0.6, 0.6, 1)


def model_classes(model: Detector | None) -> tuple[list[str], dict[str, str]]:
    """Classes of a loaded model, and their colours if it has any."""
    if model is None:
        return [], {}
    names, colours = list(model.classes), model.info.get("colours") or []
    return names, dict(zip(names, colours, strict=False))


_KEY_COLUMN, _NAME_COLUMN, _COUNT_COLUMN = range(3)
_MAX_VISIBLE_ROWS = 6  # without scrolling


class ClassTable(QWidget):
    """Choose, add, rename, recolour and remove classes, or cell types.

    `counts` returns the number of boxes by class, `saved_rename` what renames a class on the disk,
    None where it is not there. That is done off the GUI thread, as all annotations of a project
    are written; the table waits for it.
    """

    def __init__(
        self,
        panel: Panel,
        classes: ClassList,
        counts: Callable[[], dict[str, int]],
        saved_rename: Callable[[str], Callable[[str, str], None] | None],
    ) -> None:
        super().__init__()
        self.classes, self._counts, self._saved_rename = classes, counts, saved_rename
        self.rename_task = panel.task()
        self.rename_task.ended.connect(self._renamed)
        self._build()
        panel.connect_event(classes.changed, self.refresh)
        panel.connect_event(classes.current_changed, self._show_current)
        self.refresh()

    def _build(self) -> None:
        noun, plural = self.classes.noun, self.classes.plural
        self.table = _new_table(noun)
        self.table.itemSelectionChanged.connect(self._selection_changed)
        self.table.itemChanged.connect(self._edited)
        self.table.cellDoubleClicked.connect(self._double_clicked)
        self.entry = QLineEdit()
        self.entry.setPlaceholderText(f"Name of a {noun} …")
        self.entry.setToolTip(f"Enter the name of a {noun}; separate several by commas.")
        self.entry.returnPressed.connect(self.add_typed)
        self.add_button = button("Add", f"Add these {plural} to the list.", self.add_typed)
        self.colour_button = button(
            "Colour …", f"Change the colour of the selected {noun}.", self.choose_colour
        )
        self.remove_button = button(
            "Remove",
            f"Remove the selected {noun}; only possible while it has no boxes.",
            self.remove,
        )
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(self.table)
        layout.addWidget(
            row(self.entry, self.add_button, self.colour_button, self.remove_button, stretch=0)
        )

    def refresh(self) -> None:
        """Update names, colours and counts."""
        counts, names = self._counts(), self.classes.names
        blocker = QSignalBlocker(self.table)
        self.table.setRowCount(len(names))
        for index, name in enumerate(names):
            key = str(index + 1) if index < NUMBER_KEYS else ""
            for column, text in (
                (_KEY_COLUMN, key),
                (_NAME_COLUMN, name),
                (_COUNT_COLUMN, str(counts.get(name, 0))),
            ):
                self._set(index, column, text)
            item = not_none(self.table.item(index, _NAME_COLUMN))
            item.setIcon(colour_icon(self.classes.colour(name)))
            item.setData(Qt.ItemDataRole.UserRole, name)
        blocker.unblock()
        self._fit_height(len(names))
        self._show_current()

    def _set(self, index: int, column: int, text: str) -> None:
        item = self.table.item(index, column)
        if item is None:
            item = QTableWidgetItem()
            if column != _NAME_COLUMN:
                item.setFlags(item.flags() & ~Qt.ItemFlag.ItemIsEditable)
                item.setTextAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            self.table.setItem(index, column, item)
        item.setText(text)

    def _fit_height(self, rows: int) -> None:
        visible = min(max(rows, 1), _MAX_VISIBLE_ROWS)
        line = not_none(self.table.verticalHeader()).defaultSectionSize()
        header = not_none(self.table.horizontalHeader()).height()
        self.table.setFixedHeight(header + visible * line + 4)

    def _show_current(self) -> None:
        blocker = QSignalBlocker(self.table)
        self.table.selectRow(self.classes.current_index)
        blocker.unblock()
        some = bool(self.classes.names)
        self.colour_button.setEnabled(some)
        self.remove_button.setEnabled(some)

    def _selection_changed(self) -> None:
        rows = {index.row() for index in self.table.selectedIndexes()}
        if rows:
            self.classes.choose(min(rows))

    # --- changes ----------------------------------------------------------------------------------

    def add_typed(self) -> None:
        """Add the typed classes."""
        new = self.classes.add(self.entry.text().split(","))
        self.entry.clear()
        if new:
            self.classes.choose(self.classes.names.index(new[0]))

    def choose_colour(self) -> None:
        """Let the user choose a colour for the selected class."""
        name = self.classes.current
        if name is not None:
            colour = QColorDialog.getColor(QColor(self.classes.colour(name)), self, f"{name}")
            if colour.isValid():
                self.classes.recolour(name, colour.name())

    def remove(self) -> None:
        """Remove the selected class, if it has no boxes."""
        name = self.classes.current
        if name is None:
            return
        count = self._counts().get(name, 0)
        if count:
            boxes = count_of(count, "box", "boxes")
            noun = self.classes.noun
            notify_error(f"{name} has {boxes}; change their {noun} or delete them first.")
        else:
            self.classes.remove(name)

    def _double_clicked(self, index: int, column: int) -> None:
        if column == _KEY_COLUMN:
            self.choose_colour()

    def _edited(self, item: Any) -> None:
        old, new = item.data(Qt.ItemDataRole.UserRole), item.text()
        if item.column() != _NAME_COLUMN or old is None or old == new:
            return
        self.rename(old, new)
        self.refresh()

    def rename(self, old: str, new: str) -> None:
        """Give a class another name, in the project first."""
        try:
            name = self.classes.valid_name(new, old)
        except ValueError as error:
            notify_error(error)
            return
        rename = self._saved_rename(old)
        if rename is None:
            self.classes.rename(old, name)
            return
        self.setEnabled(False)
        self.rename_task.start(
            lambda report: rename(old, name),
            lambda _: self.classes.rename(old, name),
            notify_error,
        )

    def _renamed(self) -> None:
        self.setEnabled(True)
        self.refresh()


def _new_table(noun: str) -> QTableWidget:
    table = QTableWidget(0, 3)
    table.setHorizontalHeaderLabels(["Key", noun.capitalize(), "Boxes"])
    table.setToolTip(
        f"New boxes get the highlighted {noun}. Double-click a name to rename it. While the layer "
        f"of boxes is active, the keys 1 to 9 choose a {noun}."
    )
    table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
    table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
    table.setTabKeyNavigation(False)
    lines, header = not_none(table.verticalHeader()), not_none(table.horizontalHeader())
    lines.hide()
    lines.setDefaultSectionSize(24)
    header.setSectionResizeMode(_NAME_COLUMN, QHeaderView.ResizeMode.Stretch)
    header.setSectionResizeMode(_KEY_COLUMN, QHeaderView.ResizeMode.ResizeToContents)
    header.setSectionResizeMode(_COUNT_COLUMN, QHeaderView.ResizeMode.ResizeToContents)
    return table
