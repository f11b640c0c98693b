"""Content of a report's sections: what the template shows of an image, as texts and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from napari_beerlanet.core.boxes.classes import (
    OUTCOME_COLOURS,
    Parasitaemia,
    Proportion,
    assign_colours,
    in_life_cycle_order,
    infected_types,
    poisson_interval,
)
from napari_beerlanet.core.checkpoints.info import limits_text, model_limits
from napari_beerlanet.core.checkpoints.model_card import image_counts
from napari_beerlanet.core.common.messages import count_of, format_percent, format_score
from napari_beerlanet.core.common.storage import pixel_hash
from napari_beerlanet.core.evaluation.label_errors import likely_label_errors
from napari_beerlanet.core.evaluation.live import LiveEvaluation
from napari_beerlanet.core.evaluation.metrics import ClassMetrics, PrecisionRecallCurve, Values
from napari_beerlanet.core.figures.overlay import draw_overlay, scale_to_picture
from napari_beerlanet.core.figures.preview import draw_preview
from napari_beerlanet.core.images.rgb import hex_colour
from napari_beerlanet.core.report.charts import (
    ChartLine,
    ConfusionTable,
    HistogramChart,
    LineChart,
)
from napari_beerlanet.core.report.pictures import (
    CertaintyGallery,
    EmbeddedImage,
    certainty_gallery,
    crop_gallery,
    embed_image,
    example_gallery,
)
from napari_beerlanet.core.report.subject import ReportSubject, software_versions

_OVERVIEW_SIZE = 1700  # pixels of the picture
_HISTOGRAM_BINS = 20
_MAX_CLASS_CARDS = 6  # of classes; the table has all
_MAX_CLASSES = 24  # with a gallery and a histogram each
_MAX_EXAMPLES = 16
_MAX_LABEL_ERRORS = 12
_MAX_TYPE_EXAMPLES = 8  # most certain ones of a type, and as many least certain ones
MAX_PAGE_EXAMPLES = 8
"""Most certain cells on the report of one page, and as many least certain ones."""
_PAGE_PICTURE_SIZE = 900  # pixels
_REJECTED_COLOUR = _DETECTION_COLOUR = OUTCOME_COLOURS["false"]
_ANNOTATION_COLOUR = OUTCOME_COLOURS["missed"]
_UNKNOWN_COLOUR = "#7f7f7f"
_AP_NOTE = (
    "Average precision is the area under the precision-recall curve as Ultralytics computes it, "
    "over all candidates whatever the threshold; AP50-95 is the mean over IoU from 0.5 to 0.95."
)

Content = dict[str, Any]


class RowName(NamedTuple):
    """The first cell of a table's row; with a colour it is the name of a class or a stain."""

    name: str
    colour: str = ""
    bold: bool = False


def report_content(subject: ReportSubject) -> Content:
    """What the template shows, by its names there; a section without content is None."""
    return {
        "title": subject.name,
        "subtitle": _subtitle(subject),
        "summary": _summary(subject),
        "overview": _overview(subject),
        "counts": _counts(subject),
        "types": _types(subject),
        "review": _review(subject),
        "metrics": None if subject.evaluation is None else _metrics(subject, subject.evaluation),
        "stains": _stains(subject),
        "examples": _examples(subject),
        "settings": _settings(subject),
        "model": _model(subject),
        "classifier": _classifier(subject),
        "provenance": _provenance(subject),
    }


def _subtitle(subject: ReportSubject) -> str:
    height, width = subject.pixels.shape[:2]
    size = subject.candidates.pixel_size
    parts = [f"{width:,} × {height:,} pixels"]
    if size:
        parts.append(f"{width * size[1]:,.0f} × {height * size[0]:,.0f} µm")
    name = subject.model.get("name") or subject.candidates.report.get("model")
    parts += [f"model {name}"] if name else []
    classifier = _classifier_name(subject)
    parts += [f"classifier {classifier}"] if classifier else []
    return " · ".join([*parts, subject.date.strftime("%d %B %Y, %H:%M %Z")])


