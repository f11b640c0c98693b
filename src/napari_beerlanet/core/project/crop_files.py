"""Add or remove an image's training crops; re-assigns train/val splits in one transaction.

Cells that have a type are stored beside the crops, each in the image's own pixels and with so much
around it that a classifier's crop can be cut from it as from the whole image.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.regions import group_touching
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.formats.class_folders import CELLS_DIR, CELLS_FILE
from napari_beerlanet.core.formats.yolo import format_yolo_lines
from napari_beerlanet.core.project.crops import Crop, PlannedCrop, cut_crop
from napari_beerlanet.core.project.files import (
    CROPS_FILE,
    DATA_FILE,
    PROJECT_FILE,
    CellRecord,
    CropRecord,
    ImageSource,
    ProjectManifest,
    encode_data_yaml,
    encode_manifest,
    encode_records,
)
from napari_beerlanet.core.project.folder import Transaction
from napari_beerlanet.core.project.split import TRAIN, VAL, split_images, split_single_image

CELL_CONTEXT = 2.0
"""Longer sides of a cell's box that are stored on each side of its centre."""

_PNG_COMPRESS_LEVEL = 4  # half the time of the usual 6 for hardly larger files
_CELL_TILE = 1024  # pixels: cells whose centres share a tile of the image share a file
_MIN_CELL_CONTEXT = 16  # pixels: of a tiny box, too, there is a picture


@dataclass(frozen=True)
class AddedImage:
    """What adding an image did: its id, its split ("train", "val"), and sentences for people.

    `used` boxes of the annotations are learned from; `unused` says how many others there are, by
    the words that complete "12 boxes …". `types` counts the cells that have a type;
    `unreviewed_types` are a classifier's, and are among them unless only what was reviewed is used.
    """

    id: str
    split: str
    crops: int
    boxes: int
    notes: list[str] = field(default_factory=list)
    used: int = 0
    unused: dict[str, int] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)
    unreviewed_types: int = 0


@dataclass(frozen=True)
class StagedCrop:
    """A crop of the new state, and the ids of the objects in it.

    `staged` are its label and image file in the transaction, None where they are in place already.
    """

    record: CropRecord
    staged: tuple[str, str] | None
    ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class CropUpdate:
    """What project.json, crops.csv and cells.csv will say; sentences on changes of the split."""

    manifest: ProjectManifest
    records: list[CropRecord]
    notes: list[str]
    cells: list[CellRecord] = field(default_factory=list)


def stage_crops(
    change: Transaction,
    name: str,
    source: ImageSource,
    rgb: Any,
    annotations: Annotations,
    planned: Sequence[PlannedCrop],
    *,
    crop_size: int,
    grey: int,
    existing: Mapping[str, CropRecord],
    hidden: npt.NDArray[np.float64] | None = None,
    report: Report | None = None,
) -> list[StagedCrop]:
    """Cut out and write the planned crops of an image, except for those that exist.

    `hidden` (k, 4) are boxes that are neither learned from nor taught as background.
    """
    crops = []
    for number, plan in enumerate(planned):
        report_progress(report, number, len(planned), "cutting crops")
        crop = cut_crop(rgb, annotations, plan.window, crop_size, grey, hidden)
        if crop.empty:
            continue
        ids = frozenset(crop.ids.tolist())
        image, label = _encode_png(crop.pixels), _encode_label(crop)
        record = _crop_record(name, source, plan, crop, crop_size, image, label)
        old = existing.get(record.file)
        if old is not None and all((change.root / p).exists() for p in (old.image(), old.label())):
            crops.append(StagedCrop(replace(record, split=old.split), None, ids))
        else:
            staged = change.stage_file(label), change.stage_file(image)
            crops.append(StagedCrop(record, staged, ids))
    return crops


