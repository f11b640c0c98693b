"""Single red cells of the malaria fields, infected or not: training data of the model `malaria`.

    python benchmarks/malaria_data.py --out FOLDER

MP-IDB labels the parasites of a field and not its red cells. Those are found by the packaged
detector; one in which a parasite lies is infected, of that parasite's stage, and every other one
is uninfected. Two rings in one cell are one infected cell, of the more mature stage. A parasite
that no red cell covers is a cell of its own: that of the detector's box where it is called
something else (WBC, say), or else a box around the parasite, as large as a red cell of the field at
least. White cells, and what is called so, are uninfected, too, to learn from: most of those
without the size and stain of white cells are pairs of red cells.

Not trained on: cells that cover a parasite of another cell (in clumps, and where a cell was found
twice). Cells at the border of a field are, although some of their parasites have no label: without
them a network learns that the padding beyond the border is a parasite.

What was found in each field, down to the confidence of the Malaria preset, is in
FOLDER/detections.json; learned from is what is sure (`SURE`). The crops are in FOLDER/crops by
slide, sheets of them to look at in FOLDER/sheets.

    FOLDER/crops/1704282807/ring/falciparum-1704282807-0001-R-017.png

`write_split` links them into train and val folders, by slide, as `train_classifier` reads them. A
crop is what `Classifier.classify(rgb, boxes)` cuts around a box.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

import napari_beerlanet as nb
from napari_beerlanet.core.batch.settings import MALARIA_PRESET
from napari_beerlanet.core.boxes.detections import AGREEMENT_COLUMN, Detections
from napari_beerlanet.core.boxes.geometry import area, clip, cxcywh_to_xyxy, intersection
from napari_beerlanet.core.classification.crops import cut_crops
from napari_beerlanet.core.images.files import read_image

SHARED = Path(__file__).resolve().parents[2] / "shared"
STAGES = ("ring", "trophozoite", "schizont", "gametocyte")
UNINFECTED = "uninfected"
TYPES = (UNINFECTED, *STAGES)
SIZE, FILL = 80, 0.8  # pixels of a crop, and how much of its side the box takes
DETECTOR = "blood-cells"
SURE = 0.25  # confidence of the detector in cells that are learned from
_COVERED = 0.6  # of a parasite's box that lies in its red cell
_MAX_AGREEMENT = 0.6  # of what is called a white cell and may be a parasite
_BORDER = 3  # pixels
_SHEET = (14, 10)  # crops across and down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fields = find_fields(options.shared / "data" / "malaria-fields", options.out)
    write_crops(fields, options.out / "crops", options.shared)
    write_sheets(options.out / "crops", options.out / "sheets")
    for line in summary(fields):
        print(line)


# --- cells of a field ----------------------------------------------------------------------------


def find_fields(source: Path, out: Path, confidence: float = SURE) -> list[dict[str, Any]]:
    """All fields with their parasites and the cells of this confidence at least.

    Detections down to the preset's confidence are cached in OUT.
    """
    cache = out / "detections.json"
    known = json.loads(cache.read_text()) if cache.is_file() else {}
    fields, model = [], None
    for path in sorted(source.glob("*/images/*.jpg")):
        key = f"{path.parent.parent.name}-{path.stem}"
        if key not in known:
            model = model or nb.load_checkpoint(DETECTOR, device="cpu")
            pixels = read_image(path).pixels
            known[key] = to_json(model.detect(pixels, MALARIA_PRESET["confidence"]))
            print(key, len(known[key]["scores"]), flush=True)
        with Image.open(path) as image:
            shape = image.size[::-1]
        labels = path.parent.parent / "labels" / f"{path.stem}.txt"
        found = from_json(known[key])
        sure = found[found.scores >= confidence]
        fields.append(describe_field(path, sure, *read_parasites(labels, shape)))
    if model is not None:
        out.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(known))
    return fields


def to_json(found: Detections) -> dict[str, Any]:
    """Boxes, labels, scores and agreement of a field's detections."""
    agreement = found.columns[AGREEMENT_COLUMN]
    return {
        "names": found.names,
        "boxes": found.xyxy.round(2).tolist(),
        "labels": found.labels.tolist(),
        "scores": found.scores.round(3).tolist(),
        "agreement": [None if np.isnan(v) else round(float(v), 3) for v in agreement],
    }


def from_json(content: dict[str, Any]) -> Detections:
    """The reverse."""
    agreement = np.array([np.nan if v is None else v for v in content["agreement"]], np.float32)
    return Detections(
        np.array(content["boxes"], np.float32).reshape(-1, 4),
        np.array(content["labels"], np.int64),
        np.array(content["scores"], np.float32),
        content["names"],
        columns={AGREEMENT_COLUMN: agreement},
    )


