"""Counts of all images of a study in one table: per class and cell type, with sums and intervals.

A count never stands without what is known against it: images that failed or are out of the model's
domain, and what the model does not know.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet._version import __version__
from napari_beerlanet.core.batch.inputs import DETECTIONS_SUFFIX
from napari_beerlanet.core.batch.manifest import MANIFEST_FILE
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.boxes.classes import (
    Parasitaemia,
    Proportion,
    assign_colours,
    infected_types,
    parasitaemia,
    poisson_interval,
    proportions,
)
from napari_beerlanet.core.boxes.detections import PROBABILITY_COLUMN, TYPE_COLUMN
from napari_beerlanet.core.checkpoints.info import model_limits
from napari_beerlanet.core.common.jobs import RECORDS_FOLDER
from napari_beerlanet.core.common.messages import count_of, format_percent
from napari_beerlanet.core.common.storage import atomic_path, csv_cell, read_json_or_empty
from napari_beerlanet.core.formats import read_detections
from napari_beerlanet.core.images.slide import open_slide
from napari_beerlanet.core.stains.slide_pixels import SlidePixels

if TYPE_CHECKING:
    from napari_beerlanet.core.report.pictures import CertaintyGallery

_BOX_FILES = (f"{DETECTIONS_SUFFIX}.csv", f"{DETECTIONS_SUFFIX}.geojson")
_MAX_NAMED_IMAGES = 3
_MAX_PAGE_FIELDS = 6
ALL_IMAGES = "all images"
"""What the row of sums is called."""


@dataclass(frozen=True)
class ImageCounts:
    """An image of a study: its `counts` by class, {} where nothing was detected in it yet.

    `types`: the cells of each type, {} without a classifier. `area` in mm² is that of the tissue,
    or else of the image, None where the pixel size is not known. `warnings` say in what it is
    unlike the training, `error` why it failed. `boxes` is the file of its detections.
    """

    name: str
    path: str
    status: str
    counts: dict[str, int] = field(default_factory=dict)
    area: float | None = None
    warnings: str = ""
    notes: str = ""
    error: str = ""
    boxes: Path | None = None
    types: dict[str, int] = field(default_factory=dict)

    @property
    def counted(self) -> bool:
        """Whether its objects were counted, in this run or an earlier one."""
        return self.status in ("done", "skipped")

    @property
    def total(self) -> int:
        """Objects of all classes."""
        return sum(self.counts.values())

    def per_mm2(self, name: str | None = None) -> float | None:
        """Objects of a class, or of all, per mm²."""
        count = self.total if name is None else self.counts.get(name, 0)
        return count / self.area if self.area else None

    def per_mm2_interval(self, name: str | None = None) -> tuple[float, float] | None:
        """The 95 % interval of that, if objects lie at random."""
        if not self.area:
            return None
        low, high = poisson_interval(self.total if name is None else self.counts.get(name, 0))
        return low / self.area, high / self.area

    @property
    def parasitaemia(self) -> Parasitaemia | None:
        """The share of infected red cells, None where neither classes nor types are named so."""
        return parasitaemia(self.counts, self.types)

    @property
    def type_shares(self) -> dict[str, Proportion]:
        """The share of each type in all cells that have one; {} where none has."""
        return proportions(self.types)

    @property
    def remark(self) -> str:
        """What is known against its counts."""
        return " ".join(filter(None, (self.error, self.warnings, self.notes)))


@dataclass(frozen=True)
class StudyCounts:
    """All images of a study, in its order; `colours` "#rrggbb" by class, `confidence` of boxes.

    `limits` say what the models do not know, "" where their checkpoints say nothing;
    `type_colours` are by type.
    """

    images: Sequence[ImageCounts]
    limits: str = ""
    colours: dict[str, str] = field(default_factory=dict)
    confidence: float = 0.0
    type_colours: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, out: str | os.PathLike[str]) -> StudyCounts | None:
        """Of the results in a folder, finished or not; None where there are none with counts."""
        out = Path(out)
        manifest = read_json_or_empty(out / MANIFEST_FILE)
        settings = manifest.get("settings")
        listed = manifest.get("images")
        if not isinstance(listed, list) or not isinstance(settings, dict):
            return None
        model = str(settings.get("model") or "")
        if not model:
            return None
        try:
            present = StudySettings(**settings)
        except ValueError:  # of a newer version
            return None
        digest = present.hash()
        images = [_read_image(out, entry, digest) for entry in listed if isinstance(entry, dict)]
        infos = [_model_info(name) for name in (model, present.classifier)]
        limits = " ".join(model_limits(*infos))
        colours, type_colours = (
            dict(zip(info.get("classes", []), info.get("colours") or [], strict=False))
            for info in infos
        )
        return cls(images, limits, colours, present.confidence, type_colours)

    @cached_property
    def counted(self) -> list[ImageCounts]:
        """Images whose objects were counted."""
        return [image for image in self.images if image.counted]

    @cached_property
    def classes(self) -> list[str]:
        """Of all images, in the order of the model."""
        return list(dict.fromkeys(name for image in self.counted for name in image.counts))

    @cached_property
    def types(self) -> list[str]:
        """Cell types of all images, in the order of the classifier."""
        return list(dict.fromkeys(name for image in self.counted for name in image.types))

    @cached_property
    def sum(self) -> ImageCounts:
        """Of all images; its area is known where that of every one is."""
        counts = {name: sum(i.counts.get(name, 0) for i in self.counted) for name in self.classes}
        types = {name: sum(i.types.get(name, 0) for i in self.counted) for name in self.types}
        areas = [image.area for image in self.counted]
        known = [area for area in areas if area]
        whole = sum(known) if known and len(known) == len(areas) else None
        return ImageCounts(ALL_IMAGES, "", "done", counts, whole, types=types)

    @property
    def has_areas(self) -> bool:
        """Whether cells per mm² are known of any image."""
        return any(image.area for image in self.counted)

    @property
    def has_white_cells(self) -> bool:
        """Whether there are white cells beside infected red cells."""
        infected = self.sum.parasitaemia
        return infected is not None and bool(infected.white_cells)

    # --- what is to be said -----------------------------------------------------------------------

    def summary(self) -> str:
        """The sums in one sentence each, with 95 % intervals."""
        total = self.sum
        text = f"{count_of(total.total, 'cell')} in {count_of(len(self.counted), 'image')}"
        shares = _share_list(total.counts)
        sentences = [f"{text}: {shares}." if shares else f"{text}."]
        if total.types:
            classified = count_of(sum(total.types.values()), "classified cell")
            sentences.append(f"{classified}: {_share_list(total.types)}.")
        interval = total.per_mm2_interval()
        if total.area and interval is not None:
            sentences.append(
                f"{total.per_mm2():,.0f} per mm² (95 % interval {interval[0]:,.0f} to "
                f"{interval[1]:,.0f}) on {total.area:.3g} mm²."
            )
        if total.parasitaemia is not None:
            sentences.append(_parasitaemia_text(total.parasitaemia))
        return " ".join(sentences)

    def reservations(self) -> list[str]:
        """What is known against the counts, in a sentence each."""
        failed = [image for image in self.images if image.status == "failed"]
        waiting = [image for image in self.images if image.status == "waiting"]
        unlike = [image for image in self.counted if image.warnings]
        sentences = []
        if failed:
            sentences.append(f"{count_of(len(failed), 'image')} failed: {_named(failed)}.")
        if waiting:
            sentences.append(f"{count_of(len(waiting), 'image')} not processed yet.")
        if unlike:
            one = "is out of domain, its counts are"
            several = "are out of domain, their counts are"
            what = one if len(unlike) == 1 else several
            sentences.append(
                f"{count_of(len(unlike), 'image')} {what} less reliable: {_named(unlike)}."
            )
        if self.classes:
            known = _listed(self.classes)
            sentences.append(
                f"The model only knows {known}: anything else is missed, or counted as one of "
                "these."
            )
        if self.types:
            sentences.append(
                f"The classifier only knows {_listed(self.types)}: every cell that it gets is "
                "called one of these."
            )
        if self.limits:
            sentences.append(self.limits)
        return sentences + (self.sum.parasitaemia.warnings if self.sum.parasitaemia else [])

    # --- the table --------------------------------------------------------------------------------

    def header(self) -> list[str]:
        """Names of the columns of `rows`."""
        per_mm2 = [f"{name} per mm2{end}" for name in self.classes for end in ("", " low", " high")]
        infected = ["parasitaemia", "parasitaemia low", "parasitaemia high"]
        infected += ["parasites per 100 white cells"] if self.has_white_cells else []
        typed = [f"type {name}" for name in self.types]
        typed += [f"{name} share{end}" for name in self.types for end in ("", " low", " high")]
        return [
            *("image", "path", "status", "total", *self.classes, *typed),
            *(["mm2", *per_mm2] if self.has_areas else []),
            *(infected if self.sum.parasitaemia is not None else []),
            "remarks",
        ]

    def rows(self) -> list[list[Any]]:
        """A row per image, and that of the sums last; "" where there is no number."""
        return [self._row(image) for image in [*self.images, self.sum]]

    def _row(self, image: ImageCounts) -> list[Any]:
        counted = image.counted
        row: list[Any] = [image.name, image.path, image.status, image.total if counted else ""]
        row += [image.counts.get(name, 0) if counted else "" for name in self.classes]
        row += [image.types.get(name, 0) if counted else "" for name in self.types]
        shares = image.type_shares
        for name in self.types:
            part = shares.get(name)
            row += ["", "", ""] if part is None else [part.share, *part.interval]
        if self.has_areas:
            row.append("" if image.area is None else image.area)
            for name in self.classes:
                interval = image.per_mm2_interval(name)
                row += ["", "", ""] if interval is None else [image.per_mm2(name), *interval]
        if self.sum.parasitaemia is not None:
            share = image.parasitaemia
            row += ["", "", ""] if share is None else [share.share, *share.interval]
            if self.has_white_cells:
                per_100 = None if share is None else share.per_100_white_cells
                row.append("" if per_100 is None else per_100)
        remark = image.remark if image is not self.sum else " ".join(self.reservations())
        return [*row, remark]

    def text(self, separator: str = ",") -> str:
        """The table as CSV, or with another separator."""
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator="\n")
        writer.writerow(map(csv_cell, self.header()))
        writer.writerows([csv_cell(_rounded(value)) for value in row] for row in self.rows())
        return text.getvalue()

    def write_page(self, path: str | os.PathLike[str], settings: StudySettings) -> None:
        """Write the page that a laboratory files on a smear, all its images together."""
        from datetime import datetime

        from napari_beerlanet.core.report.report import write_page
        from napari_beerlanet.core.report.sections import page_content

        infected = self.sum.parasitaemia
        colours = assign_colours(self.types, preferred=self.type_colours)
        now = datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z")
        models = {"Detector": settings.model, "Classifier": settings.classifier}
        facts: list[tuple[str, object]] = [(k, Path(v).stem) for k, v in models.items() if v]
        facts.append(("Minimum confidence", f"{settings.confidence:.2f}"))
        facts.append(("Software", f"napari-beerlanet {__version__}"))
        hashes = {
            "the detector": settings.model_sha256,
            "the classifier": settings.classifier_sha256,
        }
        content = page_content(
            Path(path).absolute().parent.name,
            f"{count_of(len(self.counted), 'field')} · {now}",
            infected,
            colours,
            self.reservations(),
            self._infected_gallery(colours),
            facts,
            {name: digest for name, digest in hashes.items() if digest},
        )
        write_page(path, content | {"fields": self._field_rows()})

    def _field_rows(self) -> list[list[Any]]:
        """Red cells and infected ones of each image, of many only the first."""
        from napari_beerlanet.core.report.sections import RowName

        rows: list[list[Any]] = []
        for image in self.counted[:_MAX_PAGE_FIELDS]:
            found = image.parasitaemia
            numbers = ("0", "0") if found is None else (f"{found.cells:,}", f"{found.infected:,}")
            rows.append([RowName(image.name), *numbers])
        more = len(self.counted) - len(rows)
        return [*rows, *([[RowName(f"and {more:,} more"), "", ""]] if more else [])]

    def _infected_gallery(self, colours: Mapping[str, str]) -> CertaintyGallery:
        """The most and the least certain infected cells of all images."""
        from napari_beerlanet.core.report.pictures import (
            CertaintyGallery,
            most_and_least,
            typed_crop,
        )
        from napari_beerlanet.core.report.sections import MAX_PAGE_EXAMPLES

        types = infected_types(self.types)
        cells: list[tuple[float, str, ImageCounts, npt.NDArray[np.float32]]] = []
        for image in self.counted:
            if image.boxes is not None:
                cells += _cells_of_types(image, types)
        certainty = np.array([cell[0] for cell in cells], np.float64)
        crops: list[list[Any]] = []
        for rows in most_and_least(certainty, MAX_PAGE_EXAMPLES):
            crops.append([])
            for k in rows.tolist():
                _, name, image, box = cells[k]
                with suppress(OSError, ValueError), open_slide(image.path) as slide:  # if there
                    pixels: Any = SlidePixels(slide.levels)
                    crops[-1].append(typed_crop(pixels, box, certainty[k], name, colours[name]))
        return CertaintyGallery(*crops)

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table, whole or not at all; spreadsheets read its UTF-8."""
        with atomic_path(path) as unfinished:
            unfinished.write_bytes(self.text().encode("utf-8-sig"))


