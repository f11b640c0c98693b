"""What the keys and buttons of the review do: go through detections, and decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import Qt, QTimer
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import QShortcut

from napari_beerlanet.core.reviewing import Review
from napari_beerlanet.ui.panel import Panel
from napari_beerlanet.ui.review_target import ReviewTarget

Rows = npt.NDArray[np.int64]

KEYS_HINT = (
    "Keys: N next, B back, Y accept, X reject, U take back, 1–9 another class, F mend. "
    "They work here and on the canvas."
)


class ReviewActions(Panel):
    """The part of the panel that knows which detection is the current one.

    `rows` (m,) are the rows of `review` that pass the filter, in the order of table and gallery.
    Table, gallery, filter and the rest are made by the panel itself.
    """

    target: ReviewTarget | None
    review: Review | None
    rows: Rows
    current: int | None
    keys: dict[str, Callable[[], Any]]

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__(napari_viewer)
        self.target = self.review = self.current = None
        self.rows = np.empty(0, np.int64)

    def bind_keys(self, mend: Callable[[], Any]) -> None:
        """Let the keys work wherever the panel has the focus."""
        keys: dict[str, Callable[[], Any]] = {
            "N": self.next,
            "B": self.back,
            "Y": self.accept,
            "X": self.reject,
            "U": self.undo,
            "F": mend,
        }
        self.keys = keys | {str(k + 1): (lambda k=k: self.relabel(k)) for k in range(9)}
        for key, method in self.keys.items():
            made = QShortcut(QKeySequence(key), self)
            made.setContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
            made.activated.connect(method)

    # --- going through ---

    def go_to(self, row: int) -> None:
        """Centre the canvas on a detection and highlight it, in table and gallery too."""
        if self.review is None or self.target is None:
            return
        self.current = int(row)
        self.table.go_to(self.current)
        self.gallery.go_to(self.current)
        self.target.look_at(self.current)
        self.tell()

    def next(self) -> None:
        """Go to the next one that is not decided on."""
        self._step(1)

    def back(self) -> None:
        """Go to the one before."""
        self._step(-1)

    def _step(self, by: int) -> None:
        if self.review is None or not len(self.rows):
            return
        found = np.flatnonzero(self.rows == self.current) if self.current is not None else ()
        here = int(found[0]) if len(found) else (-1 if by > 0 else len(self.rows))
        place = self.review.next_unreviewed(self.rows, here) if by > 0 else max(here - 1, 0)
        if place is None:
            self.bar.say("All that are shown are decided on.")
            return
        self.go_to(int(self.rows[place]))

    # --- deciding ---

    def accept(self) -> None:
        """The current or selected ones are right."""
        self._decide(lambda rows: self.review.accept(rows))

    def reject(self) -> None:
        """The current or selected ones are wrong."""
        self._decide(lambda rows: self.review.reject(rows))

    def relabel(self, place: int) -> None:
        """The current or selected ones are of the class with this number."""
        if self.review is not None and place < len(self.review.names):
            self._decide(lambda rows: self.review.relabel(rows, self.review.names[place]))

    def undo(self) -> None:
        """Take the last decision back and go there."""
        if self.review is None:
            return
        rows = self.review.undo()
        if len(rows):
            self.decided()
            self.go_to(int(rows[0]))

    def _decide(self, decide: Callable[[Rows], Rows]) -> None:
        rows = self._meant()
        if self.review is None or not len(rows):
            return
        decide(rows)
        self.decided()
        if len(rows) == 1:
            self._step(1)

    def _meant(self) -> Rows:
        """What a key is about: several that are selected, or else the current one."""
        view = self.gallery if self.tabs.currentWidget() is self.pictures else self.table
        selected = view.selected_rows if self.review is not None else np.empty(0, np.int64)
        if len(selected) > 1 or self.current is None:
            return selected
        return np.array([self.current], np.int64)

    def decided(self, keep: bool = True) -> None:
        """States have changed: show it everywhere, and keep it."""
        self.table.model().changed()
        self.gallery.changed()
        self.filter.update_classes(self.review.names)
        self.target.put_decisions(self.review)
        if keep:
            self.keeper.save_soon()
        if self.filter.chosen.states is not None:
            QTimer.singleShot(0, self.refresh)
        self.tell()

    # --- telling ---

    def tell(self) -> None:
        """How far the review is, and what the current detection is."""
        done, total = self.review.progress(self.in_scope)
        self.progress.setUpdatesEnabled(False)  # else Qt paints all of the window, here and now
        self.progress.setRange(0, max(total, 1))
        self.progress.setValue(done)
        self.progress.setFormat(f"{done:,} of {total:,} reviewed")
        self.progress.setUpdatesEnabled(True)
        self.what.setText(self._sentence())

    def _sentence(self) -> str:
        if self.current is None:
            return ""
        k, found = self.current, self.review.found
        name, state = self.review.class_of(k), self.review.state_of(k)
        return f"No. {k}: <b>{_plain(name)}</b>, confidence {found.scores[k]:.2f}, {state}"


def _plain(text: str) -> str:
    """Safe within a label's rich text."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