def stage_update(
    change: Transaction,
    manifest: ProjectManifest,
    others: Sequence[CropRecord],
    old: Sequence[CropRecord],
    new: Sequence[StagedCrop],
    cells: Sequence[CellRecord] = (),
    old_cells: Sequence[CellRecord] = (),
) -> CropUpdate:
    """Put the `new` crops of an image in place of its `old` ones, beside the `others`.

    Labels come before their image and go after it: at no moment is there an image that seems to
    have no objects. `cells` are those of all images from now on, `old_cells` those before.
    """
    update = assign_splits(manifest, [*others, *(crop.record for crop in new)])
    splits = {record.file: record.split for record in update.records}
    for crop in new:
        if crop.staged is not None:
            split = splits[crop.record.file]
            change.move(crop.staged[0], crop.record.label(split))
            change.move(crop.staged[1], crop.record.image(split))
    in_place = [*others, *(crop.record for crop in new if crop.staged is None)]
    for record in in_place:
        if record.split != splits[record.file]:
            _move_to_split(change, record, splits[record.file])
    for record in old:
        if record.file not in splits:
            change.remove(record.image())
            change.remove(record.label())
    change.write(CROPS_FILE, encode_records(CropRecord, update.records))
    change.write(PROJECT_FILE, encode_manifest(update.manifest))
    change.write(DATA_FILE, encode_data_yaml(update.manifest))
    update = replace(update, cells=split_cells(cells, update))
    stage_cell_table(change, update.cells, old_cells)
    return update


def stage_cell_table(
    change: Transaction, cells: Sequence[CellRecord], old: Sequence[CellRecord]
) -> None:
    """Write cells.csv, and remove what no longer belongs to any cell."""
    if cells:
        change.write(CELLS_FILE, encode_records(CellRecord, cells))
    elif old:
        change.remove(CELLS_FILE)
    for image in {cell.image() for cell in old} - {cell.image() for cell in cells}:
        change.remove(image)


def stage_cells(
    change: Transaction, name: str, rgb: Any, typed: Annotations, report: Report | None = None
) -> list[CellRecord]:
    """Cut out the cells of an image that have a type and write them, except for what is there.

    Boxes stay as they were drawn, also beyond the image's border: as `classify` gets them.
    """
    centres = (typed.xyxy[:, :2] + typed.xyxy[:, 2:]) / 2
    reach = CELL_CONTEXT * (typed.xyxy[:, 2:] - typed.xyxy[:, :2]).max(1, initial=0)
    reach = np.maximum(reach, _MIN_CELL_CONTEXT)[:, None]
    limit = np.array([rgb.shape[1], rgb.shape[0]])
    low = np.clip(np.floor(centres - reach), 0, limit).astype(np.int64)
    high = np.clip(np.ceil(centres + reach), 0, limit).astype(np.int64)
    tiles, of_cell = np.unique(
        np.floor(centres / _CELL_TILE).astype(np.int64), axis=0, return_inverse=True
    )
    of_cell = of_cell.reshape(-1)  # of a version of numpy that gives (n, 1)
    records, reviewed = [], typed.type_reviewed.tolist()
    for number in range(len(tiles)):
        report_progress(report, number, len(tiles), "cutting cells")
        mine = np.flatnonzero(of_cell == number)
        (x, y), (right, bottom) = low[mine].min(0).tolist(), high[mine].max(0).tolist()
        file = _stage_window(change, name, rgb, Rectangle(x, y, right - x, bottom - y))
        for k in mine.tolist():
            x1, y1, x2, y2 = (typed.xyxy[k] - (x, y, x, y)).tolist()
            records.append(
                CellRecord(
                    *(file, TRAIN, name, typed.types[k]),
                    *(x1, y1, x2, y2),
                    *(x, y, right - x, bottom - y, reviewed[k]),
                )
            )
    return records


def _stage_window(change: Transaction, name: str, rgb: Any, window: Rectangle) -> str:
    """Write a window of an image, lossless, unless it is there; returns its name."""
    from napari_beerlanet.core.classification.crops import to_rgb8  # numba comes with it

    x, y = window.x, window.y
    pixels = to_rgb8(np.asarray(rgb[y : y + window.height, x : x + window.width]))
    mark = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()[:10]
    file = f"{name}_x{x}_y{y}_{mark}"
    if not (change.root / CELLS_DIR / f"{file}.png").exists():
        change.write(f"{CELLS_DIR}/{file}.png", _encode_png(pixels))
    return file


def split_cells(cells: Sequence[CellRecord], update: CropUpdate) -> list[CellRecord]:
    """The cells with the split of their image; of a single image, that of the crop around them.

    Where a single image cannot be split, all train: `train_classifier` then holds some of each type
    out.
    """
    splits = dict(update.manifest.split)
    if update.manifest.one:
        splits = dict.fromkeys(splits, TRAIN)
    validating = [r for r in update.records if update.manifest.one and r.split == VAL]
    placed = []
    for cell in cells:
        split = splits.get(cell.source, TRAIN)
        cx, cy = cell.x + (cell.x1 + cell.x2) / 2, cell.y + (cell.y1 + cell.y2) / 2
        for record in validating:
            inside = 0 <= cx - record.x < record.width and 0 <= cy - record.y < record.height
            split = VAL if inside and record.source == cell.source else split
        placed.append(replace(cell, split=split))
    return sorted(placed, key=lambda cell: (cell.source, cell.file))