def _read_image(out: Path, entry: dict[str, Any], digest: str) -> ImageCounts:
    name, path, status = (str(entry.get(key, "")) for key in ("name", "path", "status"))
    record = read_json_or_empty(out / RECORDS_FOLDER / f"{name}.json")
    # The record is written first: the image of a manifest that still waits may be done.
    if status == "failed" or record.get("settings_sha256") != digest:
        status = status if status == "failed" else "waiting"
        return ImageCounts(name, path, status, error=str(entry.get("error", "")))
    written = [place for place in record["outputs"] if place.endswith(_BOX_FILES)]
    return ImageCounts(
        name,
        path,
        status if status in ("done", "skipped") else "done",
        record.get("counts", {}),
        record["mm2"],
        " ".join(record["warnings"]),
        " ".join(record["notes"]),
        boxes=out / min(written, key=lambda place: not place.endswith(".csv")) if written else None,
        types=record.get("types", {}),
    )


def _cells_of_types(
    image: ImageCounts, types: Sequence[str]
) -> list[tuple[float, str, ImageCounts, npt.NDArray[np.float32]]]:
    """The probability of one of the types, the type, image and box of each cell that has one."""
    assert image.boxes is not None
    try:
        found = read_detections(image.boxes)
    except ValueError:  # removed or changed since
        return []
    given = found.columns.get(TYPE_COLUMN, np.full(len(found), "", object))
    own = found.columns.get(PROBABILITY_COLUMN, np.ones(len(found)))
    each = [found.columns[f"P({name})"] for name in types if f"P({name})" in found.columns]
    certainty = np.sum(each, axis=0) if each and len(each) == len(types) else own
    return [
        (float(certainty[k]), str(given[k]), image, found.xyxy[k])
        for k in range(len(found))
        if given[k] in types
    ]


def _model_info(model: str) -> dict[str, Any]:
    from napari_beerlanet.core.checkpoints.checkpoint import read_info

    try:
        return read_info(model)
    except (OSError, ValueError):  # moved since
        return {}


def _share_list(counts: dict[str, int]) -> str:
    """ "RBC 90 (90 %; 95 % interval 82.6 to 94.5 %), …"."""
    shares = proportions(counts)
    texts = []
    for name, count in counts.items():
        share = ""
        if name in shares:
            low, high = shares[name].interval
            part = format_percent(shares[name].share)
            share = f" ({part}; 95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
        texts.append(f"{name} {count:,}{share}")
    return ", ".join(texts)


def _parasitaemia_text(infected: Parasitaemia) -> str:
    text = f"Parasitaemia {infected} of the red cells"
    if infected.per_100_white_cells is not None:
        text += f", {infected.per_100_white_cells:,.0f} parasites per 100 white cells"
    return f"{text}."


def _named(images: Sequence[ImageCounts]) -> str:
    names = [image.name for image in images[:_MAX_NAMED_IMAGES]]
    more = len(images) - len(names)
    return ", ".join([*names, *([f"and {more:,} more"] if more else [])])


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _rounded(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