def _summary(subject: ReportSubject) -> Content:
    """The main numbers as cards (value, label, note), and what a reader must know first."""
    counts = subject.counted_detections.counts()
    note = f"above confidence {subject.threshold_text()}"
    if subject.reviewed:
        done, total = subject.review_progress
        note += f";\n{done:,} of {total:,} reviewed"
    cards = [(f"{sum(counts.values()):,}", "objects", note)]
    infected = subject.class_counts.parasitaemia
    if infected is not None:
        low, high = infected.interval
        note = (
            f"95 % interval {100 * low:.2f} to {100 * high:.2f} %; "
            f"{infected.infected:,} infected of {infected.cells:,} red cells"
        )
        cards.append((f"{100 * infected.share:.2f} %", "parasitaemia", note))
        if infected.per_100_white_cells is not None:
            note = f"{infected.white_cells:,} white cells"
            per_100 = f"{infected.per_100_white_cells:,.0f}"
            cards.append((per_100, "parasites per 100 white cells", note))
    for name, count in list(counts.items())[:_MAX_CLASS_CARDS]:
        cards.append((f"{count:,}", name, _per_mm2(count, subject.area_mm2)))
    return {"cards": cards, "notes": _reservations(subject)}


def _reservations(subject: ReportSubject) -> list[str]:
    """What a reader must know first: the models' limits, and what is odd about this image."""
    model = {**subject.model, "name": "The detector" if subject.classifier else "This model"}
    limits = [
        text.replace(": Does", ": does", 1)
        for text in model_limits(model, {**subject.classifier, "name": "The classifier"})
    ]
    infected = subject.class_counts.parasitaemia
    few = infected.warnings if infected is not None and subject.class_counts.types else []
    return [str(note) for note in [*few, *limits, *subject.notes]]


def _per_mm2(count: int, area: float | None, interval: bool = False) -> str:
    """Objects per square millimetre, perhaps with the 95 % interval; "" without an area."""
    if not area:
        return ""
    text = f"{count / area:,.0f} per mm²"
    if interval:
        low, high = poisson_interval(count)
        text = f"{count / area:,.0f} ({low / area:,.0f} to {high / area:,.0f})"
    return text


def _overview(subject: ReportSubject) -> EmbeddedImage:
    """The image with the detections that count."""
    return _picture(subject, _OVERVIEW_SIZE)


def _picture(subject: ReportSubject, size: int) -> EmbeddedImage:
    pixels, detections = subject.pixels, subject.counted_detections.by_type()
    if subject.picture is not None:
        pixels, detections = subject.picture, scale_to_picture(detections, subject.picture)
    own = {name: subject.colour_of(name) for name in subject.candidates.names}
    shades = assign_colours(detections.names, subject.type_shades, own)
    drawn = draw_overlay(pixels, detections, list(shades.values()), max_side=size)
    return embed_image(Image.fromarray(drawn), "The image with the boxes of its detections")


def _counts(subject: ReportSubject) -> Content:
    """Numbers of each class, and how sure the detector is of them."""
    detections, rows = subject.counted_detections, []
    total = max(len(detections), 1)
    for label, name in enumerate(detections.names):
        mine = detections[detections.labels == label]
        sides = np.sqrt(np.prod(mine.xyxy[:, 2:] - mine.xyxy[:, :2], axis=1))
        cells = [f"{len(mine):,}", f"{len(mine) / total:.1%}", "–", "–"]
        if len(mine):
            cells[2:] = [f"{mine.scores.mean():.2f}", _typical_size(sides, subject)]
        if subject.area_mm2:
            cells.insert(1, _per_mm2(len(mine), subject.area_mm2, interval=True))
        rows.append([RowName(name, subject.class_shades[label]), *cells])
    head = ["class", "count", "share", "mean confidence", "typical size"]
    if subject.area_mm2:
        head.insert(2, "per mm² (95 % interval)")
    return {"head": head, "rows": rows, "charts": _confidence_histograms(subject)}


