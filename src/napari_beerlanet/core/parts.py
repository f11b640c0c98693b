"""Detection in parts of an image: each is run by itself, and what overlaps is found once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .boxes import Detections, suppress
from .detector import Detector
from .progress import Report, within

Window = tuple[slice, slice]
"""Rows and columns, from their first to the one after their last."""


def detect_parts(
    model: Detector,
    read: Callable[[Window], npt.NDArray[Any]],
    windows: Sequence[Window],
    shape: tuple[int, int],
    *,
    confidence: float = 0.25,
    iou: float = 0.7,
    report: Report | None = None,
    **settings: Any,
) -> Detections:
    """What `model.detect` finds in the windows of an image of `shape` (H, W), in its pixels.

    `read(window)` gives the pixels (h, w, 3 or 4). Where windows overlap, boxes of one class that
    share more than `iou` are one.
    """
    parts = []
    for k, window in enumerate(windows):
        part = within(report, k / len(windows), (k + 1) / len(windows))
        found = model.detect(read(window), confidence, iou, report=part, **settings)
        parts.append(found.candidates if found.candidates is not None else found)
    if len(parts) == 1 and _corner(windows[0]) == (0, 0) and parts[0].image_shape == shape:
        return parts[0].above(confidence)
    return _together(parts, windows, shape, iou).above(confidence)


def _together(
    parts: Sequence[Detections], windows: Sequence[Window], shape: tuple[int, int], iou: float
) -> Detections:
    """All parts at their places in the image."""
    moved = [
        part.xyxy + np.array([*_corner(window)[::-1]] * 2, np.float32)
        for part, window in zip(parts, windows, strict=True)
    ]
    first = max(parts, key=lambda part: math.prod(part.image_shape or (0, 0)))
    everything = Detections(
        np.concatenate(moved),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.scores for part in parts]),
        first.names,
        columns={
            name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns
        },
        image_shape=shape,
        pixel_size=first.pixel_size,
        report=first.report | {"windows": len(parts), "notes": _notes(parts)},
    )
    if not _overlap(windows):
        return everything
    kept = suppress(everything.xyxy, everything.scores, everything.labels, iou)
    return everything[kept]


def _corner(window: Window) -> tuple[int, int]:
    """First row and column."""
    rows, columns = window
    return int(rows.start or 0), int(columns.start or 0)


def _overlap(windows: Sequence[Window]) -> bool:
    """Whether any two share a pixel."""
    return any(
        max(a.start, c.start) < min(a.stop, c.stop) and max(b.start, d.start) < min(b.stop, d.stop)
        for i, (a, b) in enumerate(windows)
        for c, d in windows[:i]
    )


def _notes(parts: Sequence[Detections]) -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(note for part in parts for note in part.report.get("notes", [])))
