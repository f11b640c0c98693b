"""How many there are of each class, the share of infected red cells, and what to be wary of."""

from __future__ import annotations

import html
from collections.abc import Sequence

from qtpy.QtCore import Qt
from qtpy.QtWidgets import QApplication, QLabel, QVBoxLayout, QWidget

from napari_beerlanet.core.counting import Tally
from napari_beerlanet.ui.controls import button, heading, row

_WARY = "⚠"


class CountsPanel(QWidget):
    """The counts of one image, as text; `show_tally` is called as often as the threshold moves."""

    def __init__(self) -> None:
        super().__init__()
        self.tally: Tally | None = None
        self.warnings = _label("Why these counts should be looked at twice.")
        self.table = _label("How many boxes of each class pass the confidence.")
        self.share = _label(
            "Infected red cells among all red cells, with the 95 % interval that chance alone "
            "leaves for a count of this size (Wilson)."
        )
        self.note = _label("How the boxes came about, and how many of them are drawn.")
        self.note.setEnabled(False)
        self.copy = button(
            "Copy counts", "Copy the counts as a table for a spreadsheet.", self.copy_table
        )
        self.copy_text = button(
            "Copy as text", "Copy the counts as one sentence.", self.copy_sentence
        )
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(heading("Counts"))
        for widget in (self.warnings, self.table, self.share, self.note):
            layout.addWidget(widget)
        layout.addWidget(row(self.copy, self.copy_text))
        self._colours: list[str] = []
        self.clear()

    def clear(self) -> None:
        """Nothing was run."""
        self.tally = None
        self.hide()

    def show_tally(self, tally: Tally, colours: Sequence[str]) -> None:
        """Show the counts, each class in its colour."""
        self.tally = tally
        padded = [*colours, *["#808080"] * len(tally.counts)]
        rows = "".join(
            f"<tr><td><span style='color:{colour}'>■</span>&nbsp;{html.escape(name)}</td>"
            f"<td align='right'><b>{n:,}</b></td></tr>"
            for (name, n), colour in zip(tally.counts.items(), padded, strict=False)
        )
        total = f"<tr><td>All</td><td align='right'>{tally.total:,}</td></tr>"
        self.table.setText(f"<table width='100%'>{rows}{total}</table>")
        found = tally.parasitaemia
        self.share.setVisible(found is not None)
        if found is not None:
            self.share.setText(
                f"Parasitaemia <b>{found}</b><br>{found.infected:,} of {found.cells:,} red cells"
            )
        self.show()

    def warn(self, sentences: Sequence[str]) -> None:
        """What to be wary of; nothing for []."""
        self.warnings.setVisible(bool(sentences))
        lines = "<br>".join(f"{_WARY} {html.escape(text)}" for text in sentences)
        self.warnings.setText(lines and f"<span style='color:#d08700'>{lines}</span>")

    def say(self, text: str) -> None:
        """A small line below the counts."""
        self.note.setText(html.escape(text))
        self.note.setVisible(bool(text))

    def copy_table(self) -> None:
        """Put the counts into the clipboard as a table."""
        if self.tally is not None:
            QApplication.clipboard().setText(self.tally.tsv())

    def copy_sentence(self) -> None:
        """Put the counts into the clipboard as a sentence."""
        if self.tally is not None:
            QApplication.clipboard().setText(self.tally.text())


def _label(tooltip: str) -> QLabel:
    label = QLabel()
    label.setWordWrap(True)
    label.setTextFormat(Qt.TextFormat.RichText)
    label.setToolTip(tooltip)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label