def read_parasites(
    path: Path, shape: tuple[int, int]
) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
    """The shape of a field, and stages (n,) and boxes (n, 4) of its parasites."""
    rows = np.loadtxt(path, ndmin=2)
    return shape, rows[:, 0].astype(int), clip(cxcywh_to_xyxy(rows[:, 1:5], shape), shape)


def describe_field(
    path: Path,
    found: Detections,
    shape: tuple[int, int],
    stages: np.ndarray,
    boxes: np.ndarray,
) -> dict[str, Any]:
    """Every red cell, and every other object, with its type and whether to learn from it."""
    owner, covers = owners(found, boxes)
    held: dict[int, list[int]] = {}
    for parasite, cell in enumerate(owner):
        held.setdefault(int(cell), []).append(parasite)
    cells, others = [], []
    for k, (box, label) in enumerate(zip(found.xyxy.tolist(), found.labels, strict=True)):
        name, inside = found.names[label], held.get(k, [])
        at_border = (
            min(box[:2]) < _BORDER or box[2] > shape[1] - _BORDER or box[3] > shape[0] - _BORDER
        )
        entry = {
            "row": k,
            "box": box,
            "class": name,
            "type": STAGES[max(stages[p] for p in inside)] if inside else UNINFECTED,
            "border": at_border,
            "ambiguous": not inside and bool(covers[k]),
        }
        entry["train"] = bool(inside) or not (covers[k] or name == "Platelets")
        (cells if inside or name == "RBC" else others).append(entry)
    side = median_side(found)
    for parasite in held.get(-1, []):
        cells.append(
            {
                "row": None,
                "box": enlarged(boxes[parasite], side).round(2).tolist(),
                "class": "",
                "type": STAGES[stages[parasite]],
                "border": False,
                "ambiguous": False,
                "train": True,
            }
        )
    species = path.parent.parent.name
    return {
        "name": f"{species}-{path.stem}",
        "path": f"{species}/images/{path.name}",
        "species": species,
        "slide": path.stem.split("-")[0],
        "parasites": Counter(STAGES[k] for k in stages),
        "parasite_boxes": boxes,
        "found": found,
        "cells": cells,
        "others": others,
    }


def owners(found: Detections, parasites: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) the detection that each parasite (n, 4) lies in, −1 if none; (m,) which cover any.

    Red cells come first; of several, the one that covers most of the parasite, and then the one
    with the nearest middle. Boxes of another class count where they are as large as red cells and
    do not have the size and stain of white cells.
    """
    shared = intersection(parasites, found.xyxy) / np.maximum(area(parasites)[:, None], 1e-6)
    middle = (found.xyxy[:, :2] + found.xyxy[:, 2:]) / 2
    size = np.maximum(found.xyxy[:, 2:] - found.xyxy[:, :2], 1e-6)
    is_red = np.array([found.names[k] == "RBC" for k in found.labels], bool)
    large = np.sqrt(area(found.xyxy)) >= 0.7 * median_side(found)
    agreement = np.nan_to_num(found.columns[AGREEMENT_COLUMN], nan=0.0)
    odd = ~is_red & large & (agreement < _MAX_AGREEMENT)
    result = np.full(len(parasites), -1)
    for k, box in enumerate(parasites):
        covers = shared[k] >= _COVERED
        for candidates in (covers & is_red, covers & odd):
            rows = np.flatnonzero(candidates)
            if len(rows):
                centre = (box[:2] + box[2:]) / 2
                far = (np.abs(middle[rows] - centre) / size[rows]).max(1)
                best = np.lexsort((far, -np.round(shared[k][rows], 1)))[0]
                result[k] = rows[best]
                break
    return result, (shared >= _COVERED).any(0)


def median_side(found: Detections) -> float:
    """Of the red cells' boxes, in pixels."""
    red = np.array([found.names[k] == "RBC" for k in found.labels], bool)
    return float(np.median(np.sqrt(area(found.xyxy[red])))) if red.any() else 60.0


def enlarged(box: np.ndarray, side: float) -> np.ndarray:
    """A parasite's box (4,), each side as long as that of a red cell at least."""
    centre, half = (box[:2] + box[2:]) / 2, np.maximum((box[2:] - box[:2]) / 2, side / 2)
    return np.concatenate([centre - half, centre + half])


# --- crops ---------------------------------------------------------------------------------------


def write_crops(fields: list[dict[str, Any]], folder: Path, shared: Path = SHARED) -> None:
    """A PNG of every object to learn from, in FOLDER/SLIDE/TYPE."""
    shutil.rmtree(folder, ignore_errors=True)
    for field in fields:
        chosen = [cell for cell in field["cells"] + field["others"] if cell["train"]]
        pixels = read_image(shared / "data" / "malaria-fields" / field["path"]).pixels
        boxes = np.array([cell["box"] for cell in chosen], np.float64).reshape(-1, 4)
        crops = cut_crops(pixels, boxes, SIZE, FILL)
        for k, (cell, crop) in enumerate(zip(chosen, crops, strict=True)):
            white = "-white" if cell["class"] == "WBC" and cell["type"] == UNINFECTED else ""
            place = folder / field["slide"] / cell["type"] / f"{field['name']}-{k:03d}{white}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(crop).save(place, compress_level=1)


