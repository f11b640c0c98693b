"""An image's pieces into a project, or out of it: which files come, go and change sides."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .annotations import Annotations
from .crops import Piece, Planned, cut
from .geometry import to_centres
from .journal import Batch
from .progress import Report, tell
from .projectfiles import (
    DATA,
    PROJECT,
    TABLE,
    Manifest,
    Row,
    write_data,
    write_manifest,
    write_table,
)
from .regions import Window, together
from .sources import Source
from .split import TRAIN, assign, count_of, split_one

_COMPRESSION = 4  # of PNG: half the time of the usual 6 for hardly larger files


@dataclass(frozen=True)
class Added:
    """What adding an image did: its id, side ("train", "val"), and what people should know."""

    id: str
    side: str
    pieces: int
    boxes: int
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class New:
    """A piece and the ids of the objects in it.

    `staged` are its label and image file, prepared, None where they are there.
    """

    row: Row
    staged: tuple[str, str] | None
    ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """What project.json and crops.csv will say, and sentences on what has moved."""

    manifest: Manifest
    rows: list[Row]
    notes: list[str]


def stage_pieces(
    batch: Batch,
    source: tuple[str, Source],
    rgb: Any,
    annotations: Annotations,
    planned: Sequence[Planned],
    side: int,
    grey: int,
    known: Mapping[str, Row],
    report: Report | None = None,
) -> list[New]:
    """Cut out and write what is planned of a source (id and facts), except for what is there."""
    new = []
    for number, plan in enumerate(planned):
        tell(report, number, len(planned), "cutting out")
        piece = cut(rgb, annotations, plan.window, side, grey)
        if piece.empty:
            continue
        ids = frozenset(piece.ids.tolist())
        image, label = _png(piece), _label(piece)
        row = _row(*source, plan, piece, side, image, label)
        old = known.get(row.file)
        if old is not None and all((batch.root / p).exists() for p in (old.image(), old.label())):
            new.append(New(replace(row, split=old.split), None, ids))
        else:
            new.append(New(row, (batch.put(label), batch.put(image)), ids))
    return new


def write_change(
    batch: Batch, manifest: Manifest, others: Sequence[Row], old: Sequence[Row], new: Sequence[New]
) -> Outcome:
    """Put a source's `new` pieces in place of its `old` ones, beside the `others`.

    Labels come before their image and go after it: at no moment is there an image that seems to
    have no objects.
    """
    before = [*others, *(n.row for n in new)]
    manifest, rows, notes = settle(manifest, before)
    sides = {row.file: row.split for row in rows}
    for piece in new:
        if piece.staged is not None:
            side = sides[piece.row.file]
            batch.move(piece.staged[0], piece.row.label(side))
            batch.move(piece.staged[1], piece.row.image(side))
    standing = [*others, *(n.row for n in new if n.staged is None)]
    for row in standing:
        if row.split != sides[row.file]:
            _change_side(batch, row, sides[row.file])
    for row in old:
        if row.file not in sides:
            batch.remove(row.image())
            batch.remove(row.label())
    batch.add(TABLE, write_table(rows))
    batch.add(PROJECT, write_manifest(manifest))
    batch.add(DATA, write_data(manifest))
    return Outcome(manifest, rows, notes)


def settle(manifest: Manifest, rows: Sequence[Row]) -> tuple[Manifest, list[Row], list[str]]:
    """Which side each piece is on, now that these are all."""
    boxes: dict[str, int] = {}
    before: dict[str, str] = {}
    for row in rows:
        boxes[family(row)] = boxes.get(family(row), 0) + row.boxes
        if row.source in manifest.split:
            before[family(row)] = manifest.split[row.source]
    split = assign(boxes, before, manifest.seed)
    filled = [name for name, number in boxes.items() if number]
    sides = {row.file: split.sides[family(row)] for row in rows}
    one = ""
    if len(filled) < 2:
        mine = [row for row in rows if family(row) in filled]
        parts = split_one(_groups(mine), [row.boxes for row in mine], manifest.seed)
        one = "same" if parts is None else "regions"
        sides = dict.fromkeys(sides, TRAIN)
        sides |= {row.file: part for row, part in zip(mine, parts or (), strict=False)}
    placed = [replace(row, split=sides[row.file]) for row in rows]
    placed.sort(key=lambda row: (row.source, row.y, row.x, row.file))
    homes = {row.source: split.sides[family(row)] for row in rows}
    return replace(manifest, split={**manifest.split, **homes}, one=one), placed, split.notes


def family(row: Row) -> str:
    """What must stay on one side with a piece: its image or, of a stack, all planes."""
    return family_of(row.source_name, row.source_path, row.plane, row.source)


def family_of(name: str, path: str | None, plane: str | Sequence[int], source: str) -> str:
    """The same from an image's name, path, plane and id."""
    return (path or name) if plane else source


