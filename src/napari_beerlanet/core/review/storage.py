"""Save review decisions to disk and restore them onto detections of the same image."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.matching import match_greedy, overlap_pairs
from napari_beerlanet.core.common.storage import FileError, atomic_path, read_json_of_kind
from napari_beerlanet.core.review.review import STATES, Review

_FILE_KIND, _FORMAT_VERSION = "napari-beerlanet review", 1
_DECISION_LENGTH = 8  # entries of a decision
_DECISIONS_PER_WRITE = 1000


def save_review(path: str | os.PathLike[str], review: Review, image: str = "") -> Path:
    """Write all decisions, whole or not at all; `image` is its name, for people."""
    content = {
        "kind": _FILE_KIND,
        "version": _FORMAT_VERSION,
        "image": image,
        "model": review.detections.report.get("model"),
        "detections": len(review),
    }
    head = json.dumps(content, ensure_ascii=False)[:-1]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write(f'{head}, "decisions": [')
        rows = np.flatnonzero(review.status > 0)
        # All at once would hold up the window.
        for start in range(0, len(rows), _DECISIONS_PER_WRITE):
            lines = [_encode_decision(review, k) for k in rows[start:][:_DECISIONS_PER_WRITE]]
            file.write((",\n" if start else "\n") + ",\n".join(lines))
        file.write("]}\n")
    return path


def _encode_decision(review: Review, k: int) -> str:
    """A decision: box, score, detected class, status, reviewer's class."""
    decision = [
        *(round(float(v), 3) for v in review.detections.xyxy[k]),
        round(float(review.detections.scores[k]), 4),
        review.detections.names[review.detections.labels[k]],
        STATES[review.status[k]],
        review.names[review.labels[k]],
    ]
    return json.dumps(decision, ensure_ascii=False)


def load_review(path: str | os.PathLike[str], detections: Detections) -> tuple[Review, int]:
    """A review of `detections` with the decisions of a file where its boxes are the same.

    Also returns how many decisions were restored.
    """
    content = read_json_of_kind(path, [_FILE_KIND], _FORMAT_VERSION, "a review")
    try:
        earlier = _review_of_decisions(content["decisions"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FileError(f"{path}: its decisions cannot be read.") from error
    review = Review(detections)
    return review, carry_over_decisions(earlier, review)


def carry_over_decisions(earlier: Review, review: Review, iou: float = 0.7) -> int:
    """Carry the decisions of an earlier review of the same image over to boxes that are the same.

    Of the same detected class, and overlapping by at least `iou`. Returns how many there are.
    """
    old = np.flatnonzero(earlier.status > 0)
    index = {name: k for k, name in enumerate(review.detections.names)}
    classes = np.array([index.get(name, -1) for name in earlier.detections.names], np.int64)
    partner = match_greedy(
        overlap_pairs(earlier.detections.xyxy[old], review.detections.xyxy),
        np.arange(len(old)),
        iou,
        classes[earlier.detections.labels[old]],
        review.detections.labels,
    )
    matched = partner >= 0
    mine, theirs = partner[matched], old[matched]
    names = np.array([review.class_index(name) for name in earlier.names], np.int64)
    review.status[mine] = earlier.status[theirs]
    review.labels[mine] = names[earlier.labels[theirs]]
    return len(mine)


def _review_of_decisions(decisions: list[list[Any]]) -> Review:
    """A review of nothing but the decided boxes."""
    if any(len(entry) != _DECISION_LENGTH for entry in decisions):
        raise ValueError("a decision is incomplete")
    detected, reviewed = [str(d[5]) for d in decisions], [str(d[7]) for d in decisions]
    names = list(dict.fromkeys([*detected, *reviewed]))
    index = {name: k for k, name in enumerate(names)}
    boxes = np.array([d[:4] for d in decisions], np.float32).reshape(-1, 4)
    scores = np.array([d[4] for d in decisions], np.float32)
    rows = np.arange(len(decisions))
    review = Review(
        Detections(
            boxes, np.array([index[n] for n in detected], np.int64), scores, names, {"row": rows}
        )
    )
    order = review.detections.columns["row"]  # the highest score first, as detections are
    states = np.array([STATES.index(str(d[6])) for d in decisions], np.uint8)
    review.status = states[order]
    review.labels = np.array([index[name] for name in reviewed], np.int64)[order]
    return review