def _typical_size(sides: npt.NDArray[Any], subject: ReportSubject) -> str:
    typical = float(np.median(sides))
    size = subject.candidates.pixel_size
    length = f"{typical:.0f} px"
    return f"{typical * float(np.sqrt(size[0] * size[1])):.1f} µm ({length})" if size else length


def _confidence_histograms(subject: ReportSubject) -> list[HistogramChart]:
    candidates, charts = subject.candidates, []
    for label, name in list(enumerate(candidates.names))[:_MAX_CLASSES]:
        scores = candidates.scores[(candidates.labels == label) & ~subject.rejected]
        if len(scores):
            counts = np.histogram(scores, np.linspace(0, 1, _HISTOGRAM_BINS + 1))[0]
            caption = f"{name}: {count_of(len(scores), 'candidate')}"
            shade, threshold = subject.class_shades[label], subject.threshold_of(name)
            charts.append(HistogramChart(counts, shade, "confidence", threshold, caption))
    return charts


# --- cell types ----------------------------------------------------------------------------------


def _types(subject: ReportSubject) -> Content | None:
    """Numbers of each type, how sure the classifier is of them, examples; the truth if known."""
    counts = subject.class_counts.types
    if not counts:
        return None
    shares, rows, charts, galleries = subject.class_counts.type_shares, [], [], []
    for name in in_life_cycle_order(list(counts)):
        count, mine = counts[name], subject.types == name
        certainty = subject.certainty([name])[mine]
        share, mean = (str(shares[name]) if shares else "–"), "–"
        if count:
            mean = f"{certainty.mean():.2f}"
            bins = np.histogram(certainty, np.linspace(0, 1, _HISTOGRAM_BINS + 1))[0]
            caption = f"{name}: {count_of(count, 'cell')}"
            charts.append(
                HistogramChart(bins, subject.type_shades[name], "probability", None, caption)
            )
            gallery = _certainty_gallery(subject, [name], _MAX_TYPE_EXAMPLES)
            galleries.append(
                {"name": name, "colour": subject.type_shades[name], **gallery._asdict()}
            )
        rows.append([RowName(name, subject.type_shades[name]), f"{count:,}", share, mean])
    return {
        "text": _types_text(subject),
        "rows": rows,
        "charts": charts[:_MAX_CLASSES],
        "galleries": galleries[:_MAX_CLASSES],
        "truth": _annotated_types(subject),
    }


def _types_text(subject: ReportSubject) -> str:
    classified = sum(subject.class_counts.types.values())
    said = subject.candidates.report.get("classification") or {}
    name, classes = _classifier_name(subject), said.get("classes") or []
    text = f"{count_of(classified, 'cell has', 'cells have')} a type"
    text += f", as {name} says" if name else ""
    text += f", of the class{'es' * (len(classes) > 1)} {', '.join(classes)}" if classes else ""
    return f"{text}. Shares are of these, with 95 % intervals (Wilson)."


def _classifier_name(subject: ReportSubject) -> str:
    known = subject.classifier.get("name") or subject.candidates.report.get("classifier")
    return str(known or "")


def _certainty_gallery(subject: ReportSubject, types: list[str], count: int) -> CertaintyGallery:
    """The most and the least certain of the cells that have one of these types."""
    rows = np.flatnonzero(np.isin(subject.types, types))
    names = subject.types[rows].tolist()
    return certainty_gallery(
        subject.pixels,
        subject.counted_detections.xyxy[rows],
        subject.certainty(types)[rows],
        names,
        [subject.type_shades[name] for name in names],
        count,
    )


