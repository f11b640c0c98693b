"""All that is shown of detections against annotations, worked out at once and off the GUI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .averages import Curve
from .boxes import Detections
from .progress import Report, tell
from .quality import Quality, Truth
from .regions import Region
from .suspects import Suspect, likely_label_errors


@dataclass(frozen=True, eq=False)
class Assessment:
    """`quality`, and what of it does not depend on the threshold, at one `level` of overlap.

    `curves` by class name; `best` is the threshold of the best F1, None if there is nothing;
    `suspects` are likely errors of the annotations, the worst first.
    """

    quality: Quality
    level: float
    curves: dict[str, Curve]
    best: float | None
    suspects: list[Suspect]


def assess(
    found: Detections,
    truth: Truth,
    regions: Sequence[Region] = (),
    level: float = 0.5,
    most: int | None = None,
    report: Report | None = None,
) -> Assessment:
    """Compare the detections of an image with its annotations; at most so many suspects."""
    tell(report, 0, 4, "matching boxes")
    quality = Quality.of(found, truth, regions)
    tell(report, 1, 4, "measuring")
    quality.at(0.0, level)  # its average precisions are kept
    tell(report, 2, 4, "drawing curves")
    curves = {name: quality.curve(name, level) for name in quality.names}
    best = quality.best_threshold(level=level)
    tell(report, 3, 4, "looking for errors")
    return Assessment(quality, level, curves, best, likely_label_errors(quality, level, most=most))
