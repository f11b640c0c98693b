"""The review panel: go through detections, decide, and see what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import Qt, QTimer
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import QComboBox, QLabel, QProgressBar, QShortcut, QTabWidget

from napari_beerlanet.core.reviewing import Review
from napari_beerlanet.ui.against import Against
from napari_beerlanet.ui.controls import button, form, hint, row
from napari_beerlanet.ui.crops_gallery import CropsGallery, CropsModel
from napari_beerlanet.ui.panel import Panel
from napari_beerlanet.ui.review_before import ReviewBefore
from napari_beerlanet.ui.review_filter import ReviewFilter
from napari_beerlanet.ui.review_histogram import ReviewHistogram
from napari_beerlanet.ui.review_keeper import ReviewKeeper
from napari_beerlanet.ui.review_out import ReviewOut
from napari_beerlanet.ui.review_table import ReviewModel, ReviewTable
from napari_beerlanet.ui.review_target import ReviewTarget, targets
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.session import session

Rows = npt.NDArray[np.int64]

_EMPTY = "Find cells first (Plugins › Find cells); what was found is then reviewed here."
_KEYS = (
    "Keys: N next, B back, Y accept, X reject, U take back, 1–9 another class, F mend. "
    "They work here and on the canvas."
)


class ReviewWidget(Panel):
    """A table and a gallery of all detections, with filters, keys and decisions that are kept."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__(napari_viewer)
        self.target: ReviewTarget | None = None
        self.review: Review | None = None
        self.rows: Rows = np.empty(0, np.int64)
        self.current: int | None = None
        self.subset: Rows | None = None
        self.model: ReviewModel | None = None
        self.crops: CropsModel | None = None
        self._cutting = self.task()
        self.keeper = ReviewKeeper(self)
        self._build()
        self._keys()
        session(self.viewer).detected.connect(self._look_for_targets)
        self.listen(self.viewer.layers.events.removed, self._look_for_targets)
        self.listen(self.viewer.layers.events.inserted, self._look_for_targets)
        self._look_for_targets()

    def _build(self) -> None:
        self.choice = QComboBox()
        self.choice.setToolTip("The layer of detections to go through.")
        self.choice.currentIndexChanged.connect(self._choose)
        self.empty = hint(_EMPTY)
        self.filter = ReviewFilter()
        self.filter.changed.connect(self._filter_changed)
        self.progress = QProgressBar()
        self.progress.setToolTip("How many of the shown detections you have decided on.")
        self.what = QLabel()
        self.what.setWordWrap(True)
        self.table, self.gallery, self.histogram = ReviewTable(), CropsGallery(), ReviewHistogram()
        self.table.picked.connect(self.go_to)
        self.gallery.picked.connect(self.go_to)
        self.histogram.brushed.connect(self.filter.choose_range)
        self.tabs = QTabWidget()
        self.tabs.addTab(self.table, "Table")
        self.tabs.addTab(self.gallery, "Gallery")
        self.tabs.addTab(self.histogram, "Histogram")
        self.against = Against(self)
        self.tabs.addTab(self.against.scroll, "Annotations")
        self.tabs.setMinimumHeight(260)
        self.tabs.currentChanged.connect(self._tab_changed)
        self.bar = RunBar(self.keeper.task)
        chosen = form()
        chosen.addRow("Detections", self.choice)
        self.body.addLayout(chosen)
        for widget in (self.empty, self.filter, self.progress, self._buttons(), self.what):
            self.body.addWidget(widget)
        self.body.addWidget(self.tabs, 1)
        self.body.addWidget(hint(_KEYS))
        self.before = ReviewBefore(self)
        self.out = ReviewOut(self)
        self.body.addWidget(self.before)
        self.body.addWidget(self.out)
        self.body.addWidget(self.out.bar)
        self.body.addWidget(self.bar)

    def _buttons(self) -> Any:
        return row(
            button("‹ Back", "Go to the one before (B).", self.back),
            button("Next ›", "Go to the next one to decide on (N).", self.next),
            button("Accept", "It is right (Y). In the gallery: all selected ones.", self.accept),
            button("Reject", "It is wrong (X). In the gallery: all selected ones.", self.reject),
            button("Undo", "Take the last decision back (U).", self.undo),
        )

    def _keys(self) -> None:
        keys: dict[str, Callable[[], Any]] = {
            "N": self.next,
            "B": self.back,
            "Y": self.accept,
            "X": self.reject,
            "U": self.undo,
            "F": lambda: self.against.panel.ask_to_mend(),
        }
        keys |= {str(k + 1): (lambda k=k: self.relabel(k)) for k in range(9)}
        self.keys = keys
        for key, method in keys.items():
            made = QShortcut(QKeySequence(key), self)
            made.setContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
            made.activated.connect(method)

    # --- what is reviewed ---

    def _look_for_targets(self, *_: Any) -> None:
        """Offer the layers of detections that there are."""
        self._targets = targets(self.viewer)
        was = self.choice.blockSignals(True)
        self.choice.clear()
        self.choice.addItems([target.name for target in self._targets])
        kept = next(
            (k for k, t in enumerate(self._targets) if self.target and t.same(self.target)), None
        )
        self.choice.setCurrentIndex(len(self._targets) - 1 if kept is None else kept)
        self.choice.blockSignals(was)
        if kept is None or self._targets[kept].found is not self.target.found:
            self._choose(self.choice.currentIndex())

    def _choose(self, place: int) -> None:
        self._bind(None)
        self.target = self._targets[place] if 0 <= place < len(self._targets) else None
        there = self.target is not None
        for widget in (self.filter, self.progress, self.tabs, self.what, self.before, self.out):
            widget.setVisible(there)
        self.before.offer()
        self.empty.setVisible(not there)
        self.review = self.model = self.crops = self.current = self.subset = None
        self.against.use(self.target)
        if self.target is None:
            return
        self.review = Review(self.target.found)
        self.model = ReviewModel(self.review, self)
        self.crops = CropsModel(self.review, self.target.cut_out(), self._cutting, self)
        self.table.use(self.model)
        self.gallery.use(self.crops)
        self.histogram.use(self.review, self.target.colours)
        self._bind(self.target)
        self.keeper.load(self.target, self.review, self._loaded)
        self.filter.use(self.review, self.target.confidence)

    def _loaded(self, count: int) -> None:
        """Earlier decisions have come back from disk."""
        if count:
            self.bar.say(f"{count:,} decisions of an earlier session are back.")
        self._decided(keep=False)
        self.refresh()

    # --- what is shown ---

    def refresh(self) -> None:
        """Apply filter and order to table, gallery and canvas."""
        if self.review is None or self.target is None:
            return
        chosen = self.filter.chosen
        mask = self.review.mask(chosen)
        threshold = chosen.ranges["confidence"][0]
        if self.subset is not None:
            mask = np.isin(np.arange(len(mask)), self.subset)
        self.rows = self.review.ordered(mask, self.filter.chosen_order, threshold)
        self._fill_tab()
        self.target.show(mask)
        self.against.judge(threshold)
        self._tell()

    def show_only(self, rows: Rows | None) -> None:
        """Show these rows whatever the filter says, None for all again."""
        self.subset = rows
        self.refresh()

    def _filter_changed(self) -> None:
        self.subset = None
        self.refresh()

    def _tab_changed(self, _: int) -> None:
        if self.review is None:
            return
        self._fill_tab()
        self.against.set_active(self.tabs.currentWidget() is self.against.scroll)

    def _fill_tab(self) -> None:
        if self.tabs.currentWidget() is self.table:
            self.table.show_rows(self.rows)
        elif self.tabs.currentWidget() is self.gallery:
            self.crops.show(self.rows)

    @property
    def shown(self) -> Rows:
        """The rows in the order in which they are stepped through."""
        on_table = self.tabs.currentWidget() is self.table and self.model is not None
        return self.model.rows if on_table else self.rows

    def go_to(self, row: int) -> None:
        """Centre the canvas on a detection and highlight it."""
        if self.review is None or self.target is None:
            return
        self.current = int(row)
        self.table.go_to(self.current)
        self.target.look_at(self.current)
        self._tell()

    def next(self) -> None:
        """Go to the next one that is not decided on."""
        self._step(1)

    def back(self) -> None:
        """Go to the one before."""
        self._step(-1)

    def _step(self, by: int) -> None:
        if self.review is None or not len(self.shown):
            return
        found = np.flatnonzero(self.shown == self.current) if self.current is not None else ()
        here = int(found[0]) if len(found) else (-1 if by > 0 else len(self.shown))
        place = self.review.next_unreviewed(self.shown, here) if by > 0 else max(here - 1, 0)
        if place is None:
            self.bar.say("All that are shown are decided on.")
            return
        self.go_to(int(self.shown[place]))

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
            self._decided()
            self.go_to(int(rows[0]))

    def _decide(self, decide: Callable[[Rows], Rows]) -> None:
        rows = self._meant()
        if self.review is None or not len(rows):
            return
        decide(rows)
        self._decided()
        if len(rows) == 1:
            self._step(1)

    def _meant(self) -> Rows:
        """What a key is about: several that are selected, or else the current one."""
        view = self.gallery if self.tabs.currentWidget() is self.gallery else self.table
        selected = view.selected_rows if self.review is not None else np.empty(0, np.int64)
        if len(selected) > 1 or self.current is None:
            return selected
        return np.array([self.current], np.int64)

    def _decided(self, keep: bool = True) -> None:
        """States have changed: show it everywhere, and keep it."""
        self.model.changed()
        self.crops.changed()
        self.filter.update_classes(self.review.names)
        self.target.put_decisions(self.review)
        if keep:
            self.keeper.save_soon()
        if self.filter.chosen.states is not None:
            QTimer.singleShot(0, self.refresh)
        self._tell()

    def _tell(self) -> None:
        done, total = self.review.progress(self.review.mask(self.filter.chosen))
        self.progress.setRange(0, max(total, 1))
        self.progress.setValue(done)
        self.progress.setFormat(f"{done:,} of {total:,} reviewed")
        self.what.setText(self._sentence())

    def _sentence(self) -> str:
        if self.current is None:
            return ""
        k, found = self.current, self.review.found
        name, state = self.review.column("class")[k], self.review.column("status")[k]
        return f"No. {k}: <b>{_plain(name)}</b>, confidence {found.scores[k]:.2f}, {state}"

    # --- keys and clicks on the canvas ---

    def _bind(self, target: ReviewTarget | None) -> None:
        if self.target is not None:
            self.target.unbind()
        if target is not None:
            target.bind(self.keys, self.go_to)

    def ended(self) -> None:
        """Keep what is not kept yet, and give the canvas its keys back."""
        session(self.viewer).detected.disconnect(self._look_for_targets)
        self._bind(None)
        self.against.close()
        self.keeper.save_now()


def _plain(text: str) -> str:
    """Safe within a label's rich text."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