def _annotated_types(subject: ReportSubject) -> Content | None:
    """Types against those of annotations; None where these have none."""
    if subject.evaluation is None or len(subject.evaluation.annotations) != 1:
        return None
    from napari_beerlanet.core.evaluation.classification import match_types  # torch comes with it

    truth: Any = subject.evaluation.annotations[0]
    matches = match_types(subject.counted_detections, truth, subject.iou)
    if matches is None:
        return None
    metrics = matches.metrics
    text = f"{count_of(metrics['crops'], 'cell')} with a type on both sides"
    if metrics["crops"]:
        low, high = metrics["accuracy_interval"]
        text += (
            f": accuracy {format_score(metrics['accuracy'])} (95 % interval {100 * low:.0f} to "
            f"{100 * high:.0f} %), balanced accuracy {format_score(metrics['balanced_accuracy'])}"
        )
    rows = [
        [
            RowName(name, subject.type_shades.get(name, _UNKNOWN_COLOUR)),
            f"{entry['count']:,}",
            f"{entry['predicted']:,}",
            _score_and_interval(entry["precision"], entry["precision_interval"]),
            _score_and_interval(entry["recall"], entry["recall_interval"]),
        ]
        for name, entry in metrics["per_class"].items()
    ]
    confusion = ConfusionTable(matches.confusion, matches.names, "no box or type")
    return {"text": f"{text}.", "rows": rows, "confusion": confusion}


def _score_and_interval(score: float, interval: list[float] | None) -> str:
    if interval is None:
        return "–"
    return f"{format_score(score)} ({100 * interval[0]:.0f} to {100 * interval[1]:.0f} %)"


# --- the report of one page ----------------------------------------------------------------------


def malaria_content(subject: ReportSubject) -> Content:
    """What the report of one page shows: infected red cells by stage, and what to look at first."""
    infected = subject.class_counts.parasitaemia
    given = subject.classifier.get("classes") or ()
    known = list(dict.fromkeys([*subject.class_counts.types, *given]))
    if infected is None and not infected_types(known):
        raise ValueError(
            "A report of one page is on infected red cells: classify the red cells with a "
            "classifier that knows uninfected and infected ones, such as malaria."
        )
    types = infected_types(known) or list(infected.stages if infected else ())
    return page_content(
        subject.name,
        _subtitle(subject),
        infected,
        subject.type_shades,
        _reservations(subject),
        _certainty_gallery(subject, types, MAX_PAGE_EXAMPLES),
        _page_facts(subject),
        dict(subject.hashes) or {"image (pixels)": pixel_hash(subject.pixels)},
    ) | {"picture": _picture(subject, _PAGE_PICTURE_SIZE)}


def page_content(
    title: str,
    subtitle: str,
    infected: Parasitaemia | None,
    colours: Mapping[str, str],
    warnings: Sequence[str],
    gallery: CertaintyGallery,
    facts: Sequence[tuple[str, object]],
    hashes: Mapping[str, str],
) -> Content:
    """A page on infected red cells: of an image, or of all fields of a smear.

    `colours` "#rrggbb" by type, `facts` and `hashes` by name.
    """
    return {
        "title": title,
        "subtitle": subtitle,
        "cards": [] if infected is None else _parasitaemia_cards(infected),
        "rows": [] if infected is None else _stage_rows(infected, colours),
        "warnings": [*([] if infected else ["No red cells were found."]), *warnings],
        "gallery": gallery,
        "facts": facts,
        "hashes": hashes,
        "picture": None,
        "fields": [],
    }


def _parasitaemia_cards(infected: Parasitaemia) -> list[tuple[str, str, str]]:
    low, high = infected.interval
    interval = f"95 % interval {100 * low:.2f} to {100 * high:.2f} %"
    cards = [
        (f"{100 * infected.share:.2f} %", "parasitaemia", interval),
        (f"{infected.infected:,}", "infected red cells", f"of {infected.cells:,} counted"),
    ]
    per_100, span = infected.per_100_white_cells, infected.per_100_white_cells_interval
    if infected.white_cells is not None:
        note = f"{count_of(infected.white_cells, 'white cell')}"
        if per_100 is None or span is None:
            cards.append(("–", "parasites per 100 white cells", f"{note} counted"))
        else:
            note += f"; 95 % interval {span[0]:,.0f} to {span[1]:,.0f}"
            cards.append((f"{per_100:,.0f}", "parasites per 100 white cells", note))
    return cards


def _stage_rows(infected: Parasitaemia, colours: Mapping[str, str]) -> list[list[Any]]:
    healthy = infected.cells - infected.infected
    counts = {**infected.stages, "uninfected": healthy}
    rows: list[list[Any]] = [
        [
            RowName(name, colours.get(name, "")),
            f"{count:,}",
            str(Proportion(count, infected.cells)),
        ]
        for name, count in counts.items()
    ]
    return [*rows, [RowName("red cells", bold=True), f"{infected.cells:,}", ""]]


