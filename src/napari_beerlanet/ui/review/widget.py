"""The Review panel: go through detections, accept, reject or relabel them, and see what is left."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import Qt, QTimer
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import (
    QLabel,
    QProgressBar,
    QShortcut,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import qdebounced, signals_blocked

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.review.review import Review, RowIndices
from napari_beerlanet.ui.common.controls import (
    button,
    combo_box,
    form,
    hint,
    not_none,
    row,
    size_to_current_page,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.evaluate.annotation_tab import AnnotationComparisonTab
from napari_beerlanet.ui.review.autosave import ReviewAutosave
from napari_beerlanet.ui.review.compare_runs import RunComparison
from napari_beerlanet.ui.review.export import ReviewExport
from napari_beerlanet.ui.review.filter import FilterForm
from napari_beerlanet.ui.review.gallery import CropGallery, GalleryTab, describe_detection
from napari_beerlanet.ui.review.histogram import ReviewHistogram
from napari_beerlanet.ui.review.table import ReviewTable, ReviewTableModel
from napari_beerlanet.ui.review.target import (
    OpenedBoxes,
    ReviewTarget,
    detection_layer_from_boxes,
    opened_boxes,
    review_targets,
)
from napari_beerlanet.ui.viewer.layers import ImagePicker, LayerListWatcher
from napari_beerlanet.ui.viewer.planes import PlaneIndex

if TYPE_CHECKING:
    from napari.viewer import Viewer

_KEYS_HINT = (
    "Keys: N next, B back, Y accept, X reject, U undo, Shift+U redo, 1–9 change {what}, F fix "
    "annotation. They work here and on the canvas."
)
_NUMBER_KEYS = 9
_CLASS, _TYPE = "class", "type"
_NO_DETECTIONS_HINT = (
    "Detect cells first (Plugins › Find cells), or open a file of boxes, to review them here."
)
_PLANE_DEBOUNCE_MS = 120  # until another plane of a stack is reviewed
_MIN_ROWS_TO_PREPARE = 50_000  # whose orders take long to compute


class _LeftReview(NamedTuple):
    """A review while another image is shown, with its undo history; the row that was current."""

    detections: Detections
    review: Review
    current: int | None


class ReviewWidget(Panel):
    """A table and a gallery of all detections, with filters, keys and decisions that are saved.

    The detections are those of the chosen image; choosing those of another image chooses that
    image, too. `rows` (m,) are the rows of `review` that pass the filter, in the order of table and
    gallery; `current` is the row that canvas, table and gallery highlight.
    """

    title = "Review detections"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        self.target: ReviewTarget | None = None
        self.review: Review | None = None
        self.current: int | None = None
        self.rows: RowIndices = np.empty(0, np.int64)
        self.subset: RowIndices | None = None
        self.in_scope: npt.NDArray[np.bool_] | None = None  # passes the filter, in any state
        self.autosave = ReviewAutosave(self)
        self._prepare_task = self.task()
        self._targets: list[ReviewTarget] = []
        self._opened: list[OpenedBoxes] = []
        self._left: WeakKeyDictionary[DetectionLayer, dict[PlaneIndex, _LeftReview]] = (
            WeakKeyDictionary()
        )
        self._build()
        self._bind_keys()
        self._update_targets_soon = qdebounced(
            self._update_targets, timeout=_PLANE_DEBOUNCE_MS, parent=self
        )
        get_session(self.viewer).detections_changed.connect(self._update_targets)
        self._layer_names = LayerListWatcher(self, self._update_targets)
        self.connect_event(self.viewer.dims.events.point, self._plane_moved)
        self.image.chosen.connect(self._image_chosen)
        session = get_session(self.viewer)
        self.connect_event(session.classifier_changed, self._offer_types)
        self.connect_event(session.type_palette.changed, self._show_type_colours)
        self._set_target(None)
        self._update_targets()

    def _build(self) -> None:
        self.image = ImagePicker(self)
        self.target_choice = combo_box(
            "The detection layer, or layer of opened boxes, to review.", 12, expanding=True
        )
        self.target_choice.setPlaceholderText("none of this image")
        self.target_choice.currentIndexChanged.connect(self._choose_target)
        self.empty = hint(_NO_DETECTIONS_HINT)
        self.filter = FilterForm()
        self.filter.changed.connect(self._filter_changed)
        self.progress = QProgressBar()
        self.progress.setToolTip("How many of the listed detections you have reviewed.")
        self.current_line = QLabel()
        self.current_line.setWordWrap(True)
        self.annotation_tab = AnnotationComparisonTab(self)
        self.tabs = self._tabs()
        self.bar = TaskProgressBar(self.autosave.task)
        self.run_comparison = RunComparison(self, self.filter)
        self.export = ReviewExport(self, self.filter, self.annotation_tab)
        self._connect_annotation_tab()
        top = form()
        top.addRow("Image", self.image)
        top.addRow("Detections", self.target_choice)
        self.body.addLayout(top)
        self.empty.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.decision_buttons, self.keys_hint = self._buttons(), hint()
        self.keys_set = combo_box(
            "What the number keys change: the detector's class, or the cell type.", 6
        )
        self.keys_set.addItems([_CLASS, _TYPE])
        self.keys_set.activated.connect(lambda *_: self._keys_chosen())
        self.keys_legend = hint()
        self._keys_by_user = False
        self.keys_row = QWidget()
        keys = QVBoxLayout(self.keys_row)
        keys.setContentsMargins(0, 0, 0, 0)
        keys.setSpacing(2)
        keys.addWidget(row(QLabel("Keys set"), self.keys_set))
        keys.addWidget(self.keys_legend)
        above = (self.filter, self.progress, self.decision_buttons, self.current_line)
        self.body.addWidget(self.empty, 1)
        for widget in above:
            self.body.addWidget(widget)
        self.body.addWidget(self.tabs, 1)
        below = (self.run_comparison, self.export, self.export.bar, self.bar)
        for widget in (self.keys_row, self.keys_hint, *below):
            self.body.addWidget(widget)

    def _tabs(self) -> QTabWidget:
        self.table, self.histogram_tab = ReviewTable(), QWidget()
        QVBoxLayout(self.histogram_tab).setContentsMargins(0, 0, 0, 0)
        self.gallery_tab = GalleryTab(self)
        self.gallery: CropGallery = self.gallery_tab.gallery
        self.table.picked.connect(self.go_to)
        self.table.sort_requested.connect(self.refresh)
        self.filter.order.currentIndexChanged.connect(self.table.reset_sorting)
        self.gallery.picked.connect(self.go_to)
        tabs = QTabWidget()
        for widget, title in (
            (self.table, "Table"),
            (self.gallery_tab, "Gallery"),
            (self.histogram_tab, "Histogram"),
            (self.annotation_tab, "Annotations"),
        ):
            tabs.addTab(widget, title)
        tabs.setMinimumHeight(260)
        size_to_current_page(tabs)
        tabs.currentChanged.connect(self._tab_changed)
        return tabs

    @cached_property
    def histogram(self) -> ReviewHistogram:
        """Made when its tab is first shown: a plot takes as long as the rest of the panel."""
        histogram = ReviewHistogram()
        histogram.range_selected.connect(self.filter.set_range)
        histogram.range_of = self.filter.range_of
        not_none(self.histogram_tab.layout()).addWidget(histogram)
        if self.review is not None and self.target is not None:
            colours = self.target.type_colours(self.review.type_names)
            histogram.set_review(self.review, self.target.colours, colours)
        return histogram

    def _buttons(self) -> QWidget:
        return row(
            button("‹ Back", "Go to the previous detection (B).", self.back),
            button("Next ›", "Go to the next unreviewed detection (N).", self.next),
            button("Accept", "Correct (Y). Applies to all selected detections.", self.accept),
            button("Reject", "Not correct (X). Applies to all selected detections.", self.reject),
            button("Undo", "Undo the last decision (U); Shift+U redoes it.", self.undo),
        )

    def _connect_annotation_tab(self) -> None:
        tab = self.annotation_tab
        tab.threshold_selected.connect(
            lambda threshold: self.filter.set_range("confidence", threshold, 1.0)
        )
        tab.detections_selected.connect(self.show_only)
        tab.detection_selected.connect(self.go_to)
        tab.message.connect(lambda text: self.bar.set_message(text))

    def _bind_keys(self) -> None:
        """Let the keys work wherever the panel has the focus; `_bind_target`: on the canvas."""
        keys: dict[str, Callable[[], Any]] = {
            "N": self.next,
            "B": self.back,
            "Y": self.accept,
            "X": self.reject,
            "U": self.undo,
            "Shift+U": self.redo,
            "F": self.annotation_tab.metrics.request_fix,
        }
        self.keys = keys | {str(k + 1): (lambda k=k: self.relabel(k)) for k in range(_NUMBER_KEYS)}
        for key, method in self.keys.items():
            shortcut = QShortcut(QKeySequence(key), self)
            shortcut.setContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
            shortcut.activated.connect(method)

    # --- what is reviewed ---

    def _update_targets(self, *_: Any) -> None:
        """List the detection layers that exist now, and review those of the chosen image."""
        self._targets, self._opened = review_targets(self.viewer), opened_boxes(self.viewer)
        of_image = (k for k, t in enumerate(self._targets) if t.source is self.image.layer)
        place = next(of_image, -1)
        with signals_blocked(self.target_choice):
            self.target_choice.clear()
            self.target_choice.addItems([target.name for target in self._targets])
            self.target_choice.addItems([boxes.name for boxes in self._opened])
            self.target_choice.setCurrentIndex(place)
        target = self._targets[place] if place >= 0 else None
        self.empty.setText(self._empty_text())
        if not _is_same(target, self.target):
            self._set_target(target)

    def _image_chosen(self, image: object) -> None:
        self.bar.set_message("")  # it was about the last image
        self._update_targets()

    def _plane_moved(self, event: Any = None) -> None:
        """Another plane of a stack has other detections."""
        self._update_targets_soon()

    def _choose_target(self, index: int) -> None:
        """The user wants these detections: their image is chosen, and with it they are."""
        choices: list[ReviewTarget | OpenedBoxes] = [*self._targets, *self._opened]
        if 0 <= index < len(choices):
            chosen = choices[index]
            self.image.pick(chosen.source)
            if isinstance(chosen, OpenedBoxes):
                self._review_opened(chosen)
        self._update_targets()

    def _set_target(self, target: ReviewTarget | None) -> None:
        self._bind_target(None)
        if self.target is not None and self.review is not None:
            planes = self._left.setdefault(self.target.detection_layer, {})
            planes[self.target.plane.index] = _LeftReview(
                self.target.detections, self.review, self.current
            )
        self.target = target
        self.review = self.current = self.subset = self.in_scope = None
        parts = (self.filter, self.progress, self.decision_buttons, self.current_line, self.tabs)
        for widget in (*parts, self.keys_row, self.keys_hint, self.run_comparison, self.export):
            widget.setVisible(target is not None)
        self.empty.setVisible(target is None)
        left = None
        if target is not None:
            left = self._left.get(target.detection_layer, {}).get(target.plane.index)
            if left is not None and left.detections is not target.detections:
                left = None  # they were detected again
            self.review = Review(target.detections) if left is None else left.review
        self.run_comparison.set_target(target)
        self.annotation_tab.set_target(target)
        self.export.set_review(target, self.review)
        if target is None or self.review is None:
            self.gallery_tab.set_review(None, None)
        else:
            self.current = None if left is None else left.current
            self._show_review(target, self.review, left is not None)

    def _empty_text(self) -> str:
        """What to do where there is nothing to review."""
        image = self.image.layer
        if image is None:
            return _NO_DETECTIONS_HINT
        where = " on this plane" if image.ndim > 2 else ""
        others = ", or choose others above" if self._targets or self._opened else ""
        return f"“{image.name}” has no detections{where}: find its cells first{others}."

    def _show_review(self, target: ReviewTarget, review: Review, returned: bool) -> None:
        if len(review) > _MIN_ROWS_TO_PREPARE:
            self._prepare_task.start(lambda report: review.precompute_orders())
        self.table.set_review_model(ReviewTableModel(review, self.table))
        type_colours = target.type_colours(review.type_names)
        self.gallery_tab.set_review(review, target.crop_styles(), target.colours, type_colours)
        if "histogram" in vars(self):
            self.histogram.set_review(review, target.colours, type_colours)
        self._offer_types()
        self._bind_target(target)
        # What this panel has saved itself is not of an earlier session.
        loaded = (lambda _: self._decisions_loaded(0)) if returned else self._decisions_loaded
        self.autosave.load(target, review, loaded)
        self.filter.set_review(review, target.confidence)

    def _review_opened(self, opened: OpenedBoxes) -> None:
        """Review boxes that were opened from a file."""
        try:
            detection_layer_from_boxes(self.viewer, opened)
        except ValueError as error:
            self.bar.set_message(notify_error(error))

    def _bind_target(self, target: ReviewTarget | None) -> None:
        """Let the keys work on the canvas, too."""
        if self.target is not None:
            self.target.detection_layer.changed.disconnect(self._canvas_edited, missing_ok=True)
            self.target.unbind()
        if target is not None:
            target.bind(self.keys, self.go_to)
            target.detection_layer.changed.connect(self._canvas_edited)

    def _canvas_edited(self) -> None:
        """Save what the user draws, moves, deletes or relabels there."""
        self.autosave.save_soon()

    def _decisions_loaded(self, count: int) -> None:
        """Decisions of an earlier session were loaded."""
        if count:
            self.bar.set_message(f"{count:,} decisions of an earlier session loaded.")
        if self.review is not None and self.review.status.any():
            self._decisions_changed(save=False)
            self.refresh()

    # --- what the number keys set ---

    @property
    def keys_set_types(self) -> bool:
        """Whether number keys change the cell type."""
        return self.keys_set.currentText() == _TYPE

    def _offer_types(self, event: Any = None) -> None:
        """Offer the types that boxes have or, without any, those of the loaded classifier.

        Where a classifier has given types, the keys are for these, until the user decides.
        """
        review = self.review
        if review is None:
            return
        if not self._keys_by_user:
            self.keys_set.setCurrentText(_TYPE if review.detections.types else _CLASS)
        self._show_keys()

    @property
    def key_names(self) -> list[str]:
        """The classes or types of the number keys, in their order."""
        if self.review is None:
            return []
        if not self.keys_set_types:
            return self.review.names
        classifier = get_session(self.viewer).classifier
        known = classifier.classes if classifier is not None else []
        return list(dict.fromkeys([*self.review.type_names, *known]))

    def _keys_chosen(self) -> None:
        self._keys_by_user = True
        self._show_keys()

    def _show_keys(self) -> None:
        names = self.key_names
        legend = ", ".join(
            f"{k + 1}\N{NO-BREAK SPACE}{name}" for k, name in enumerate(names[:_NUMBER_KEYS])
        )
        none = "No types yet: classify the cells, or load a classifier (tab “Classify”)."
        self.keys_legend.setText(legend or (none if self.keys_set_types else ""))
        self.keys_hint.setText(_KEYS_HINT.format(what=self.keys_set.currentText()))

    def _show_type_colours(self, event: Any = None) -> None:
        """A type has got another colour, or there is another type."""
        if self.review is not None and self.target is not None:
            self.gallery.set_type_colours(self.target.type_colours(self.review.type_names))
            self.gallery.update_cells()

    # --- what is listed ---

    def refresh(self) -> None:
        """Apply filter and order to table, gallery and canvas."""
        if self.review is None or self.target is None:
            return
        criteria = self.filter.current_filter
        self.in_scope = self.review.mask(replace(criteria, states=None))
        mask = self.in_scope & self.review.in_states(criteria.states)
        threshold = criteria.ranges["confidence"][0]
        if self.subset is not None:
            mask = np.isin(np.arange(len(mask)), self.subset)
        rows = self.review.ordered(mask, self.filter.current_order, threshold)
        self.rows = self.table.apply_sorting(rows)
        self._fill_tab()
        if not self.annotation_tab.on_canvas:
            self.target.set_filter(mask)
        self.annotation_tab.set_threshold(threshold)
        self.run_comparison.update_confidence()
        self._show_progress()

    def show_only(self, rows: RowIndices | None) -> None:
        """List these rows whatever the filter is, None for all again."""
        self.subset = rows
        self.refresh()

    def _filter_changed(self) -> None:
        self.subset = None
        self.refresh()

    def _tab_changed(self, _: int) -> None:
        if self.review is None:
            return
        was_compared = self.annotation_tab.on_canvas
        self.annotation_tab.set_active(self.tabs.currentWidget() is self.annotation_tab)
        if was_compared and not self.annotation_tab.on_canvas:
            self.refresh()  # the detections are visible again
        self._fill_tab()

    def _fill_tab(self) -> None:
        """Fill the visible tab; the others wait until they are."""
        tab = self.tabs.currentWidget()
        if tab is self.histogram_tab:
            self.histogram.sync_range()
        elif tab is self.table:
            self._fill_view(self.table)
        elif tab is self.gallery_tab:
            self._fill_view(self.gallery)

    def _fill_view(self, view: ReviewTable | CropGallery) -> None:
        if view.rows is not self.rows:
            view.show_rows(self.rows)
            if self.current is not None:
                view.go_to(self.current)

    # --- going through ---

    def go_to(self, row: int) -> None:
        """Bring a detection into sight and highlight it, in table and gallery too."""
        if self.review is None or self.target is None:
            return
        self.current = int(row)
        self.table.go_to(self.current)
        self.gallery.go_to(self.current)
        self.target.show_detection(self.current)
        self._show_progress()

    def next(self) -> None:
        """Go to the next unreviewed detection."""
        self._step(1)

    def back(self) -> None:
        """Go to the previous detection."""
        self._step(-1)

    def _step(self, by: int) -> None:
        if self.review is None or not len(self.rows):
            return
        current = -1 if self.current is None else self.current
        at = np.flatnonzero(self.rows == current)
        here = int(at[0]) if len(at) else (-1 if by > 0 else len(self.rows))
        place = self.review.next_unreviewed(self.rows, here) if by > 0 else max(here - 1, 0)
        if place is None:
            self.bar.set_message("All listed detections are reviewed.")
            return
        self.go_to(int(self.rows[place]))

    # --- deciding ---

    def accept(self) -> None:
        """Accept the current or selected detections."""
        self._decide(lambda review, rows: review.accept(rows))

    def reject(self) -> None:
        """Reject the current or selected detections."""
        self._decide(lambda review, rows: review.reject(rows))

    def relabel(self, label: int) -> None:
        """Give the current or selected detections the class or type of this key, from 0."""
        names = self.key_names
        if label >= len(names):
            return
        name = names[label]
        if self.keys_set_types:
            self._decide(lambda review, rows: review.relabel_type(rows, name))
        else:
            self._decide(lambda review, rows: review.relabel(rows, name))

    def undo(self) -> None:
        """Undo the last decision and go there."""
        if self.review is not None:
            self._show_changed(self.review.undo())

    def redo(self) -> None:
        """Redo the decision that was undone last, and go there."""
        if self.review is not None:
            self._show_changed(self.review.redo())

    def _show_changed(self, rows: RowIndices) -> None:
        if len(rows):
            self._decisions_changed()
            self.go_to(int(rows[0]))

    def _decide(self, decide: Callable[[Review, RowIndices], RowIndices]) -> None:
        rows = self._affected_rows()
        if self.review is None or not len(rows):
            return
        decide(self.review, rows)
        self._decisions_changed()
        if len(rows) == 1:
            self._step(1)

    def _affected_rows(self) -> RowIndices:
        """What a key applies to: several selected rows, or else the current one."""
        in_gallery = self.tabs.currentWidget() is self.gallery_tab
        selected = self.gallery.selected_rows if in_gallery else self.table.selected_rows
        if self.review is None:
            return np.empty(0, np.int64)
        if len(selected) > 1 or self.current is None:
            return selected
        return np.array([self.current], np.int64)

    def _decisions_changed(self, save: bool = True) -> None:
        """Show the new states and classes everywhere, and save them."""
        if self.review is None or self.target is None:
            return
        self.table.update_cells()
        self.gallery.update_cells()
        self.filter.update_classes(self.review.names)
        self.filter.update_types(self.review.type_names)
        self._show_type_colours()
        self._show_keys()
        self.target.write_decisions(self.review)
        if save:
            self.autosave.save_soon()
        criteria = self.filter.current_filter
        if criteria.states is not None or criteria.types is not None:
            QTimer.singleShot(0, self.refresh)
        self._show_progress()

    def _show_progress(self) -> None:
        """Show how many are reviewed, and the current detection."""
        if self.review is None:
            return
        done, total = self.review.progress(self.in_scope)
        self.progress.setUpdatesEnabled(False)  # else Qt repaints the whole window at once
        self.progress.setRange(0, max(total, 1))
        self.progress.setValue(done)
        self.progress.setFormat(f"{done:,} of {total:,} reviewed")
        self.progress.setUpdatesEnabled(True)
        self.current_line.setText(_describe(self.review, self.current))

    def on_closed(self) -> None:
        """Save what is unsaved, and restore the canvas."""
        get_session(self.viewer).detections_changed.disconnect(self._update_targets)
        self._bind_target(None)
        self.annotation_tab.clear()
        self.autosave.save_now()


def _is_same(target: ReviewTarget | None, other: ReviewTarget | None) -> bool:
    """Whether both are the same detections of the same layer, or there are none."""
    if target is None or other is None:
        return target is other
    return target.has_same_layer(other) and target.detections is other.detections


def _describe(review: Review, row: int | None) -> str:
    """Rich text on a detection: number, class, confidence, type and state."""
    if row is None:
        return ""
    name = review.class_of(row)
    rest = describe_detection(review, row).removeprefix(name)
    return f"No. {row}: <b>{html.escape(name)}</b>{html.escape(rest)}"
