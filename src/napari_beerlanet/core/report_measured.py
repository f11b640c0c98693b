"""Parts of a report on quality: against annotations, curves, confusion, likely label errors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .averages import Curve, Values
from .quality import Quality
from .report_charts import Line, confusion, curves
from .report_html import block, chip, figure, number, paragraph, section, table
from .report_pictures import gallery
from .report_subject import Subject
from .suspects import likely_label_errors
from .verdict import Score

_SUSPECTS = 12
_HOW = (
    "Average precision is the area under the curve of precision over recall as Ultralytics "
    "computes it, over all candidates whatever the threshold; AP50-95 is the mean over overlaps "
    "(IoU) from 0.5 to 0.95."
)


def measures(subject: Subject) -> str:
    """All of it; "" where there are no annotations."""
    quality = subject.quality
    if quality is None:
        return ""
    verdict = quality.at(subject.confidence, subject.level)
    told = (
        f"At confidence {subject.threshold_words()} and an overlap (IoU) of at least "
        f"{subject.level:g}: {len(verdict.true):,} true, {len(verdict.false):,} false, "
        f"{len(verdict.missed):,} missed, {len(verdict.wrong):,} found as another class."
    )
    rows = [_row(score, chip(score.name, subject.shade(score.name))) for score in verdict.scores]
    rows.append(_row(verdict.mean, "<b>mean, or all</b>"))
    head = ["class", "annotated", "shown", "true", "precision", "recall", "F1", "AP50", "AP50-95"]
    coco = np.nanmean(quality.average_precisions("coco"), axis=0) if verdict.mean.count else None
    like_coco = ""
    if coco is not None:
        like_coco = f" As COCO's own program computes it: {coco[0]:.3f} and {coco.mean():.3f}."
    matrix = figure(confusion(verdict.confusion, verdict.names), "How many were found as what.")
    return section(
        "Against annotations",
        paragraph(told),
        table(head, rows),
        paragraph(_HOW + like_coco, "note"),
        _curves(subject, quality),
        matrix,
        _suspects(subject, quality),
    )


def _row(score: Score, name: str) -> list[str]:
    counts = [f"{value:,}" for value in (score.count, score.shown, score.true)]
    shares = (score.precision, score.recall, score.f1, score.ap50, score.ap)
    return [name, *counts, *(number(share) for share in shares)]


def _curves(subject: Subject, quality: Quality) -> str:
    at = subject.confidence
    over_recall, over_threshold = [], []
    for name in [s.name for s in quality.at(at, subject.level).scores if s.count]:
        curve = quality.curve(name, subject.level)
        least = at.get(name) if isinstance(at, Mapping) else at
        mark = curve.point(least) if least is not None else None
        shade = subject.shade(name)
        over_recall.append(Line(name, shade, *_from_zero(curve), mark))
        over_threshold.append(Line(name, shade, *_steps(curve)))
    best = quality.best_threshold(level=subject.level)
    upright = at if not isinstance(at, Mapping) else None
    best_words = f"; highest on average at {best:.2f}" if best is not None else ""
    legend = block("legend", *(chip(line.name, line.colour) for line in over_recall))
    charts = block(
        "charts two",
        figure(
            curves(over_recall, "recall", "precision"),
            "Precision over recall; the dots are at the threshold.",
        ),
        figure(
            curves(over_threshold, "confidence", "F1", upright),
            f"F1 at each threshold{best_words}.",
        ),
    )
    return block("together", legend, charts) if over_recall else ""


def _from_zero(curve: Curve) -> tuple[Values, Values]:
    """Recall and precision, from recall 0 on."""
    first = curve.precision[:1]
    return np.append(0.0 * first, curve.recall), np.append(first, curve.precision)


def _steps(curve: Curve) -> tuple[Values, Values]:
    """Thresholds and F1: the same from one score that occurs to the next, 0 above the highest."""
    edges = np.concatenate([[0.0], np.repeat(curve.confidence[::-1], 2), [1.0]])
    heights = np.append(np.repeat(curve.f1[::-1], 2), [0.0, 0.0])
    return edges, heights


def _suspects(subject: Subject, quality: Quality) -> str:
    """Pictures of annotations that may be wrong; only where it is about this one image."""
    if len(quality.found) != 1:
        return ""
    suspects = likely_label_errors(quality, subject.level, most=_SUSPECTS)
    if not suspects:
        return ""
    found, truth = quality.found[0].xyxy, np.asarray(quality.truths[0].xyxy)
    boxes = [found[s.found] if s.found >= 0 else truth[s.true] for s in suspects]
    colours = ["#e5484d" if s.found >= 0 else "#f5a524" for s in suspects]
    crops = gallery(subject.pixels, np.array(boxes), colours, [s.sentence for s in suspects])
    words = (
        "Where detector and annotations disagree most: either may be wrong. Look at these first."
    )
    return (
        "<h3>Likely errors of the annotations</h3>"
        + paragraph(words, "note")
        + crops.replace('class="gallery"', 'class="gallery sentences"', 1)
    )