def _review_text(subject: ReportSubject) -> str:
    if not subject.reviewed:
        return "nobody has reviewed these cells"
    done, total = subject.review_progress
    return f"{done:,} of {total:,} cells reviewed"


def _page_facts(subject: ReportSubject) -> list[tuple[str, object]]:
    """Models and settings."""
    model = subject.model.get("name") or subject.candidates.report.get("model")
    return [
        ("Detector", model),
        ("Classifier", _classifier_name(subject)),
        ("Minimum confidence", subject.threshold_text()),
        ("Software", f"napari-beerlanet {software_versions()['napari-beerlanet']}"),
        ("Review", _review_text(subject)),
    ]


def _review(subject: ReportSubject) -> Content | None:
    """How much of it a person has reviewed."""
    if subject.status is None:
        return None
    touched = subject.above_threshold | subject.accepted | subject.rejected
    rows, labels = [], subject.candidates.labels
    for label, name in enumerate(subject.candidates.names):
        mine = touched & (labels == label)
        good, bad = int((mine & subject.accepted).sum()), int((mine & subject.rejected).sum())
        rest = int(mine.sum()) - good - bad
        cells = [f"{good:,}", f"{bad:,}", f"{rest:,}"]
        rows.append([RowName(name, subject.class_shades[label]), *cells])
    done, total = subject.review_progress
    return {"text": f"{done:,} of {total:,} reviewed.", "rows": rows}


def _examples(subject: ReportSubject) -> list[Content]:
    """Examples of each class, from the highest score to the lowest, and of what was rejected."""
    candidates, examples = subject.candidates, []
    pixels, shades = subject.pixels, subject.class_shades
    for label, name in list(enumerate(candidates.names))[:_MAX_CLASSES]:
        rows = np.flatnonzero(subject.counted & (candidates.labels == label))
        if len(rows):
            crops = example_gallery(pixels, candidates, rows, shades, count=_MAX_EXAMPLES)
            examples.append({"name": name, "colour": shades[label], "crops": crops})
    rejected = np.flatnonzero(subject.rejected)
    if len(rejected):
        crops = example_gallery(
            pixels, candidates, rejected, shades, _REJECTED_COLOUR, _MAX_EXAMPLES
        )
        name = f"Rejected by the reviewer ({len(rejected):,})"
        examples.append({"name": name, "colour": "", "crops": crops})
    return examples


# --- metrics against annotations -----------------------------------------------------------------


def _metrics(subject: ReportSubject, evaluation: LiveEvaluation) -> Content:
    matches = evaluation.match_at(subject.confidence, subject.iou)
    text = (
        f"At confidence {subject.threshold_text()} and an IoU of at least {subject.iou:g}: "
        f"{len(matches.true_positives):,} true, {len(matches.false_positives):,} false, "
        f"{len(matches.missed):,} missed, {len(matches.wrong_class):,} detected as another class."
    )
    rows = [
        _metrics_row(RowName(scores.name, subject.colour_of(scores.name)), scores)
        for scores in matches.per_class
    ]
    rows.append(_metrics_row(RowName("all boxes", bold=True), matches.all_boxes))
    rows.append(_metrics_row(RowName("mean of classes", bold=True), matches.mean))
    note = _AP_NOTE
    if matches.mean.annotated:
        coco = np.nanmean(evaluation.average_precisions("coco"), axis=0)
        note += f" As COCO's own program computes it: {coco[0]:.3f} and {coco.mean():.3f}."
    return {
        "text": text,
        "rows": rows,
        "note": note,
        "charts": _metrics_charts(subject, evaluation),
        "confusion": ConfusionTable(matches.confusion.matrix, matches.names),
        "label_errors": _label_errors(subject, evaluation),
    }