def write_split(
    crops: Path,
    folder: Path,
    train: list[str],
    val: list[str],
    wanted: dict[str, int],
    val_per_slide: int = 200,
) -> Path:
    """Folders train and val of the crops of slides; returns FOLDER.

    A type with fewer training crops than `wanted` has them several times, so that it is seen often
    enough; of one with more, as many are taken from every slide as there are, evenly. Of slides in
    both a thirtieth is validated on and not trained on, which only tells that nothing went wrong.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for kind in TYPES:
        by_slide = {s: sorted((crops / s / kind).glob("*.png")) for s in {*train, *val}}
        held = []
        for slide in val:
            mine = by_slide[slide]
            held += evenly([mine], min(val_per_slide, len(mine) // 30 if slide in train else 10**6))
        rest = [[path for path in by_slide[s] if path not in set(held)] for s in train]
        white = [path for paths in rest for path in paths if path.stem.endswith("-white")]
        rest = [[path for path in paths if path not in set(white)] for paths in rest]
        chosen = white + evenly(rest, wanted[kind] - len(white))
        times = max(wanted[kind] // max(len(chosen), 1), 1)
        _link(folder / "train" / kind, [(p, n) for n in range(times) for p in chosen])
        _link(folder / "val" / kind, [(p, 0) for p in held])
    return folder


def evenly(groups: list[list[Path]], count: int) -> list[Path]:
    """At most `count` of all, as many of every group as it has; within a group, evenly."""
    left, chosen = count, []
    for rest, group in zip(range(len(groups), 0, -1), sorted(groups, key=len), strict=True):
        take = min(len(group), left // rest)
        places = np.linspace(0, len(group) - 1, take).round().astype(int) if take else []
        chosen += [group[k] for k in places]
        left -= take
    return chosen


def _link(folder: Path, files: list[tuple[Path, int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path, n in files:
        os.link(path, folder / (f"{path.stem}-again{n}.png" if n else path.name))


def write_sheets(crops: Path, folder: Path) -> None:
    """Sheets of crops, by type, all stages and an even choice of uninfected cells per slide."""
    folder.mkdir(parents=True, exist_ok=True)
    per_sheet = _SHEET[0] * _SHEET[1]
    for kind in TYPES:
        by_slide = [sorted((s / kind).glob("*.png")) for s in sorted(crops.iterdir())]
        if kind == UNINFECTED:
            by_slide = [evenly([paths], 42) for paths in by_slide]
        paths = [path for group in by_slide for path in group]
        for start in range(0, len(paths), per_sheet):
            draw_sheet(paths[start : start + per_sheet], folder / f"{kind}-{start:04d}.png")


def draw_sheet(paths: list[Path], file: Path, captions: list[str] | None = None) -> None:
    """Crops in rows, with the slide's last digits and the field, or a caption, over each."""
    across, down = _SHEET
    sheet = Image.new("RGB", (across * (SIZE + 4), down * (SIZE + 14)), "white")
    draw = ImageDraw.Draw(sheet)
    for k, path in enumerate(paths):
        x, y = k % across * (SIZE + 4), k // across * (SIZE + 14)
        part = path.stem.split("-")
        draw.text((x, y), captions[k] if captions else f"{part[1][-4:]} {part[2]}", fill="black")
        sheet.paste(Image.open(path), (x, y + 12))
    sheet.save(file)


def summary(fields: list[dict[str, Any]]) -> list[str]:
    """Lines of counts per slide, and of where parasites lie."""
    lines = []
    for slide in dict.fromkeys(field["slide"] for field in fields):
        mine = [field for field in fields if field["slide"] == slide]
        counts = Counter(cell["type"] for field in mine for cell in field["cells"])
        text = ", ".join(f"{counts[kind]} {kind}" for kind in TYPES)
        lines.append(f"{mine[0]['species']} {slide}: {len(mine)} fields, {text}")
    cells = [cell for field in fields for cell in field["cells"]]
    called = Counter((c["type"], c["class"] or "nothing") for c in cells if c["type"] != UNINFECTED)
    lines += [f"{kind} in {name}: {n}" for (kind, name), n in sorted(called.items())]
    for mark in ("border", "ambiguous", "train"):
        lines.append(f"{mark}: {sum(c[mark] for c in cells)} of {len(cells)} cells")
    parasites = sum(sum(field["parasites"].values()) for field in fields)
    lines.append(f"{parasites} parasites in {sum(called.values())} cells")
    return lines


if __name__ == "__main__":
    main()
