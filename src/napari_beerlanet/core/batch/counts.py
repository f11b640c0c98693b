"""Counts of all images of a study in one table: per image and class, with sums and intervals.

A count never stands without what is known against it: images that failed or are out of the model's
domain, and what the model does not know.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from napari_beerlanet.core.batch.inputs import DETECTIONS_SUFFIX
from napari_beerlanet.core.batch.manifest import MANIFEST_FILE, RECORDS_FOLDER
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.boxes.classes import (
    Parasitaemia,
    parasitaemia,
    poisson_interval,
    wilson_interval,
)
from napari_beerlanet.core.checkpoints.info import limits_text
from napari_beerlanet.core.common.messages import count_of, format_percent
from napari_beerlanet.core.common.storage import atomic_path, read_json_or_empty

_COUNT_PREFIX = "count "  # of a class's column in the summary
_BOX_FILES = (f"{DETECTIONS_SUFFIX}.csv", f"{DETECTIONS_SUFFIX}.geojson")
_MAX_NAMED_IMAGES = 3
ALL_IMAGES = "all images"
"""What the row of sums is called."""


@dataclass(frozen=True)
class ImageCounts:
    """An image of a study: its `counts` by class, {} where nothing was detected in it yet.

    `area` in mm² is that of the tissue, or else of the image, None where the pixel size is not
    known. `warnings` say in what it is unlike the training, `error` why it failed. `boxes` is the
    file of its detections.
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
        """The share of infected red cells, None where classes are not named so."""
        return parasitaemia(self.counts)

    @property
    def remark(self) -> str:
        """What is known against its counts."""
        return " ".join(filter(None, (self.error, self.warnings, self.notes)))


@dataclass(frozen=True)
class StudyCounts:
    """All images of a study, in its order; `colours` "#rrggbb" by class, `confidence` of boxes.

    `limits` say what the model does not know, "" where its checkpoint says nothing.
    """

    images: Sequence[ImageCounts]
    limits: str = ""
    colours: dict[str, str] = field(default_factory=dict)
    confidence: float = 0.0

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
        images = [_read_image(out, entry, present) for entry in listed if isinstance(entry, dict)]
        info = _model_info(model)
        colours = dict(zip(info.get("classes", []), info.get("colours") or [], strict=False))
        return cls(images, limits_text(info), colours, present.confidence)

    @cached_property
    def counted(self) -> list[ImageCounts]:
        """Images whose objects were counted."""
        return [image for image in self.images if image.counted]

    @cached_property
    def classes(self) -> list[str]:
        """Of all images, in the order of the model."""
        return list(dict.fromkeys(name for image in self.counted for name in image.counts))

    @cached_property
    def sum(self) -> ImageCounts:
        """Of all images; its area is known where that of every one is."""
        counts = {name: sum(i.counts.get(name, 0) for i in self.counted) for name in self.classes}
        areas = [image.area for image in self.counted]
        known = [area for area in areas if area]
        whole = sum(known) if known and len(known) == len(areas) else None
        return ImageCounts(ALL_IMAGES, "", "done", counts, whole)

    @property
    def has_areas(self) -> bool:
        """Whether cells per mm² are known of any image."""
        return any(image.area for image in self.counted)

    # --- what is to be said -----------------------------------------------------------------------

    def summary(self) -> str:
        """The sums in one sentence each, with 95 % intervals."""
        total = self.sum
        text = f"{count_of(total.total, 'cell')} in {count_of(len(self.counted), 'image')}"
        shares = []
        for name, count in total.counts.items():
            share = ""
            if total.total:
                low, high = wilson_interval(count, total.total)
                part = format_percent(count / total.total)
                share = f" ({part}; 95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
            shares.append(f"{name} {count:,}{share}")
        sentences = [f"{text}: {', '.join(shares)}." if shares else f"{text}."]
        interval = total.per_mm2_interval()
        if total.area and interval is not None:
            sentences.append(
                f"{total.per_mm2():,.0f} per mm² (95 % interval {interval[0]:,.0f} to "
                f"{interval[1]:,.0f}) on {total.area:.3g} mm²."
            )
        if total.parasitaemia is not None:
            sentences.append(f"Parasitaemia {total.parasitaemia} of the red cells.")
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
        if self.limits:
            sentences.append(self.limits)
        return sentences

    # --- the table --------------------------------------------------------------------------------

    def header(self) -> list[str]:
        """Names of the columns of `rows`."""
        per_mm2 = [f"{name} per mm2{end}" for name in self.classes for end in ("", " low", " high")]
        infected = ["parasitaemia", "parasitaemia low", "parasitaemia high"]
        return [
            *("image", "path", "status", "total", *self.classes),
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
        if self.has_areas:
            row.append("" if image.area is None else image.area)
            for name in self.classes:
                interval = image.per_mm2_interval(name)
                row += ["", "", ""] if interval is None else [image.per_mm2(name), *interval]
        if self.sum.parasitaemia is not None:
            share = image.parasitaemia
            row += ["", "", ""] if share is None else [share.share, *share.interval]
        remark = image.remark if image is not self.sum else " ".join(self.reservations())
        return [*row, remark]

    def text(self, separator: str = ",") -> str:
        """The table as CSV, or with another separator."""
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator="\n")
        writer.writerow(self.header())
        writer.writerows([_rounded(value) for value in row] for row in self.rows())
        return text.getvalue()

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table, whole or not at all; spreadsheets read its UTF-8."""
        with atomic_path(path) as unfinished:
            unfinished.write_bytes(self.text().encode("utf-8-sig"))


def _read_image(out: Path, entry: dict[str, Any], settings: StudySettings) -> ImageCounts:
    name, path, status = (str(entry.get(key, "")) for key in ("name", "path", "status"))
    record = read_json_or_empty(out / RECORDS_FOLDER / f"{name}.json")
    row = record.get("row")
    # The record is written first: the image of a manifest that still waits may be done.
    current = isinstance(row, dict) and settings.has_hash(record.get("settings"))
    if status == "failed" or not current or not isinstance(row, dict):
        status = status if status == "failed" else "waiting"
        return ImageCounts(name, path, status, error=str(entry.get("error", "")))
    counts = {
        column.removeprefix(_COUNT_PREFIX): int(value)
        for column, value in row.items()
        if column.startswith(_COUNT_PREFIX) and isinstance(value, int)
    }
    area = row.get("tissue_mm2", row.get("mm2"))
    written = [place for place in record.get("outputs", {}) if place.endswith(_BOX_FILES)]
    return ImageCounts(
        name,
        path,
        status if status in ("done", "skipped") else "done",
        counts,
        float(area) if isinstance(area, (int, float)) and area > 0 else None,
        str(row.get("warnings") or ""),
        str(row.get("notes") or ""),
        boxes=out / min(written, key=lambda place: not place.endswith(".csv")) if written else None,
    )


def _model_info(model: str) -> dict[str, Any]:
    from napari_beerlanet.core.checkpoints.checkpoint import read_info

    try:
        return read_info(model)
    except (OSError, ValueError):  # moved since
        return {}


def _named(images: Sequence[ImageCounts]) -> str:
    names = [image.name for image in images[:_MAX_NAMED_IMAGES]]
    more = len(images) - len(names)
    return ", ".join([*names, *([f"and {more:,} more"] if more else [])])


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _rounded(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
