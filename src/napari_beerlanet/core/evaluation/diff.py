"""Difference of two results on one image, before and after: gained, lost, relabelled, rescored.

And of two models on many images: whether they take cells for other sizes or other classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.matching import match_greedy, overlap_pairs
from napari_beerlanet.core.common.messages import count_of, shortened
from napari_beerlanet.core.common.progress import (
    Report,
    renamed,
    report_progress,
    subprogress,
)
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import ImageError

if TYPE_CHECKING:  # panels load this module, and torch only when they work
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.formats.dataset import Dataset, LabelledImage

Indices = npt.NDArray[np.int64]
IndexPairs = npt.NDArray[np.int64]

SAME_OBJECT_IOU = 0.5
"""Intersection over union from which two boxes are one object."""
MIN_SCORE_CHANGE = 0.1
"""Difference of scores that counts as a change."""
_MUCH = 4 / 3  # the factor from which sizes or shares differ "by more than a third"
_ENOUGH_BOXES = 3  # that tell a size
_MAX_IMAGES = 64  # that two models are compared on
MAX_COMPARED_PIXELS = 16_000_000
"""Images that are larger are not compared."""


@dataclass(frozen=True, eq=False)
class DetectionDiff:
    """Indices into `before` and `after`.

    `gained` (g,) into after, `lost` (l,) into before; `relabelled`, `rescored` and `unchanged`
    (k, 2) pairs of both: of another class, of the same class and another score, and the rest.
    """

    before: Detections
    after: Detections
    gained: Indices
    lost: Indices
    relabelled: IndexPairs
    rescored: IndexPairs
    unchanged: IndexPairs

    @property
    def changed(self) -> bool:
        """Whether there is any difference to report."""
        return any(len(part) for part in (self.gained, self.lost, self.relabelled, self.rescored))

    def summary(self) -> str:
        """For people: "4 boxes gained, 1 lost, 2 of another class, 3 of another confidence …"."""
        if not self.changed:
            return (
                f"Nothing has changed: {count_of(len(self.unchanged), 'box', 'boxes')} as before."
            )
        parts = [
            f"{count_of(len(self.gained), 'box', 'boxes')} gained",
            f"{len(self.lost)} lost",
            f"{len(self.relabelled)} of another class",
            f"{len(self.rescored)} of another confidence",
            f"{len(self.unchanged)} as before",
        ]
        return ", ".join(parts) + "."


def describe_against(diff: DetectionDiff, annotations: Annotations) -> str:
    """Of the boxes gained and lost, how many are annotated: right, or right before.

    Empty where none was gained or lost.
    """
    names = list(dict.fromkeys([*diff.before.names, *diff.after.names, *annotations.names]))
    truth = _common_labels(annotations, names)

    def right(detections: Detections, which: Indices) -> int:
        pairs = overlap_pairs(detections.xyxy, annotations.xyxy.astype(np.float32))
        order, labels = np.arange(len(detections)), _common_labels(detections, names)
        return int((match_greedy(pairs, order, SAME_OBJECT_IOU, labels, truth)[which] >= 0).sum())

    gained, lost = right(diff.after, diff.gained), right(diff.before, diff.lost)
    parts = []
    if len(diff.gained):
        parts.append(
            f"{gained} of {len(diff.gained)} gained {'is' if gained == 1 else 'are'} right"
        )
    if len(diff.lost):
        parts.append(f"{lost} of {len(diff.lost)} lost {'was' if lost == 1 else 'were'} right")
    return f"Against the annotations: {', '.join(parts)}." if parts else ""


def diff_detections(
    before: Detections,
    after: Detections,
    iou: float = SAME_OBJECT_IOU,
    min_score_change: float = MIN_SCORE_CHANGE,
) -> DetectionDiff:
    """Compare the detections themselves, not their candidates; classes go by name.

    Boxes of one class are paired first, the largest scores before others, and then what is left
    of both whatever its class.
    """
    names = list(dict.fromkeys([*before.names, *after.names]))
    old, new = _common_labels(before, names), _common_labels(after, names)
    pairs = overlap_pairs(after.xyxy, before.xyxy)
    partner = match_greedy(pairs, np.arange(len(after)), iou, new, old)
    free = np.ones(len(before), bool)
    free[partner[partner >= 0]] = False
    alone, rest = np.flatnonzero(partner < 0), np.flatnonzero(free)
    other_class = match_greedy(pairs, alone, iou, free=free)[alone]
    matched = other_class >= 0
    relabelled = np.column_stack([other_class[matched], alone[matched]])
    same = np.flatnonzero(partner >= 0)
    both = np.column_stack([partner[same], same])
    step = np.abs(after.scores[both[:, 1]] - before.scores[both[:, 0]])
    rescored = step >= np.float32(min_score_change)
    return DetectionDiff(
        before,
        after,
        gained=alone[~matched],
        lost=np.setdiff1d(rest, relabelled[:, 0]),
        relabelled=relabelled,
        rescored=both[rescored],
        unchanged=both[~rescored],
    )


def _common_labels(boxes: Detections | Annotations, names: list[str]) -> Indices:
    """Labels (n,) as places in `names`."""
    places = {name: k for k, name in enumerate(names)}
    return np.array([places[name] for name in boxes.names], np.int64)[boxes.labels]


# --- two models on many images -------------------------------------------------------------------


@dataclass(frozen=True)
class ImageChange:
    """What a model and its parent take one image for, the parent first.

    `sizes` are those of cells in pixels, None where they cannot be compared; `counts` the numbers
    of boxes by class, of classes that both know.
    """

    image: str
    sizes: tuple[float, float] | None
    counts: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, image: str, before: Detections, after: Detections) -> ImageChange:
        """From what both have found with automatic cell size."""
        new = {name.casefold(): k for k, name in enumerate(after.names)}
        places = {
            name: (k, new[name.casefold()])
            for k, name in enumerate(before.names)
            if name.casefold() in new
        }
        counts = {
            name: (int((before.labels == old).sum()), int((after.labels == now).sum()))
            for name, (old, now) in places.items()
        }
        sizes = None
        if len(places) == len(before.names) == len(after.names):
            old, now = before.report.get("object_size"), after.report.get("object_size")
            if len(before) >= _ENOUGH_BOXES and old and now:
                sizes = float(old), float(now)
        elif counts:  # models of other classes mean other objects by the cell size
            name = max(counts, key=lambda name: min(counts[name]))
            if min(counts[name]) >= _ENOUGH_BOXES:
                label, new_label = places[name]
                sizes = _median_size(before, label), _median_size(after, new_label)
        return cls(image, sizes, counts)

    @property
    def size_factor(self) -> float:
        """By which the sizes differ, from 1 on."""
        return max(self.sizes) / min(self.sizes) if self.sizes else 1.0


def _median_size(found: Detections, label: int) -> float:
    sides = found.xyxy[found.labels == label].reshape(-1, 2, 2)
    return round(float(np.median(np.sqrt(np.prod(sides[:, 1] - sides[:, 0], axis=1)))), 2)


@dataclass(frozen=True)
class ModelChange:
    """How a model's detections differ from its parent's: `images` of `total`, and the open one.

    `code` is for programs, `text` a sentence for people, "" where there is nothing to say.
    """

    parent: str
    images: tuple[ImageChange, ...]
    total: int
    opened: ImageChange | None = None

    @property
    def code(self) -> Literal["alike", "sizes", "shares", "sizes and shares"]:
        """What differs by more than a third."""
        if self._of_other_size():
            return "sizes" if self._other_share() is None else "sizes and shares"
        return "alike" if self._other_share() is None else "shares"

    @property
    def text(self) -> str:
        """What differs, on how many images, and what to do."""
        other, share, parts = self._of_other_size(), self._other_share(), []
        if other:
            far = max(other, key=lambda one: one.size_factor)
            assert far.sizes is not None
            some = [one for one in other if one is not self.opened]
            where = f"{len(some)} of {self._image_count()}" * bool(some)
            if len(some) < len(other):
                where += " and on the open one" if some else "the open image"
            place = "" if far is self.opened else f" on {shortened(far.image)}"
            parts.append(
                f"On {where} the new model assumes cells of another size than “{self.parent}” "
                f"({far.sizes[1]:.0f} instead of {far.sizes[0]:.0f} pixels{place})"
            )
        if share is not None:
            name, (old, new), (before, after) = share
            where = self._image_count() + " and the open one" * (self.opened is not None)
            verb = "is" if new == 1 else "are"
            if other:
                first, of_parent = f"and on {where} {new} of its {after} boxes", ""
            else:
                first = f"On {where} {new} of {after} boxes of the new model"
                of_parent = f" of “{self.parent}”"
            parts.append(f"{first} {verb} {name} instead of {old} of {before}{of_parent}")
        if not parts:
            return ""
        or_size = ", or set the cell size" if other else ""
        return f"{', '.join(parts)}; check its detections before you keep it{or_size}."

    def _image_count(self) -> str:
        count = len(self.images)
        return count_of(count, "image") + f" (of {self.total:,})" * (count < self.total)

    def _compared(self) -> list[ImageChange]:
        return [*self.images, *([] if self.opened is None else [self.opened])]

    def _of_other_size(self) -> list[ImageChange]:
        return [one for one in self._compared() if one.size_factor > _MUCH]

    def _other_share(self) -> tuple[str, list[int], list[int]] | None:
        """The class whose share has grown most, its boxes and all; None if none differs by much.

        What two standard errors explain may be chance.
        """
        compared = self._compared()
        names = list(compared[0].counts) if compared else []  # the same on every image
        table = [[one.counts[name] for name in names] for one in compared]
        boxes = np.array(table, np.int64).reshape(len(table), len(names), 2).sum(axis=0)
        total = boxes.sum(axis=0)
        if not total.all():
            return None
        shares, pooled = boxes / total, boxes.sum(axis=1) / total.sum()
        low, high = shares.min(axis=1), shares.max(axis=1)
        chance = 2 * np.sqrt(pooled * (1 - pooled) * (1 / total).sum())
        much = (high > _MUCH * low) & (high - low > chance)
        if not much.any():
            return None
        k = int(np.argmax(np.where(much, shares[:, 1] - shares[:, 0], -np.inf)))
        return names[k], boxes[k].tolist(), total.tolist()

    def with_open_image(self, before: Detections, after: Detections) -> ModelChange:
        """The same with what both find on the image that the user looks at."""
        return replace(self, opened=ImageChange.of("", before, after))

    def summary(self) -> dict[str, Any]:
        """For an event: `code`, `text` and the number of images."""
        return {"code": self.code, "text": self.text, "images": len(self.images)}

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"code": self.code, "text": self.text, **asdict(self)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ModelChange:
        """What `to_dict` gave."""

        def image(one: Mapping[str, Any]) -> ImageChange:
            counts = {name: (old, new) for name, (old, new) in one["counts"].items()}
            return ImageChange(one["image"], one["sizes"] and tuple(one["sizes"]), counts)

        images = tuple(image(one) for one in stored["images"])
        opened = stored["opened"] and image(stored["opened"])
        return cls(stored["parent"], images, stored["total"], opened)


def images_to_compare(dataset: Dataset) -> list[LabelledImage]:
    """All images of a dataset, or of many some, evenly from the first to the last."""
    items = [item for split in dataset.splits.values() for item in split]
    count = min(_MAX_IMAGES, len(items))
    return [items[k] for k in np.linspace(0, len(items) - 1, count).round().astype(int)]


def compare_on_images(
    before: Detector,
    after: Detector,
    items: Sequence[LabelledImage],
    total: int,
    report: Report | None = None,
) -> ModelChange:
    """Run a model and its parent with automatic cell size on images, `total` being all there are.

    Images that are very large or cannot be read are left out.
    """
    images = []
    for number, item in enumerate(items):
        what = f"comparing with the model before, image {number + 1} of {len(items)}"
        report_progress(report, number, len(items), what)
        try:
            image = read_image(item.image)
        except (FileError, ImageError):
            continue
        if math.prod(image.pixels.shape[:2]) > MAX_COMPARED_PIXELS:
            continue
        found = []
        for k, model in enumerate((before, after)):
            start = (number + k / 2) / len(items)
            part = subprogress(report, start, start + 0.5 / len(items))
            found.append(
                model.detect(
                    image.pixels,
                    object_size="auto",
                    pixel_size=image.pixel_size,
                    densities=False,
                    report=renamed(part, what),
                )
            )
        images.append(ImageChange.of(item.image.name, *found))
    report_progress(report, 1, 1, "done")
    return ModelChange(str(before.info.get("name", "")), tuple(images), total)
