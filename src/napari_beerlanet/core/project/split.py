"""The train/validation split of a project's images.

All of an image goes to one split, so that nothing is validated on pixels that were trained on. A
seeded hash of the image's id decides, within bounds that keep both splits filled; what has been
decided is kept when images are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.storage import seeded_fraction

TRAIN, VAL = "train", "val"
VALIDATION_FRACTION = 0.2
"""Fraction of images that validate."""


@dataclass(frozen=True)
class Split:
    """The split of each image by id, and sentences on images that changed theirs."""

    by_image: dict[str, str]
    notes: list[str] = field(default_factory=list)


def split_images(
    boxes: Mapping[str, int],
    before: Mapping[str, str],
    seed: int = 0,
    fraction: float = VALIDATION_FRACTION,
) -> Split:
    """Splits for images, each with its number of boxes; those that have one `before` keep it.

    An image moves only if validation or training had no box otherwise, which a note says. With one
    image that has boxes, it trains; see `split_single_image`.
    """
    splits = {name: before[name] for name in boxes if before.get(name) in (TRAIN, VAL)}
    new = sorted(boxes.keys() - splits.keys(), key=lambda name: (seeded_fraction(seed, name), name))
    for name in (*(n for n in new if boxes[n]), *(n for n in new if not boxes[n])):
        splits[name] = _choose_split(name, boxes, splits, seed, fraction)
    moved = _fill_empty_split(boxes, splits, seed)
    notes = [
        f"{name} is now used for {'validation' if splits[name] == VAL else 'training'}, as no "
        "other image with boxes was left for it."
        for name in moved
        if name in before
    ]
    return Split(splits, notes)


def _choose_split(
    name: str, boxes: Mapping[str, int], splits: Mapping[str, str], seed: int, fraction: float
) -> str:
    """By chance, within bounds on how many validate."""
    filled = [split for other, split in splits.items() if boxes[other]]
    validating, total = filled.count(VAL), len(filled) + 1
    if not boxes[name]:  # a background picture proves little, and is never needed to validate
        return VAL if validating and seeded_fraction(seed, name) < fraction else TRAIN
    minimum = max(1, math.floor(fraction * total / 2)) if total > 1 else 0
    maximum = min(max(1, math.ceil(1.5 * fraction * total)), total - 1)
    if validating < minimum and TRAIN in filled:
        return VAL
    if validating >= maximum or TRAIN not in filled:
        return TRAIN
    return VAL if seeded_fraction(seed, name) < fraction else TRAIN


def _fill_empty_split(boxes: Mapping[str, int], splits: dict[str, str], seed: int) -> list[str]:
    """Move an image where one split has no box and the other can spare one."""
    filled = sorted(
        (n for n in splits if boxes[n]), key=lambda name: (seeded_fraction(seed, name), name)
    )
    moved = []
    for split, other in ((VAL, TRAIN), (TRAIN, VAL)):
        spare = [name for name in filled if splits[name] == other]
        if not any(splits[name] == split for name in filled) and len(spare) > 1:
            splits[spare[0]] = split
            moved.append(spare[0])
    if len(filled) == 1 and splits[filled[0]] == VAL:
        splits[filled[0]] = TRAIN
        moved.append(filled[0])
    return moved


def split_single_image(
    groups: Sequence[int], boxes: Sequence[int], seed: int = 0
) -> list[str] | None:
    """Splits (n,) for the crops of a single image, or None if it cannot be split.

    `groups` (n,) says which crops share pixels, `boxes` (n,) how many boxes each has. The group
    that comes nearest to a fifth of the boxes validates.
    """
    count = dict.fromkeys(groups, 0)
    for group, number in zip(groups, boxes, strict=True):
        count[group] += number
    filled = [group for group, number in count.items() if number]
    if len(filled) < 2:
        return None
    wanted = VALIDATION_FRACTION * sum(count.values())
    best = min(filled, key=lambda g: (abs(count[g] - wanted), seeded_fraction(seed, str(g))))
    return [VAL if group == best else TRAIN for group in groups]


def describe_split(splits: Iterable[str], one: str = "") -> list[str]:
    """Sentences on the split; `one`: "", or how a single image is split, "regions" or "same"."""
    given = list(splits)
    validating = given.count(VAL)
    if not given:
        return ["No image has been added yet."]
    if one == "regions":
        return [
            "Only one image has boxes: one of its regions is used for validation, the others for "
            "training. The metrics hold for this image alone; add another one."
        ]
    if one == "same":
        return [
            "Only one image has boxes, and it cannot be split: validation uses the training crops, "
            "so the metrics will be optimistic. Add another image, or mark a second region away "
            "from the first."
        ]
    few = " One image proves little: add more when you can." if validating == 1 else ""
    training = count_of(len(given) - validating, "image")
    return [
        f"{training} for training, {validating} for validation; all crops of an image are in one "
        f"split.{few}"
    ]
