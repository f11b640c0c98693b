"""The list of classes: number key, colour, name, how many boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qtpy.QtCore import QSignalBlocker, Qt
from qtpy.QtGui import QColor, QIcon, QPixmap
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

from napari_beerlanet.ui.annotate_classes import KEYS, Classes
from napari_beerlanet.ui.controls import button, row
from napari_beerlanet.ui.notices import complain

_KEY, _NAME, _COUNT = range(3)
_ROWS = 6  # that are seen without scrolling


class ClassTable(QWidget):
    """Choose, add, rename, recolour and remove classes.

    `counts` gives the number of boxes by class, `rename` carries a new name wherever it must go.
    """

    def __init__(
        self,
        panel: Any,
        classes: Classes,
        counts: Callable[[], dict[str, int]],
        rename: Callable[[str, str], None],
    ) -> None:
        super().__init__()
        self.classes, self._counts, self._rename = classes, counts, rename
        self._build()
        panel.listen(classes.changed, self.refresh)
        panel.listen(classes.current_changed, self._show_current)
        self.refresh()

    def _build(self) -> None:
        self.table = _table()
        self.table.itemSelectionChanged.connect(self._chosen)
        self.table.itemChanged.connect(self._edited)
        self.table.cellDoubleClicked.connect(self._double_clicked)
        self.entry = QLineEdit()
        self.entry.setPlaceholderText("Name of a class …")
        self.entry.setToolTip("Type the name of a class and press Enter; commas part several.")
        self.entry.returnPressed.connect(self.add_typed)
        self.add_button = button("Add", "Add the typed classes to the list.", self.add_typed)
        self.colour_button = button(
            "Colour …", "Choose another colour for the chosen class.", self.choose_colour
        )
        self.remove_button = button(
            "Remove", "Take the chosen class off the list; it must not have boxes.", self.remove
        )
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(self.table)
        layout.addWidget(
            row(self.entry, self.add_button, self.colour_button, self.remove_button, stretch=0)
        )

    def refresh(self) -> None:
        """Show names, colours and counts as they are now."""
        counts, names = self._counts(), self.classes.names
        blocker = QSignalBlocker(self.table)
        self.table.setRowCount(len(names))
        for place, name in enumerate(names):
            key = str(place + 1) if place < KEYS else ""
            for column, text in ((_KEY, key), (_NAME, name), (_COUNT, str(counts.get(name, 0)))):
                self._set(place, column, text)
            self.table.item(place, _NAME).setIcon(_icon(self.classes.colour(name)))
            self.table.item(place, _NAME).setData(Qt.ItemDataRole.UserRole, name)
        blocker.unblock()
        self._fit_height(len(names))
        self._show_current()

    def _set(self, place: int, column: int, text: str) -> None:
        item = self.table.item(place, column)
        if item is None:
            item = QTableWidgetItem()
            if column != _NAME:
                item.setFlags(item.flags() & ~Qt.ItemFlag.ItemIsEditable)
                item.setTextAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            self.table.setItem(place, column, item)
        item.setText(text)

    def _fit_height(self, rows: int) -> None:
        seen = min(max(rows, 1), _ROWS)
        line = self.table.verticalHeader().defaultSectionSize()
        self.table.setFixedHeight(self.table.horizontalHeader().height() + seen * line + 4)

    def _show_current(self) -> None:
        blocker = QSignalBlocker(self.table)
        self.table.selectRow(self.classes.place)
        blocker.unblock()
        some = bool(self.classes.names)
        self.colour_button.setEnabled(some)
        self.remove_button.setEnabled(some)

    def _chosen(self) -> None:
        rows = {index.row() for index in self.table.selectedIndexes()}
        if rows:
            self.classes.choose(min(rows))

    # --- changes ----------------------------------------------------------------------------------

    def add_typed(self) -> None:
        """Add what is typed."""
        new = self.classes.add(self.entry.text().split(","))
        self.entry.clear()
        if new:
            self.classes.choose(self.classes.names.index(new[0]))

    def choose_colour(self) -> None:
        """Ask for a colour of the chosen class."""
        name = self.classes.current
        if name is not None:
            colour = QColorDialog.getColor(QColor(self.classes.colour(name)), self, f"{name}")
            if colour.isValid():
                self.classes.recolour(name, colour.name())

    def remove(self) -> None:
        """Take the chosen class off the list, if it has no boxes."""
        name = self.classes.current
        if name is None:
            return
        count = self._counts().get(name, 0)
        if count:
            complain(f"{name} has {count} boxes; give them another class or delete them first.")
        else:
            self.classes.remove(name)

    def _double_clicked(self, place: int, column: int) -> None:
        if column == _KEY:
            self.choose_colour()

    def _edited(self, item: Any) -> None:
        old, new = item.data(Qt.ItemDataRole.UserRole), item.text()
        if item.column() != _NAME or old is None or old == new:
            return
        try:
            self._rename(old, new)
        except ValueError as error:
            complain(error)
        self.refresh()


def _table() -> QTableWidget:
    table = QTableWidget(0, 3)
    table.setHorizontalHeaderLabels(["Key", "Class", "Boxes"])
    table.setToolTip(
        "The highlighted class is that of new boxes. Double-click a name to change it; with the "
        "boxes' layer active, keys 1 to 9 choose."
    )
    table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
    table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
    table.verticalHeader().hide()
    table.verticalHeader().setDefaultSectionSize(24)
    table.setTabKeyNavigation(False)
    head = table.horizontalHeader()
    head.setSectionResizeMode(_NAME, QHeaderView.ResizeMode.Stretch)
    head.setSectionResizeMode(_KEY, QHeaderView.ResizeMode.ResizeToContents)
    head.setSectionResizeMode(_COUNT, QHeaderView.ResizeMode.ResizeToContents)
    return table


def _icon(colour: str) -> QIcon:
    square = QPixmap(14, 14)
    square.fill(QColor(colour))
    icon = QIcon(square)
    icon.addPixmap(square, QIcon.Mode.Selected)  # else it is tinted, and is another colour
    return icon
