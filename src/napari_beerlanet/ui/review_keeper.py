"""Decisions go to disk within seconds of being made, and come back with the image."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_data_path
from qtpy.QtCore import QTimer

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.files import FileError
from napari_beerlanet.core.progress import Report
from napari_beerlanet.core.reviewfiles import image_key, load_review, save_review
from napari_beerlanet.core.reviewing import Review
from napari_beerlanet.ui.notices import complain

_AFTER = 1500  # milliseconds


def folder() -> Path:
    """Where reviews are kept, one file for each image's content."""
    own = os.environ.get("NAPARI_BEERLANET_CONFIG")
    base = Path(own) if own else user_data_path("napari-beerlanet", appauthor=False)
    return base / "reviews"


class _Kept(NamedTuple):
    """Where to write, what was there, of how many boxes, and what was wrong with a file."""

    path: Path
    review: Review | None = None
    count: int = 0
    problem: str | None = None


def _look_up(where: Path, key: str, found: Detections) -> _Kept:
    """The first file of an image that can be read or is not there yet; none is ever replaced."""
    problem = None
    for name in (f"{key}.json", *(f"{key}-{k}.json" for k in range(2, 100))):
        path = where / name
        if not path.exists():
            return _Kept(path, problem=problem)
        try:
            return _Kept(path, *load_review(path, found), problem=problem)
        except FileError as error:
            problem = str(error)
    raise FileError(f"{where}: all reviews of this image are unreadable; remove some.")


class ReviewKeeper:
    """Reads and writes the review of one image at a time, off the GUI thread."""

    def __init__(self, panel: Any) -> None:
        self.task = panel.task()
        self._saving = panel.task()
        self._review: Review | None = None
        self._name, self._path = "", None
        self._timer = QTimer(panel)
        self._timer.setSingleShot(True)
        self._timer.setInterval(_AFTER)
        self._timer.timeout.connect(self._save)

    @property
    def path(self) -> Path | None:
        """The file of the present image, None until its content was looked at."""
        return self._path

    def load(self, target: Any, review: Review, loaded: Callable[[int], None]) -> None:
        """Put earlier decisions on this image into the review, then call `loaded(count)`."""
        self.save_now()
        self._review, self._name, self._path = review, target.name, None
        read, found, where = target.read, review.found, folder()

        def work(report: Report) -> _Kept:
            return _look_up(where, image_key(read()), found)

        self.task.start(work, lambda kept: self._take(review, kept, loaded))

    def _take(self, review: Review, kept: _Kept, loaded: Callable[[int], None]) -> None:
        if review is not self._review:
            return
        self._path, earlier = kept.path, kept.review
        if kept.problem is not None:
            complain(f"{kept.problem} Your decisions go to {kept.path.name} now.")
        if earlier is not None:
            review.names[:] = earlier.names
            new = review.status == 0  # not decided on while the file was read
            review.status[new], review.labels[new] = earlier.status[new], earlier.labels[new]
        loaded(kept.count)

    def save_soon(self) -> None:
        """Write when no further decision has come for a moment."""
        self._timer.start()

    def save_now(self) -> None:
        """Write what is not written yet, here and now: the panel is about to go."""
        if self._timer.isActive() and self._review is not None and self._path is not None:
            self._timer.stop()
            try:
                save_review(self._path, self._review, self._name)
            except (OSError, FileError) as error:
                complain(error)

    def _save(self) -> None:
        if self._path is None:  # the image is still being read
            self._timer.start()
            return
        path, name, review = self._path, self._name, copy.copy(self._review)
        review.status, review.labels = review.status.copy(), review.labels.copy()
        review.names = list(review.names)
        self._saving.start(lambda report: save_review(path, review, name), failed=complain)
