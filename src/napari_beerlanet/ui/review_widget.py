"""The review panel: go through detections, decide, and see what is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QComboBox, QLabel, QProgressBar, QTabWidget

from napari_beerlanet.core.reviewing import Review
from napari_beerlanet.ui.against import Against
from napari_beerlanet.ui.controls import button, form, hint, row
from napari_beerlanet.ui.notices import complain
from napari_beerlanet.ui.review_actions import KEYS_HINT, ReviewActions, Rows
from napari_beerlanet.ui.review_before import ReviewBefore
from napari_beerlanet.ui.review_filter import ReviewFilter
from napari_beerlanet.ui.review_gallery import ReviewGallery
from napari_beerlanet.ui.review_histogram import ReviewHistogram
from napari_beerlanet.ui.review_import import Opened, opened_boxes, take_for_review
from napari_beerlanet.ui.review_keeper import ReviewKeeper
from napari_beerlanet.ui.review_out import ReviewOut
from napari_beerlanet.ui.review_table import ReviewModel, ReviewTable
from napari_beerlanet.ui.review_target import ReviewTarget, targets
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.session import session

_EMPTY = (
    "Find cells first (Plugins › Find cells), or open a file of boxes; what was found is then "
    "reviewed here."
)
_PAUSE = 120  # milliseconds until another plane of a stack is reviewed
_MANY = 50_000  # detections whose orders take long to find


class ReviewWidget(ReviewActions):
    """A table and a gallery of all detections, with filters, keys and decisions that are kept."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__(napari_viewer)
        self.subset: Rows | None = None
        self.in_scope: npt.NDArray[np.bool_] | None = None  # what passes the filter, in any state
        self.keeper = ReviewKeeper(self)
        self._preparing = self.task()
        self._build()
        self.bind_keys(lambda: self.against.panel.ask_to_mend())
        session(self.viewer).detected.connect(self._look_for_targets)
        self.listen(self.viewer.layers.events.removed, self._look_for_targets)
        self.listen(self.viewer.layers.events.inserted, self._look_for_targets)
        self._plane = QTimer(self)
        self._plane.setSingleShot(True)
        self._plane.setInterval(_PAUSE)
        self._plane.timeout.connect(self._look_for_targets)
        self.listen(self.viewer.dims.events.point, self._plane_moved)
        self._look_for_targets()

    def _build(self) -> None:
        self.choice = QComboBox()
        self.choice.setToolTip("The layer of detections, or of boxes from a file, to go through.")
        self.choice.currentIndexChanged.connect(self._choose)
        self.empty = hint(_EMPTY)
        self.filter = ReviewFilter()
        self.filter.changed.connect(self._filter_changed)
        self.progress = QProgressBar()
        self.progress.setToolTip("How many of the shown detections you have decided on.")
        self.what = QLabel()
        self.what.setWordWrap(True)
        self.against = Against(self)
        self.tabs = self._tabs()
        self.bar = RunBar(self.keeper.task)
        self.before, self.out = ReviewBefore(self), ReviewOut(self)
        chosen = form()
        chosen.addRow("Detections", self.choice)
        self.body.addLayout(chosen)
        for widget in (self.empty, self.filter, self.progress, self._buttons(), self.what):
            self.body.addWidget(widget)
        self.body.addWidget(self.tabs, 1)
        for widget in (hint(KEYS_HINT), self.before, self.out, self.out.bar, self.bar):
            self.body.addWidget(widget)

    def _tabs(self) -> QTabWidget:
        self.table, self.pictures, self.histogram = (
            ReviewTable(),
            ReviewGallery(self),
            ReviewHistogram(),
        )
        self.gallery = self.pictures.gallery
        self.table.picked.connect(self.go_to)
        self.table.sorted.connect(self.refresh)
        self.filter.order.currentIndexChanged.connect(self.table.unsort)
        self.gallery.picked.connect(self.go_to)
        self.histogram.brushed.connect(self.filter.choose_range)
        self.histogram.range_of = self.filter.range_of
        tabs = QTabWidget()
        for widget, title in (
            (self.table, "Table"),
            (self.pictures, "Gallery"),
            (self.histogram, "Histogram"),
            (self.against.scroll, "Annotations"),
        ):
            tabs.addTab(widget, title)
        tabs.setMinimumHeight(260)
        tabs.currentChanged.connect(self._tab_changed)
        return tabs

    def _buttons(self) -> Any:
        return row(
            button("‹ Back", "Go to the one before (B).", self.back),
            button("Next ›", "Go to the next one to decide on (N).", self.next),
            button("Accept", "It is right (Y). In the gallery: all selected ones.", self.accept),
            button("Reject", "It is wrong (X). In the gallery: all selected ones.", self.reject),
            button("Undo", "Take the last decision back (U).", self.undo),
        )

    # --- what is reviewed ---

    def _look_for_targets(self, *_: Any) -> None:
        """Offer the layers of detections that there are."""
        self._targets, self._opened = targets(self.viewer), opened_boxes(self.viewer)
        was = self.choice.blockSignals(True)
        self.choice.clear()
        self.choice.addItems([choice.name for choice in (*self._targets, *self._opened)])
        kept = next(
            (k for k, t in enumerate(self._targets) if self.target and t.same(self.target)), None
        )
        self.choice.setCurrentIndex(len(self._targets) - 1 if kept is None else kept)
        self.choice.blockSignals(was)
        if kept is None or self._targets[kept].found is not self.target.found:
            self._choose(self.choice.currentIndex())

    def _plane_moved(self, event: Any = None) -> None:
        """Another plane of a stack has other detections."""
        self._plane.start()

    def _take(self, opened: Opened) -> None:
        """Review boxes that were opened from a file."""
        try:
            take_for_review(self.viewer, opened)
        except ValueError as error:
            self.bar.say(complain(error))

    def _choose(self, place: int) -> None:
        if len(self._targets) <= place < len(self._targets) + len(self._opened):
            self._take(self._opened[place - len(self._targets)])
            return
        self._bind(None)
        self.target = self._targets[place] if 0 <= place < len(self._targets) else None
        there = self.target is not None
        for widget in (self.filter, self.progress, self.tabs, self.what, self.before, self.out):
            widget.setVisible(there)
        self.before.offer()
        self.empty.setVisible(not there)
        self.review = self.current = self.subset = self.in_scope = None
        self.against.use(self.target)
        if self.target is None:
            self.pictures.use(None, None)
            return
        self.review = review = Review(self.target.found)
        if len(review) > _MANY:
            self._preparing.start(lambda report: review.prepare())
        self.table.use(ReviewModel(self.review, self.table))
        self.pictures.use(self.review, self.target.looks())
        self.histogram.use(self.review, self.target.colours)
        self._bind(self.target)
        self.keeper.load(self.target, self.review, self._loaded)
        self.filter.use(self.review, self.target.confidence)

    def _loaded(self, count: int) -> None:
        """Earlier decisions have come back from disk."""
        if count:
            self.bar.say(f"{count:,} decisions of an earlier session are back.")
        if self.review is not None and self.review.status.any():
            self.decided(keep=False)
            self.refresh()

    # --- what is shown ---

    def refresh(self) -> None:
        """Apply filter and order to table, gallery and canvas."""
        if self.review is None or self.target is None:
            return
        chosen = self.filter.chosen
        self.in_scope = self.review.mask(replace(chosen, states=None))
        mask = self.in_scope & self.review.in_states(chosen.states)
        threshold = chosen.ranges["confidence"][0]
        if self.subset is not None:
            mask = np.isin(np.arange(len(mask)), self.subset)
        rows = self.review.ordered(mask, self.filter.chosen_order, threshold)
        self.rows = self.table.arranged(rows)
        self._fill_tab()
        if not self.against.on_canvas:
            self.target.show(mask)
        self.against.judge(threshold)
        self.before.follow()
        self.tell()

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
        was_compared = self.against.on_canvas
        self.against.set_active(self.tabs.currentWidget() is self.against.scroll)
        if was_compared and not self.against.on_canvas:
            self.refresh()  # the detections are seen again
        self._fill_tab()

    def _fill_tab(self) -> None:
        """Fill the tab that is seen; the others wait until they are."""
        tab = self.tabs.currentWidget()
        view = {self.table: self.table, self.pictures: self.gallery}.get(tab)
        if tab is self.histogram:
            self.histogram.follow()
        if view is not None and view.rows is not self.rows:
            view.show_rows(self.rows)
            if self.current is not None:
                view.go_to(self.current)

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
