"""Decisions on detections kept on disk, so that tomorrow goes on where today stopped."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .boxes import Detections
from .files import FileError, atomic_path
from .matching import assign, pairs_of
from .results import read_json
from .reviewing import STATES, Review

_KIND, _VERSION = "napari-beerlanet review", 1
_WIDTH = 8  # entries of a decision
_BLOCK = 1000  # decisions that are written at a time


def image_key(pixels: npt.NDArray[Any]) -> str:
    """A name for an image by its content, the same wherever it lies and however it is called."""
    seen = hashlib.sha256(f"{pixels.shape} {pixels.dtype}".encode())
    seen.update(np.ascontiguousarray(pixels).data)
    return seen.hexdigest()[:32]


def save_review(path: str | os.PathLike[str], review: Review, image: str = "") -> Path:
    """Write all decisions, whole or not at all; `image` is its name, for people."""
    content = {
        "kind": _KIND,
        "version": _VERSION,
        "image": image,
        "model": review.found.report.get("model"),
        "detections": len(review),
    }
    head = json.dumps(content, ensure_ascii=False)[:-1]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write(f'{head}, "decisions": [')
        rows = np.flatnonzero(review.status > 0)
        for start in range(0, len(rows), _BLOCK):  # all at once would hold up the window
            file.write(",\n" if start else "\n")
            file.write(",\n".join(_line(review, k) for k in rows[start : start + _BLOCK]))
        file.write("]}\n")
    return path


def _line(review: Review, k: int) -> str:
    """A decision: box, score, class that was found, state, class that was given."""
    decision = [
        *(round(float(v), 3) for v in review.found.xyxy[k]),
        round(float(review.found.scores[k]), 4),
        review.found.names[review.found.labels[k]],
        STATES[review.status[k]],
        review.names[review.labels[k]],
    ]
    return json.dumps(decision, ensure_ascii=False)


def load_review(path: str | os.PathLike[str], found: Detections) -> tuple[Review, int]:
    """A review of `found` with the decisions of a file where its boxes are the same.

    Also returns how many decisions found their box again.
    """
    content = read_json(path)
    if content.get("kind") != _KIND:
        raise FileError(f"{path}: not a review of napari-beerlanet.")
    if content.get("version") != _VERSION:
        raise FileError(
            f"{path}: a review of version {content.get('version')!r}, where version {_VERSION} is "
            "known; a newer napari-beerlanet may read it."
        )
    try:
        earlier = _earlier(content["decisions"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FileError(f"{path}: its decisions cannot be read.") from error
    review = Review(found)
    return review, carry_over(earlier, review)


def carry_over(earlier: Review, review: Review, iou: float = 0.7) -> int:
    """Take the decisions of an earlier review of the same image for boxes that are the same.

    Of the same class when found, and overlapping by at least `iou`. Returns how many there are.
    """
    old = np.flatnonzero(earlier.status > 0)
    place = {name: k for k, name in enumerate(review.found.names)}
    kinds = np.array([place.get(name, -1) for name in earlier.found.names], np.int64)
    partner = assign(
        pairs_of(earlier.found.xyxy[old], review.found.xyxy),
        np.arange(len(old)),
        iou,
        kinds[earlier.found.labels[old]],
        review.found.labels,
    )
    there = partner >= 0
    mine, theirs = partner[there], old[there]
    names = np.array([review.place_of(name) for name in earlier.names], np.int64)
    review.status[mine] = earlier.status[theirs]
    review.labels[mine] = names[earlier.labels[theirs]]
    return len(mine)


def _earlier(decisions: list[list[Any]]) -> Review:
    """A review of nothing but the decided boxes."""
    if any(len(entry) != _WIDTH for entry in decisions):
        raise ValueError("a decision is incomplete")
    found_as, decided_as = [str(d[5]) for d in decisions], [str(d[7]) for d in decisions]
    names = list(dict.fromkeys([*found_as, *decided_as]))
    place = {name: k for k, name in enumerate(names)}
    boxes = np.array([d[:4] for d in decisions], np.float32).reshape(-1, 4)
    scores = np.array([d[4] for d in decisions], np.float32)
    rows = np.arange(len(decisions))
    review = Review(
        Detections(
            boxes, np.array([place[n] for n in found_as], np.int64), scores, names, {"row": rows}
        )
    )
    order = review.found.columns["row"]  # the highest score first, as detections are
    states = np.array([STATES.index(str(d[6])) for d in decisions], np.uint8)
    review.status = states[order]
    review.labels = np.array([place[name] for name in decided_as], np.int64)[order]
    return review
