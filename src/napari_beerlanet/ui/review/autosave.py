"""Save review decisions to disk within seconds, and load them again with the same image."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
from qtpy.QtCore import QTimer
from superqt.utils import qdebounced

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.messages import error_message
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.common.storage import FileError, pixel_hash
from napari_beerlanet.core.review.review import (
    BoxEdit,
    Review,
    carry_over_decisions,
    load_edits,
    load_review,
    save_review,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.recent import user_data_folder
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.review.target import ReviewTarget

_AUTOSAVE_DELAY_MS, _RETRY_DELAY_MS = 1500, 5000
_KEY_DIGITS = 32  # of an image's hash, in the names of files


def reviews_folder() -> Path:
    """Where reviews are saved, one file for each image's content."""
    return user_data_folder() / "reviews"


class _SavedReview(NamedTuple):
    """The file to write, what was in it, of how many boxes, and what was wrong with a file."""

    path: Path
    review: Review | None = None
    box_count: int = 0
    edits: Sequence[BoxEdit] = ()
    problem: str | None = None


def _find_saved_review(folder: Path, key: str, detections: Detections) -> _SavedReview:
    """The first file of an image that is readable or does not exist yet; none is overwritten."""
    problem = None
    for name in (f"{key}.json", *(f"{key}-{k}.json" for k in range(2, 100))):
        path = folder / name
        if not path.exists():
            return _SavedReview(path, problem=problem)
        try:
            review, count = load_review(path, detections)
            return _SavedReview(path, review, count, load_edits(path), problem)
        except FileError as error:
            problem = str(error)
    raise FileError(f"{folder}: all reviews of this image are unreadable; delete some of them.")


class _PendingSaves:
    """Copies of reviews that are to be written, the newest for each file, by any thread.

    What cannot be written stays; `errors` has the first failure of each file.
    """

    def __init__(self) -> None:
        self.errors: SimpleQueue[str] = SimpleQueue()
        self.reviews: dict[Path, tuple[Review, str, list[BoxEdit]]] = {}
        self._failing: set[Path] = set()
        self._writing = threading.Lock()

    def add(self, path: Path, review: Review, name: str, edits: list[BoxEdit]) -> None:
        """Have a review written as it is now; `name` is its image's."""
        unchanging = copy.copy(review)
        unchanging.status, unchanging.labels = review.status.copy(), review.labels.copy()
        unchanging.names, unchanging.type_names = list(review.names), list(review.type_names)
        unchanging.type_labels = review.type_labels.copy()
        self.reviews[path] = unchanging, name, edits

    def write(self) -> None:
        """All of them are on disk when this returns, but for those that fail."""
        with self._writing:
            for path, (review, name, edits) in list(self.reviews.items()):
                try:
                    if edits or review.status.any() or path.exists():
                        save_review(path, review, name, edits)
                except (OSError, FileError) as error:
                    if path not in self._failing:
                        self._failing.add(path)
                        self.errors.put(f"{error_message(error)} Retrying every few seconds.")
                else:
                    self._failing.discard(path)
                    if self.reviews[path][0] is review:  # there may be a newer one
                        del self.reviews[path]


_pending = _PendingSaves()  # of all panels: what one could not write before it closed is kept


class ReviewAutosave:
    """Reads and writes the review of one image at a time, off the GUI thread."""

    def __init__(self, panel: Panel) -> None:
        self.task, self._save_task = panel.task(), panel.task()
        for task in (self.task, self._save_task):
            task.ended.connect(self._written)
        self._retry = QTimer(panel)
        self._retry.setSingleShot(True)
        self._retry.timeout.connect(self._write)
        self._review: Review | None = None
        self._target: ReviewTarget | None = None
        self._path: Path | None = None
        self._unsaved = False
        self._left_unsaved: WeakSet[Review] = WeakSet()  # left before their file was known
        self._save_debounced = qdebounced(self._save, timeout=_AUTOSAVE_DELAY_MS, parent=panel)

    @property
    def path(self) -> Path | None:
        """The file of the current image, None until its pixels were read."""
        return self._path

    def load(self, target: ReviewTarget, review: Review, loaded: Callable[[int], None]) -> None:
        """Load earlier decisions on this image into the review, then call `loaded(count)`."""
        self._save_debounced.cancel()
        if self._take_unsaved():
            self._write()
        elif self._unsaved and self._review is not None:
            self._left_unsaved.add(self._review)
        self._unsaved = False
        self._review, self._target, self._path = review, target, None
        read_pixels, folder = target.read_fingerprint_pixels, reviews_folder()

        def work(report: Report) -> _SavedReview:
            _pending.write()  # what is read next may be among them
            key = pixel_hash(read_pixels())[:_KEY_DIGITS]
            saved = _find_saved_review(folder, key, review.detections)
            if saved.path not in _pending.reviews:
                return saved
            unwritten, _, edits = _pending.reviews[saved.path]
            newer = Review(review.detections)
            return _SavedReview(saved.path, newer, carry_over_decisions(unwritten, newer), edits)

        self.task.start(work, lambda saved: self._apply(review, saved, loaded), notify_error)

    def _apply(self, review: Review, saved: _SavedReview, loaded: Callable[[int], None]) -> None:
        if review is not self._review:
            return
        self._path, earlier = saved.path, saved.review
        if saved.problem is not None:
            notify_error(f"{saved.problem} Your decisions are saved in {saved.path.name} now.")
        if earlier is not None:
            review.names[:] = earlier.names
            types = np.array([*map(review.type_index, earlier.type_names), -1], np.int64)
            new = review.status == 0  # without a decision made while the file was read
            review.status[new], review.labels[new] = earlier.status[new], earlier.labels[new]
            review.type_labels[new] = types[earlier.type_labels[new]]
        if self._target is not None:
            self._target.restore_edits(saved.edits)
        loaded(saved.box_count + len(saved.edits))
        if review in self._left_unsaved:
            self._left_unsaved.discard(review)
            self.save_soon()

    def save_soon(self) -> None:
        """Save when no further decision has been made for a moment."""
        self._unsaved = True
        self._save_debounced()

    def save_now(self) -> None:
        """Save what is unsaved in the GUI thread: the panel is about to be closed."""
        self._save_debounced.cancel()
        self._retry.stop()
        self._take_unsaved()
        _pending.write()
        self._tell_errors()

    def _save(self) -> None:
        if self._take_unsaved():
            self._write()
        elif self._unsaved and self._review is not None:  # the image is still being read
            self._save_debounced()

    def _write(self) -> None:
        self._save_task.start(lambda report: _pending.write())

    def _take_unsaved(self) -> bool:
        """Have what is unsaved written, if it is known where; whether there was something."""
        target = self._target
        if not self._unsaved or self._review is None or self._path is None or target is None:
            return False
        self._unsaved = False
        _pending.add(self._path, self._review, target.name, target.edits())
        return True

    def _written(self, outcome: object = None) -> None:
        self._tell_errors()
        if _pending.reviews and outcome is not TaskOutcome.CANCELLED:
            self._retry.start(_RETRY_DELAY_MS)

    def _tell_errors(self) -> None:
        while True:
            try:
                notify_error(_pending.errors.get_nowait())
            except Empty:
                return