def assign_splits(manifest: ProjectManifest, records: Sequence[CropRecord]) -> CropUpdate:
    """The split of each crop, given that these are all."""
    boxes: dict[str, int] = {}
    before: dict[str, str] = {}
    for record in records:
        group = split_group_of_crop(record)
        boxes[group] = boxes.get(group, 0) + record.boxes
        if record.source in manifest.split:
            before[group] = manifest.split[record.source]
    assigned = split_images(boxes, before, manifest.seed)
    filled = [group for group, count in boxes.items() if count]
    splits = {r.file: assigned.by_image[split_group_of_crop(r)] for r in records}
    one = ""
    if len(filled) < 2:
        only = [record for record in records if split_group_of_crop(record) in filled]
        counts = [record.boxes for record in only]
        parts = split_single_image(_overlap_groups(only), counts, manifest.seed)
        one = "same" if parts is None else "regions"
        splits = dict.fromkeys(splits, TRAIN)
        splits |= {record.file: part for record, part in zip(only, parts or (), strict=False)}
    placed = [replace(record, split=splits[record.file]) for record in records]
    placed.sort(key=lambda record: (record.source, record.y, record.x, record.file))
    of_images = {r.source: assigned.by_image[split_group_of_crop(r)] for r in records}
    manifest = replace(manifest, split={**manifest.split, **of_images}, one=one)
    return CropUpdate(manifest, placed, assigned.notes)


def split_group_of_crop(record: CropRecord) -> str:
    """What must stay in one split with a crop: its image or, of a stack, all planes."""
    return split_group(record.source_name, record.source_path, record.plane, record.source)


def split_group(name: str, path: str | None, plane: str | Sequence[int], source: str) -> str:
    """The same from an image's name, path, plane and id."""
    return (path or name) if plane else source


def _overlap_groups(records: Sequence[CropRecord]) -> list[int]:
    """(n,) the same number for crops that share pixels, in whichever plane of a stack."""
    if len({record.source for record in records}) < 2:
        return [record.group for record in records]
    windows = [Rectangle(r.x, r.y, r.width, r.height) for r in records]
    number = {k: g for g, members in enumerate(group_touching(windows)) for k in members}
    return [number[k] for k in range(len(records))]


def count_unused_boxes(annotations: Annotations, crops: Sequence[StagedCrop]) -> int:
    """How many objects no crop holds, whole or mostly."""
    return len(set(annotations.object_ids.tolist()).difference(*(crop.ids for crop in crops)))


def describe_unused_boxes(unused: int) -> list[str]:
    """A sentence on `count_unused_boxes`."""
    if not unused:
        return []
    boxes = count_of(unused, "box is", "boxes are")
    return [
        f"{boxes} not used for training: most of each lies outside of the annotated regions, or it "
        "is larger than a crop."
    ]


def _move_to_split(change: Transaction, record: CropRecord, split: str) -> None:
    label: Path = change.root / record.label()
    if label.exists():
        change.write(record.label(split), label.read_bytes())
    change.move(record.image(), record.image(split))
    change.remove(record.label())


def _encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG", compress_level=_PNG_COMPRESS_LEVEL)
    return content.getvalue()


def _encode_label(crop: Crop) -> bytes:
    height, width = crop.pixels.shape[:2]
    return format_yolo_lines(crop.labels, crop.xyxy, (height, width)).encode()


def _crop_record(
    name: str,
    source: ImageSource,
    plan: PlannedCrop,
    crop: Crop,
    crop_size: int,
    image: bytes,
    label: bytes,
) -> CropRecord:
    window = crop.window
    # With a hash of its content in its name, a file never changes.
    mark = hashlib.sha256(image + b"\0" + label).hexdigest()[:10]
    counts = np.bincount(crop.labels)
    return CropRecord(
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
        side=crop_size,
        group=plan.group,
        regions=" ".join(map(str, plan.regions)),
        boxes=len(crop.labels),
        counts=" ".join(f"{k}:{n}" for k, n in enumerate(counts) if n),
        hidden=crop.hidden,
        shown=round(crop.visible_fraction, 4),
        sha256=hashlib.sha256(image).hexdigest(),
    )