def _metrics_row(name: RowName, metrics: ClassMetrics) -> list[Any]:
    counts = [
        f"{value:,}" for value in (metrics.annotated, metrics.detected, metrics.true_positives)
    ]
    fractions = (metrics.precision, metrics.recall, metrics.f1, metrics.ap50, metrics.ap)
    return [name, *counts, *map(_percent, fractions)]


def _metrics_charts(subject: ReportSubject, evaluation: LiveEvaluation) -> list[LineChart]:
    over_recall, over_threshold = [], []
    annotated = [
        s.name
        for s in evaluation.match_at(subject.confidence, subject.iou).per_class
        if s.annotated
    ]
    for name in annotated:
        curve = evaluation.curve(name, subject.iou)
        threshold = subject.threshold_of(name)
        mark = curve.point_at(threshold) if threshold is not None else None
        shade = subject.colour_of(name)
        over_recall.append(ChartLine(name, shade, *_precision_recall_points(curve), mark))
        over_threshold.append(ChartLine(name, shade, *_f1_steps(curve)))
    if not annotated:
        return []
    best = evaluation.best_threshold(iou=subject.iou)
    best_text = f"; highest on average at {best:.2f}" if best is not None else ""
    shared = None if isinstance(subject.confidence, Mapping) else subject.confidence
    caption = "Precision over recall; the dots are at the threshold."
    return [
        LineChart(over_recall, "recall", "precision", caption=caption),
        LineChart(over_threshold, "confidence", "F1", shared, f"F1 at each threshold{best_text}."),
    ]


def _precision_recall_points(curve: PrecisionRecallCurve) -> tuple[Values, Values]:
    """Recall and precision, from recall 0 on."""
    first = curve.precision[:1]
    return np.append(0.0 * first, curve.recall), np.append(first, curve.precision)


def _f1_steps(curve: PrecisionRecallCurve) -> tuple[Values, Values]:
    """Thresholds and F1: the same from one score that occurs to the next, 0 above the highest."""
    edges = np.concatenate([[0.0], np.repeat(curve.confidence[::-1], 2), [1.0]])
    heights = np.append(np.repeat(curve.f1[::-1], 2), [0.0, 0.0])
    return edges, heights


def _label_errors(subject: ReportSubject, evaluation: LiveEvaluation) -> list[EmbeddedImage]:
    """Crops of annotations that may be wrong; only where it is about this one image."""
    if len(evaluation.detections) != 1:
        return []
    errors = likely_label_errors(evaluation, subject.iou, max_count=_MAX_LABEL_ERRORS)
    if not errors:
        return []
    boxes, truth = evaluation.detections[0].xyxy, np.asarray(evaluation.annotations[0].xyxy)
    xyxy = [boxes[e.detection] if e.detection >= 0 else truth[e.annotation] for e in errors]
    colours = [_DETECTION_COLOUR if e.detection >= 0 else _ANNOTATION_COLOUR for e in errors]
    return crop_gallery(subject.pixels, np.array(xyxy), colours, [e.message for e in errors])


# --- stains, settings, model, provenance ---------------------------------------------------------


def _stains(subject: ReportSubject) -> Content | None:
    d = subject.decomposition
    if d is None:
        return None
    rows = []
    labels, suggested = d.labels, d.suggestions()
    for i in d.order:
        absorbs = [f"{value:z.2f}" for value in d.spectra[:, i]]
        name = RowName(labels[i], hex_colour(d.colours[i]))
        near = suggested.get(i)
        resembles = "–" if near is None else f"{near.name}, {near.angle:.0f}°"
        rows.append([name, format_percent(float(d.share[i])), *absorbs, resembles])
    preview = draw_preview(d, subject.name, subject.candidates.pixel_size)
    return {
        "background": ", ".join(f"{value:z.2f}" for value in d.light),
        "picture": embed_image(preview, "Decomposed stains"),
        "rows": rows,
        "how": "Decomposed with given spectra."
        if d.fixed_spectra
        else "Decomposed from the image alone.",
    }