def _groups(rows: Sequence[Row]) -> list[int]:
    """(n,) the same number for pieces that share pixels, in whichever plane of a stack."""
    if len({row.source for row in rows}) < 2:
        return [row.group for row in rows]
    groups = together([Window(row.x, row.y, row.width, row.height) for row in rows])
    number = {k: g for g, members in enumerate(groups) for k in members}
    return [number[k] for k in range(len(rows))]


def not_learned(annotations: Annotations, new: Sequence[New]) -> list[str]:
    """A sentence on objects that are whole, or mostly, in no piece."""
    lost = set(annotations.numbers.tolist()).difference(*(piece.ids for piece in new))
    if not lost:
        return []
    boxes = count_of(len(lost), "box is", "boxes are")
    return [
        f"{boxes} not learned from: most of each lies outside of the annotated regions, or it is "
        "larger than a piece."
    ]


def label_text(labels: Sequence[int], xyxy: Any, shape: tuple[int, int]) -> str:
    """YOLO's lines of boxes (n, 4) in pixels of an image of `shape` (H, W)."""
    places = np.clip(to_centres(xyxy, shape), 0, 1)
    return "".join(
        " ".join([str(int(label)), *(f"{value:.8f}" for value in place)]) + "\n"
        for label, place in zip(labels, places, strict=True)
    )


def _change_side(batch: Batch, row: Row, side: str) -> None:
    label: Path = batch.root / row.label()
    if label.exists():
        batch.add(row.label(side), label.read_bytes())
    batch.move(row.image(), row.image(side))
    batch.remove(row.label())


def _png(piece: Piece) -> bytes:
    content = io.BytesIO()
    Image.fromarray(piece.pixels).save(content, "PNG", compress_level=_COMPRESSION)
    return content.getvalue()


def _label(piece: Piece) -> bytes:
    height, width = piece.pixels.shape[:2]
    return label_text(piece.labels.tolist(), piece.xyxy, (height, width)).encode()


def _row(
    name: str, source: Source, plan: Planned, piece: Piece, side: int, image: bytes, label: bytes
) -> Row:
    window = piece.window
    # With what is in it in its name, a file is never another one than it was.
    mark = hashlib.sha256(image + b"\0" + label).hexdigest()[:10]
    numbers = np.bincount(piece.labels)
    return Row(
        file=f"{name}_x{window.x}_y{window.y}_{mark}",
        split="",
        source=name,
        source_name=source.name,
        source_path=source.path or "",
        source_digest=source.digest,
        plane=" ".join(map(str, source.plane)),
        x=window.x,
        y=window.y,
        width=window.width,
        height=window.height,
        side=side,
        group=plan.group,
        regions=" ".join(map(str, plan.regions)),
        boxes=len(piece.labels),
        counts=" ".join(f"{k}:{n}" for k, n in enumerate(numbers) if n),
        hidden=piece.hidden,
        shown=round(piece.shown, 4),
        sha256=hashlib.sha256(image).hexdigest(),
    )
