"""Parts of a report on what was found: counts, review, the image, examples of each class."""

from __future__ import annotations

import numpy as np
from PIL import Image

from .counting import parasitaemia
from .overlay import draw_overlay, in_picture
from .report_charts import bars
from .report_html import block, card, chip, escaped, figure, paragraph, section, table
from .report_pictures import embedded, examples
from .report_subject import Subject

_LONGEST = 1700  # pixels of the picture
_BINS = 20
_MOST_CARDS = 6  # of classes; the table has all
_MOST_CLASSES = 24  # with a gallery and a histogram each
_EXAMPLES = 16


def header(subject: Subject) -> str:
    """Title, date, and a sentence on where the numbers come from."""
    height, width = subject.pixels.shape[:2]
    size = subject.everything.pixel_size
    told = [f"{width:,} × {height:,} pixels"]
    if size:
        told.append(f"{width * size[1]:,.0f} × {height * size[0]:,.0f} µm")
    name = subject.model.get("name") or subject.everything.report.get("model")
    told += [f"model {name}"] if name else []
    told.append(subject.date.strftime("%d %B %Y, %H:%M %Z"))
    return (
        f"<header><h1>{escaped(subject.name or 'Image')}</h1>"
        f'<p class="sub">{escaped(" · ".join(told))}</p></header>'
    )


def summary(subject: Subject) -> str:
    """The main numbers as cards, and what a reader must know first."""
    counts = subject.shown.counts()
    cards = [card(f"{sum(counts.values()):,}", "objects", _after(subject))]
    share = parasitaemia(counts)
    if share is not None:
        low, high = share.interval
        cards.append(
            card(
                f"{100 * share.share:.2f} %",
                "parasitaemia",
                f"95 % interval {100 * low:.2f} to {100 * high:.2f} %; "
                f"{share.infected:,} infected of {share.cells:,} red cells",
            )
        )
    cards += [card(f"{n:,}", name) for name, n in list(counts.items())[:_MOST_CARDS]]
    notes = [paragraph(str(note), "warn") for note in subject.notes]
    return "\n".join([block("cards", *cards), *notes])


def _after(subject: Subject) -> str:
    words = f"above confidence {subject.threshold_words()}"
    return f"{words}, after review" if subject.reviewed else words


def overview(subject: Subject) -> str:
    """The image with what counts drawn in."""
    pixels, shown = subject.pixels, subject.shown
    if subject.picture is not None:
        pixels, shown = subject.picture, in_picture(shown, subject.picture)
    drawn = draw_overlay(pixels, shown, subject.shades, longest=_LONGEST)
    whole = embedded(Image.fromarray(drawn), "The image with the boxes that were found")
    return figure(whole, "The objects that count, in the colours of their classes.", "overview")


def counts(subject: Subject) -> str:
    """Numbers of each class, and how sure the detector is of them."""
    shown, total = subject.shown, max(len(subject.shown), 1)
    rows = []
    for label, name in enumerate(shown.names):
        mine = shown[shown.labels == label]
        sides = np.sqrt(np.prod(mine.xyxy[:, 2:] - mine.xyxy[:, :2], axis=1))
        cells = [chip(name, subject.shades[label]), f"{len(mine):,}", f"{len(mine) / total:.1%}"]
        cells += [f"{mine.scores.mean():.2f}", _size(sides, subject)] if len(mine) else ["–", "–"]
        rows.append(cells)
    head = ["class", "count", "share", "mean confidence", "typical size"]
    return section("What was found", table(head, rows), _histograms(subject))


def _size(sides: np.ndarray, subject: Subject) -> str:
    typical = float(np.median(sides))
    size = subject.everything.pixel_size
    length = f"{typical:.0f} px"
    return f"{typical * float(np.sqrt(size[0] * size[1])):.1f} µm ({length})" if size else length


def _histograms(subject: Subject) -> str:
    everything = subject.everything
    charts = []
    for label, name in list(enumerate(everything.names))[:_MOST_CLASSES]:
        scores = everything.scores[(everything.labels == label) & ~subject.rejected]
        if not len(scores):
            continue
        numbers = np.histogram(scores, np.linspace(0, 1, _BINS + 1))[0]
        at = subject.confidence
        least = at.get(name) if not isinstance(at, (int, float)) else at
        chart = bars(numbers, subject.shades[label], "confidence", least)
        charts.append(figure(chart, f"{name}: {_candidates(len(scores))}"))
    return block("charts", *charts)


def _candidates(count: int) -> str:
    return "1 candidate" if count == 1 else f"{count:,} candidates"


def review(subject: Subject) -> str:
    """How much of it a person has looked at."""
    if subject.status is None:
        return section("Review", paragraph("Nobody has reviewed these detections yet.", "note"))
    touched = subject.above | subject.accepted | subject.rejected
    rows, labels = [], subject.everything.labels
    for label, name in enumerate(subject.everything.names):
        mine = touched & (labels == label)
        good, bad = int((mine & subject.accepted).sum()), int((mine & subject.rejected).sum())
        rest = int(mine.sum()) - good - bad
        rows.append([chip(name, subject.shades[label]), f"{good:,}", f"{bad:,}", f"{rest:,}"])
    done = int((touched & (subject.accepted | subject.rejected)).sum())
    words = f"{done:,} of {int(touched.sum()):,} reviewed."
    head = ["class", "accepted", "rejected", "not reviewed"]
    return section("Review", paragraph(words), table(head, rows))


def galleries(subject: Subject) -> str:
    """Examples of each class, from the surest to the least sure, and of what was rejected."""
    everything, parts = subject.everything, []
    for label, name in list(enumerate(everything.names))[:_MOST_CLASSES]:
        rows = np.flatnonzero(subject.counted & (everything.labels == label))
        if len(rows):
            shade = subject.shades[label]
            parts.append(f"<h3>{chip(name, shade)}</h3>")
            parts.append(examples(subject.pixels, everything, rows, shade, _EXAMPLES))
    rejected = np.flatnonzero(subject.rejected)
    if len(rejected):
        parts.append(f"<h3>Rejected by the reviewer ({len(rejected):,})</h3>")
        parts.append(examples(subject.pixels, everything, rejected, "#c0392b", _EXAMPLES))
    note = "From the surest to the least sure of those that count, evenly chosen."
    return section("Examples", paragraph(note, "note"), *parts) if parts else ""