def _settings(subject: ReportSubject) -> Content:
    """Thresholds and settings, and the detector's own report."""
    report = subject.candidates.report or subject.detections.report
    facts: list[tuple[str, object]] = [("Minimum confidence", subject.threshold_text())]
    facts += [(str(name), value) for name, value in subject.settings.items()]
    size = report.get("object_size")
    facts.append(("Object size", f"{size:.0f} px" if size not in (None, "") else None))
    names = {"chosen": "Scale chosen", "scale": "Scale", "tiles": "Tiles", "device": "Device"}
    facts += [(name, report.get(key)) for key, name in names.items()]
    return {"facts": facts, "notes": [str(note) for note in report.get("notes") or []]}


def _model(subject: ReportSubject) -> Content | None:
    """What the model was trained on, and its metrics there."""
    info = subject.model
    if not info:
        return None
    training = info.get("training") or {}
    images = image_counts(training)
    front_end = ""
    if "components" in info:
        front_end = f"{info['components']} components, {info.get('iterations')} iterations"
    facts = [
        ("Name", info.get("name")),
        ("Classes", ", ".join(map(str, info.get("classes", [])))),
        ("Limits", limits_text(info)),
        ("Stain front end", front_end),
        ("Trained", training.get("date")),
        ("Data", training.get("data")),
        ("Images", ", ".join(f"{n} {part}" for part, n in images.items())),
        ("Epochs", training.get("epochs")),
        ("Scope", training.get("scope")),
        ("Parent", training.get("parent")),
        ("Hash of the data", training.get("data_hash")),
        ("Trained with", _list_versions(training.get("versions") or {})),
    ]
    return {"facts": facts, "metrics": _training_metrics(training.get("metrics"))}


def _classifier(subject: ReportSubject) -> Content | None:
    """What the classifier was trained on, what it is for, and its metrics there."""
    info = subject.classifier
    if not info:
        return None
    training = info.get("training") or {}
    images = image_counts(training)
    facts = [
        ("Name", info.get("name")),
        ("Types", ", ".join(map(str, info.get("classes", [])))),
        ("Meant for", ", ".join(map(str, info.get("applies_to") or []))),
        ("Limits", limits_text(info)),
        ("Network", info.get("backbone")),
        ("Stain front end", info.get("front_end")),
        ("Trained", training.get("date")),
        ("Data", training.get("data")),
        ("Crops", ", ".join(f"{n} {part}" for part, n in images.items())),
        ("Epochs", training.get("epochs")),
        ("Hash of the data", training.get("data_hash")),
        ("Hash of the classifier", subject.hashes.get("the classifier")),
    ]
    rows: list[list[Any]] = []
    metrics = training.get("metrics")
    for name, values in metrics.items() if isinstance(metrics, Mapping) else ():
        if isinstance(values, Mapping) and "balanced_accuracy" in values:
            numbers = [values.get(key) for key in ("accuracy", "balanced_accuracy")]
            crops = str(values.get("crops", "–"))
            rows.append([RowName(str(name)), crops, *map(_percent, numbers)])
    return {"facts": facts, "metrics": rows}


def _training_metrics(metrics: Any) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for name, values in metrics.items() if isinstance(metrics, Mapping) else ():
        if isinstance(values, Mapping) and "mAP50" in values:
            numbers = [values.get(key) for key in ("mAP50", "mAP50-95")]
            images = str(values.get("images", "–"))
            rows.append([RowName(str(name)), images, *map(_percent, numbers)])
    return rows


def _percent(value: Any) -> str:
    """A score from 0 to 1 in percent, a dash where there is none."""
    known = isinstance(value, (int, float)) and value == value
    return format_score(value) if known else "–"


def _provenance(subject: ReportSubject) -> Content:
    """Versions, hashes and the date: what is needed to get the same numbers again."""
    facts: list[tuple[str, object]] = [("Report made", subject.date.isoformat(timespec="seconds"))]
    facts += [(str(name), value) for name, value in subject.facts.items()]
    facts.append(("Versions", _list_versions(software_versions())))
    hashes = dict(subject.hashes) or {"image (pixels)": pixel_hash(subject.pixels)}
    return {"facts": facts, "hashes": hashes}


def _list_versions(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
