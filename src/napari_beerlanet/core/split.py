"""Which images teach and which validate.

All of an image goes to one side, so that nothing is validated on what was learned by heart. A
seeded hash of the image's id decides, within bounds that keep both sides filled; what has been
decided is kept when images are added.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

TRAIN, VAL = "train", "val"
SHARE = 0.2
"""Share of images that validate."""


@dataclass(frozen=True)
class Split:
    """The side of each image by id, and what people should know about it."""

    sides: dict[str, str]
    notes: list[str] = field(default_factory=list)


def chance(seed: int, name: str) -> float:
    """A number from 0 to 1 that depends on nothing but these two."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def assign(
    boxes: Mapping[str, int], before: Mapping[str, str], seed: int = 0, share: float = SHARE
) -> Split:
    """Sides for images, each with its number of boxes; those that have one `before` keep it.

    An image moves only if validation or training had no box otherwise, and that is told. With one
    image that has boxes, it trains; see `split_one`.
    """
    sides = {name: before[name] for name in boxes if before.get(name) in (TRAIN, VAL)}
    new = sorted(boxes.keys() - sides.keys(), key=lambda name: (chance(seed, name), name))
    for name in (*(n for n in new if boxes[n]), *(n for n in new if not boxes[n])):
        sides[name] = _side(name, boxes, sides, seed, share)
    moved = _fill(boxes, sides, seed)
    notes = [
        f"{name} now {'validates' if sides[name] == VAL else 'trains'}, as nothing with boxes was "
        "left to do so."
        for name in moved
        if name in before
    ]
    return Split(sides, notes)


def _side(
    name: str, boxes: Mapping[str, int], sides: Mapping[str, str], seed: int, share: float
) -> str:
    """By chance, within bounds on how many validate."""
    filled = [side for other, side in sides.items() if boxes[other]]
    validating, total = filled.count(VAL), len(filled) + 1
    if not boxes[name]:  # a background picture proves little, and is never needed to validate
        return VAL if validating and chance(seed, name) < share else TRAIN
    least = max(1, math.floor(share * total / 2)) if total > 1 else 0
    most = min(max(1, math.ceil(1.5 * share * total)), total - 1)
    if validating < least and TRAIN in filled:
        return VAL
    if validating >= most or TRAIN not in filled:
        return TRAIN
    return VAL if chance(seed, name) < share else TRAIN


def _fill(boxes: Mapping[str, int], sides: dict[str, str], seed: int) -> list[str]:
    """Move an image where one side has no box and the other can spare one."""
    filled = sorted((n for n in sides if boxes[n]), key=lambda name: (chance(seed, name), name))
    moved = []
    for side, other in ((VAL, TRAIN), (TRAIN, VAL)):
        spare = [name for name in filled if sides[name] == other]
        if not any(sides[name] == side for name in filled) and len(spare) > 1:
            sides[spare[0]] = side
            moved.append(spare[0])
    if len(filled) == 1 and sides[filled[0]] == VAL:
        sides[filled[0]] = TRAIN
        moved.append(filled[0])
    return moved


def split_one(groups: Sequence[int], boxes: Sequence[int], seed: int = 0) -> list[str] | None:
    """Sides (n,) for the pieces of an only image, or None if it cannot be split.

    `groups` (n,) says which pieces share pixels, `boxes` (n,) how many boxes each has. The group
    that comes nearest to a fifth of the boxes validates.
    """
    count = dict.fromkeys(groups, 0)
    for group, number in zip(groups, boxes, strict=True):
        count[group] += number
    filled = [group for group, number in count.items() if number]
    if len(filled) < 2:
        return None
    wanted = SHARE * sum(count.values())
    best = min(filled, key=lambda g: (abs(count[g] - wanted), chance(seed, str(g))))
    return [VAL if group == best else TRAIN for group in groups]


def describe(sides: Iterable[str], one: str = "") -> list[str]:
    """Sentences on what is done; `one`: "", or how an only image is used, "regions" or "same"."""
    given = list(sides)
    validating = given.count(VAL)
    if not given:
        return ["No image has been added yet."]
    if one == "regions":
        return [
            "Only one image has boxes: one of its regions validates what is learned from the "
            "others. The figures hold for this slide alone; add another image for more."
        ]
    if one == "same":
        return [
            "Only one image has boxes, and it cannot be split: training is validated on the "
            "images it learns from, so the figures will flatter. Add another image, or mark a "
            "second region apart from the first."
        ]
    few = " One image proves little: add more when you can." if validating == 1 else ""
    trains, proves = count_of(len(given) - validating, "image"), count_of(validating, "image")
    return [
        f"{trains} {'trains' if len(given) - validating == 1 else 'train'} and {proves} "
        f"{'validates' if validating == 1 else 'validate'}; all of an image is on one side.{few}"
    ]


def count_of(number: int, one: str, many: str = "") -> str:
    """ "1 image", "3 images"; `many` where an s is not enough."""
    return f"1 {one}" if number == 1 else f"{number} {many or one + 's'}"
