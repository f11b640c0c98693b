"""A report on one image: a single HTML file that needs nothing else, on screen and on paper."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from .files import FileError, atomic_path
from .preview import preview
from .report_found import counts, galleries, header, overview, review, summary
from .report_html import escaped, facts, figure, page, paragraph, section, table
from .report_measured import measures
from .report_pictures import checked_pixels, embedded
from .report_subject import Subject, pixels_hash, versions
from .results import hex_colour, percent

__all__ = ["Subject", "pixels_hash", "render_report", "write_report"]

_FOOT = (
    "Made by napari-beerlanet, a research tool and not a medical device. "
    "This file is complete in itself: it loads nothing and runs nothing."
)


def write_report(path: str | os.PathLike[str], subject: Subject) -> None:
    """Write the report whole or not at all."""
    text = render_report(subject)
    try:
        with atomic_path(path) as unfinished:
            unfinished.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({error.strerror or error}).") from error


def render_report(subject: Subject) -> str:
    """The report as HTML."""
    checked_pixels(subject.pixels if subject.picture is None else subject.picture)
    parts = [
        header(subject),
        summary(subject),
        overview(subject),
        counts(subject),
        review(subject),
        measures(subject),
        stains(subject),
        galleries(subject),
        how(subject),
        record(subject),
        provenance(subject),
        f"<footer>{escaped(_FOOT)}</footer>",
    ]
    return page(f"Report on {subject.name or 'an image'}", "\n".join(p for p in parts if p))


def stains(subject: Subject) -> str:
    """The decomposition's picture and numbers."""
    d = subject.decomposition
    if d is None:
        return ""
    drawn = embedded(preview(d, subject.name, subject.everything.pixel_size), "Stains taken apart")
    rows = []
    for i in sorted(range(len(d.share)), key=lambda k: -d.share[k]):
        if d.active[i]:
            colour = hex_colour(d.colours[i])
            absorbs = [f"{value:.2f}" for value in d.spectra[:, i]]
            name = f'<span class="chip"><i style="background:{colour}"></i>OD {i + 1}</span>'
            rows.append([name, percent(float(d.share[i])), *absorbs])
    light = ", ".join(f"{value:.2f}" for value in d.light)
    return section(
        "Stains",
        paragraph(
            "Found from the image alone: how much of each dye lies where, and what it absorbs. "
            f"The empty slide lets pass {light} of full red, green and blue."
        ),
        figure(drawn, "Each density from white (none) to the stain's own colour, on one scale."),
        table(["stain", "share", "absorbs red", "green", "blue"], rows),
        kind="together",
    )


def how(subject: Subject) -> str:
    """Thresholds and settings, and what the detector said of itself."""
    told = subject.everything.report or subject.found.report
    notes = told.get("notes") or []
    rows: list[tuple[str, object]] = [("Confidence at least", subject.threshold_words())]
    rows += [(str(name), value) for name, value in subject.settings.items()]
    words = {"object_size": "Typical object", "chosen": "Scale chosen", "scale": "Scale"}
    words |= {"tiles": "Tiles", "device": "Computed on"}
    for key, name in words.items():
        value = told.get(key)
        if value not in (None, ""):
            rows.append((name, f"{value:.0f} px" if key == "object_size" else value))
    return section(
        "Thresholds and settings",
        facts(rows),
        *(paragraph(str(note), "note") for note in notes),
        kind="together",
    )


def record(subject: Subject) -> str:
    """What the model was trained on, and how well it did there."""
    info = subject.model
    if not info:
        return ""
    training = info.get("training") or {}
    images = training.get("images") or {}
    rows = [
        ("Name", info.get("name")),
        ("Classes", ", ".join(map(str, info.get("classes", [])))),
        ("Stain front end", _front(info)),
        ("Trained", training.get("date")),
        ("On", training.get("data")),
        ("Images", ", ".join(f"{n} {part}" for part, n in images.items())),
        ("Epochs", training.get("epochs")),
        ("Learned", training.get("scope")),
        ("Parent", training.get("parent")),
        ("Hash of the data", training.get("data_hash")),
        ("Trained with", _listed(training.get("versions") or {})),
    ]
    return section(
        "The model's record", facts(rows), _metrics(training.get("metrics")), kind="together"
    )


def _front(info: Mapping[str, Any]) -> str:
    if "components" not in info:
        return ""
    return f"{info['components']} components, {info.get('iterations')} steps"


def _metrics(metrics: Any) -> str:
    if not isinstance(metrics, Mapping):
        return ""
    rows = []
    for name, values in metrics.items():
        if isinstance(values, Mapping) and "mAP50" in values:
            numbers = [values.get(key, np.nan) for key in ("mAP50", "mAP50-95")]
            rows.append([escaped(name), escaped(values.get("images", "–")), *map(_three, numbers)])
    return table(["measured on", "images", "mAP50", "mAP50-95"], rows) if rows else ""


def _three(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "–"


def provenance(subject: Subject) -> str:
    """Versions, hashes and the date: what is needed to get the same numbers again."""
    rows: list[tuple[str, object]] = [("Report made", subject.date.isoformat(timespec="seconds"))]
    rows += [(str(name), value) for name, value in subject.facts.items()]
    rows.append(("Versions", _listed(versions())))
    hashes = dict(subject.hashes) or {"image (pixels)": pixels_hash(subject.pixels)}
    digests = [
        [escaped(f"SHA-256 of {what}"), f'<span class="hash">{escaped(digest)}</span>']
        for what, digest in hashes.items()
    ]
    listed = table(["", ""], digests, numbers=False)
    return section("Where it comes from", facts(rows), listed, kind="together")


def _listed(versions_: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions_.items())
