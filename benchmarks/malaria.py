"""The packaged model `malaria`: measured on slides that it was not trained on, then made of all.

    python benchmarks/malaria_data.py --out FOLDER
    python benchmarks/malaria.py FOLDER --fold A        (and B, C): train, and score all its slides
    python benchmarks/malaria.py FOLDER --measure       tables, FOLDER/results.json, a figure
    python benchmarks/malaria.py FOLDER --fold all      train on all slides
    python benchmarks/malaria.py FOLDER --package       FOLDER/malaria.safetensors

A fold trains on all slides but those that it is tested on; the epoch is the last one, and the
recipe was chosen on fold A. How sure a network is on slides that it does not know cannot be learned
from those that it does: so one number that is added to the logit of `uninfected`, and the
temperature, are fitted on the slides of the other two folds, as the networks that have not seen
them score them (`cross_fit`). The temperature is that of logistic regression in which infected and
uninfected cells weigh the same, for smears with `EXPECTED` of the cells infected; the number is
such that as many cells are called infected on those slides as are annotated, those included that
the detector does not find, for a smear is examined to count them. How many are
in a field is estimated from the field itself, without labels (`adapt_to_share`), for a threshold
that is right where one cell in eight is infected finds too many parasites where one in a hundred
is. A parasite that the crops of two cells show is that of one (`count_parasites_once`): cells that
may be infected are looked at a second time, without their neighbours. That stages were shown
several times in training is undone by the logarithm of how often. All become a part of the model's
description (`prior`, `temperature`, `prevalence`), so that whoever loads the model has them. The
model of all slides takes what fits the slides of all folds.

Parasitaemia of a field: infected red cells of all red cells. Predicted is what the Malaria preset
counts, which does not know where parasites are. Annotated are parasites and not red cells, so there
are two numbers to compare with, neither of them perfect. "of all": all cells with parasites, found
or not, of these and the red cells that are found. It is too high where the detector misses cells
of a clump, as only those with parasites are added. "of those found": of the red cells that the
detector finds, those with parasites. "inside": as "of all", without the cells that a border of the
field cuts, on both sides: parasites in these have no labels.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from malaria_data import (
    DETECTOR,
    FILL,
    SHARED,
    SIZE,
    TYPES,
    UNINFECTED,
    find_fields,
    owners,
    write_split,
)
from scipy import optimize

import napari_beerlanet as nb
from napari_beerlanet.core.batch.malaria import find_red_cells
from napari_beerlanet.core.batch.settings import MALARIA_PRESET
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.matching import non_max_suppression
from napari_beerlanet.core.checkpoints.checkpoint import read_info
from napari_beerlanet.core.classification.classifier import (
    MAY_BE_INFECTED,
    adapt_to_share,
    count_parasites_once,
)
from napari_beerlanet.core.classification.crops import crop_neighbours, cut_crops, hide_neighbours
from napari_beerlanet.core.evaluation.classification import classification_metrics
from napari_beerlanet.core.formats.class_folders import read_crop_dataset
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.stains.domain_shift import describe_stains
from napari_beerlanet.core.training.trainer.classification import TrainingCrops

# Slides to test on; the others are trained on. The two with most parasites, and all with fields of
# many, are in different folds, and each stage is in all trainings.
FOLDS = {
    "A": ("1701151546", "1703121298", "1409171742"),
    "B": ("1704282807", "1408161544", "1408290968"),
    "C": ("1405022890", "1409191647", "1603223711", "1709041080"),
    "all": (),
}
WANTED = {"uninfected": 2200, "ring": 900, "trophozoite": 250, "schizont": 150, "gametocyte": 150}
# Crops are files of their own. Stain and camera vary as those of white cells do.
AUGMENTATION: dict[str, Any] = {"scale_jitter": 0.15, "shift_jitter": 0.06, "blur_jitter": 0.02}
EXPECTED = 0.05  # of the cells of a smear infected, before it is looked at
SHIFT_RANGE, SHIFT_STEPS = 2.5, 10
VIEWS = 4
LOOK_AGAIN = -3.5  # lead of the stages over `uninfected`, below which no calibration calls infected
HEALTHY = np.array([kind == UNINFECTED for kind in TYPES])
MIN_PARASITES = 20  # of a field whose parasitaemia is compared
TOLERANCE = 0.2
SAMPLE_CROPS = 200  # whose stains describe those of training
DETECTOR_INFO = read_info(DETECTOR)
UNKNOWN = {"platelets or dirt on red cells": ["ring"], "other parasites than Plasmodium": ["ring"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of malaria_data.py")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--fold", choices=FOLDS)
    parser.add_argument("--name", default="", help="of a variant, in the names of files")
    parser.add_argument("--front-end", default="none", choices=("none", "beerlanet", "grey"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--package", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.fold:
        train(options)
    if options.measure:
        measure(options)
    if options.package:
        package(options)


# --- training ------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Train on a fold's slides, resuming what is there, and score its other slides."""
    folder = options.folder
    test = FOLDS[options.fold]
    mine = sorted({field["slide"] for field in all_fields(options)} - set(test))
    run = folder / "runs" / f"{options.fold}{options.name}"
    data = folder / "splits" / options.fold
    if not data.is_dir():
        write_split(folder / "crops", data, mine, mine, WANTED)
    nb.train_classifier(
        data,
        run,
        backbone="mobilenet_v2",
        weights=options.shared / "weights" / "mobilenet_v2.pt",
        front_end=options.front_end,
        input_size=SIZE,
        fill=FILL,
        epochs=options.epochs,
        balanced=False,
        label_smoothing=0.0,
        **AUGMENTATION,
        seed=options.seed,
        device="cpu",
        resume=(run / "run.json").is_file(),
        progress=show,
    )
    if test:
        score(load_fold(options, options.fold), options)


def show(event: dict[str, Any]) -> None:
    """Epochs, for the log."""
    if event.get("event") != "batch":
        print(json.dumps(event)[:400], flush=True)


def all_fields(options: argparse.Namespace) -> list[dict[str, Any]]:
    """With the cells that the Malaria preset finds."""
    source = options.shared / "data" / "malaria-fields"
    return find_fields(source, options.folder, MALARIA_PRESET["confidence"])


def load_fold(options: argparse.Namespace, fold: str) -> Any:
    """The network of a fold with four views, at temperature 1."""
    run = options.folder / "runs" / f"{fold}{options.name}"
    model = nb.load_checkpoint(run / "last.safetensors", device="cpu")
    model.info["temperature"] = 1.0
    model.network.settings = model.network.settings.model_copy(update={"views": VIEWS})
    return model


def score(model: Any, options: argparse.Namespace) -> None:
    """ln of the probabilities, at temperature 1, of all cells and other objects of test fields."""
    logits = {}
    for field in all_fields(options):
        if field["slide"] in FOLDS[options.fold]:
            crops = cut_crops(read_field(field, options), boxes_of(field), SIZE, FILL)
            logits[field["name"]] = log_probabilities(model, crops)
    np.savez_compressed(options.folder / f"scores-{options.fold}{options.name}.npz", **logits)


def score_alone(
    fold: str, logits: dict[str, np.ndarray], options: argparse.Namespace
) -> dict[str, np.ndarray]:
    """As `score`, with all neighbours painted over: of cells that may be infected, others NaN."""
    model, alone = load_fold(options, fold), {}
    for field in all_fields(options):
        if field["name"] not in logits:
            continue
        X, boxes = logits[field["name"]], boxes_of(field)
        alone[field["name"]] = looks = np.full_like(X, np.nan)
        pairs = neighbours(field, X)
        seen = np.unique(pairs[:, 0])
        if not len(seen):
            continue
        crops = cut_crops(read_field(field, options), boxes[seen], SIZE, FILL)
        every = sight(field, seen)
        for crop, k in zip(crops, seen, strict=True):
            crop[:] = hide_neighbours(crop, boxes[k], boxes[every[every[:, 0] == k, 1]], FILL)
        looks[seen] = log_probabilities(model, crops)
    return alone


def log_probabilities(model: Any, crops: np.ndarray) -> np.ndarray:
    """(n, 5) of crops, in the order of `TYPES`."""
    place = [model.classes.index(kind) for kind in TYPES]
    scores = model.score_crops(model.prepare_crops(list(crops)))[:, place]
    return np.log(np.maximum(scores, 1e-12)).astype(np.float32)


def read_field(field: dict[str, Any], options: argparse.Namespace) -> np.ndarray:
    """The pixels of a field."""
    return read_image(options.shared / "data" / "malaria-fields" / field["path"]).pixels


def boxes_of(field: dict[str, Any]) -> np.ndarray:
    """(n, 4) of all cells, then of all other objects."""
    return np.array([o["box"] for o in field["cells"] + field["others"]], float).reshape(-1, 4)


def red_cells(field: dict[str, Any]) -> tuple[Any, np.ndarray, np.ndarray]:
    """What the preset finds, which of it are red cells, and which of the field's objects these are.

    A field remembers it.
    """
    if "red cells" not in field:
        whole = field["found"]
        kept = np.sort(
            non_max_suppression(whole.xyxy, whole.scores, whole.labels, MALARIA_PRESET["iou"])
        )
        found = whole[kept]
        rows, _ = find_red_cells(found, DETECTOR_INFO, {"classes": TYPES, "applies_to": ["RBC"]})
        place = {o["row"]: k for k, o in enumerate(field["cells"] + field["others"])}
        field["red cells"] = found, rows, np.array([place[int(k)] for k in kept[rows]], int)
    return field["red cells"]


def sight(field: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    """(p, 2) pairs of red cells: i, one of the objects `rows`, and j that the crop of i shows."""
    mine = np.sort(red_cells(field)[2])
    return mine[crop_neighbours(boxes_of(field)[mine], np.searchsorted(mine, rows), FILL)]


def neighbours(field: dict[str, Any], X: np.ndarray) -> np.ndarray:
    """(p, 2) pairs of red cells that may both be infected, j in the crop of i; X (n, 5) logits."""
    doubtful = np.logaddexp.reduce(X[:, 1:], 1) - X[:, 0] >= LOOK_AGAIN
    mine = np.sort(red_cells(field)[2])
    pairs = sight(field, mine[doubtful[mine]])
    return pairs[doubtful[pairs[:, 1]]]


# --- what they say -------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    """Measure on test slides what the other folds calibrate, all together and each fold alone."""
    fields = all_fields(options)
    results: dict[str, Any] = {"folds": {}}
    everything: list[dict[str, Any]] = []
    logits = {}
    for fold in FOLDS:
        path = options.folder / f"scores-{fold}{options.name}.npz"
        if path.is_file():
            stages = stage_shift(options.folder / "splits" / fold)
            plain = dict(np.load(path))
            second = path.with_name(f"alone-{fold}{options.name}.npz")
            if not second.is_file():
                np.savez_compressed(second, **score_alone(fold, plain, options))
            alone = np.load(second)
            # Logits of cells as they are and alone, (2, n, 5).
            logits[fold] = {n: np.stack([X, alone[n]]) + stages for n, X in plain.items()}
    for fold, mine in logits.items():
        others = {name: X for other in logits if other != fold for name, X in logits[other].items()}
        shift, temperature = cross_fit(others, fields)
        tested = [
            judge(mine[f["name"]], f, shift, temperature) for f in fields if f["name"] in mine
        ]
        everything += tested
        results["folds"][fold] = {
            "shift": shift,
            "temperature": temperature,
            "test": FOLDS[fold],
            **report_on(tested),
        }
    of_all = {name: X for mine in logits.values() for name, X in mine.items()}
    results["shift"], results["temperature"] = cross_fit(of_all, fields)
    results["all"] = report_on(everything)
    results["slides"] = {
        slide: report_on([t for t in everything if t["slide"] == slide])
        for slide in sorted({t["slide"] for t in everything})
    }
    keep = ("name", "slide", "species", "parasites", "annotated", "annotated_found", "predicted")
    results["fields"] = [{k: t[k] for k in (*keep, "red_cells", "counted")} for t in everything]
    out = options.folder / f"results{options.name}.json"
    out.write_text(json.dumps(results, indent=1, default=float))
    for name, part in {**results["folds"], "all": results["all"], **results["slides"]}.items():
        print(name, json.dumps({k: v for k, v in part.items() if k != "fields20"}, default=float))
    for line in results["all"]["fields20"]:
        print(line)
    if options.figure:
        draw(everything, options.figure)


def stage_shift(split: Path) -> np.ndarray:
    """(5,) what undoes that crops of a type are several times in a training, relative to rings."""
    shift = np.zeros(len(TYPES))
    for k, kind in enumerate(TYPES):
        names = [path.stem for path in (split / "train" / kind).glob("*.png")]
        shift[k] = math.log(sum("-again" not in name for name in names) / len(names))
    shift -= shift[TYPES.index("ring")]
    shift[0] = 0.0
    return shift


def cross_fit(logits: dict[str, np.ndarray], fields: list[dict[str, Any]]) -> tuple[float, float]:
    """What is added to `uninfected`, and the temperature.

    Of the fields in `logits`, as networks score them that were not trained on their slides.
    """
    known = [f for f in fields if f["name"] in logits]
    X = np.concatenate([logits[f["name"]][0, : len(f["cells"])] for f in known])
    true = np.array([c["type"] != UNINFECTED for f in known for c in f["cells"]], float)
    lead = np.logaddexp.reduce(X[:, 1:], 1) - X[:, 0]
    weight = np.where(true > 0, 0.5 / true.mean(), 0.5 / (1 - true.mean()))

    def loss(place: np.ndarray) -> float:
        z = (lead - place[0]) * math.exp(place[1])
        return float((weight * (np.logaddexp(0, z) - true * z)).mean())

    middle, slope = optimize.minimize(loss, np.zeros(2)).x
    temperature = math.exp(-slope)
    start = float(middle - temperature * math.log(EXPECTED / (1 - EXPECTED)))

    def excess(shift: float) -> int:
        counted = [judge(logits[f["name"]], f, shift, temperature) for f in known]
        return sum(t["predicted"] - t["annotated"] for t in counted)

    low, high = start - SHIFT_RANGE, start + SHIFT_RANGE
    for _ in range(SHIFT_STEPS):  # the more is added, the fewer are called infected
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return (low + high) / 2, temperature


def shifted(X: np.ndarray, shift: float) -> np.ndarray:
    """Logits (…, 5) with the shift added to those of `uninfected`."""
    return X + np.array([shift, 0, 0, 0, 0])


def softmax(X: np.ndarray) -> np.ndarray:
    e = np.exp(X - X.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def judge(
    logits: np.ndarray, field: dict[str, Any], shift: float, temperature: float
) -> dict[str, Any]:
    """Scores of a field's cells, and what the preset counts in it; `logits` (2, n, 5)."""
    cells = field["cells"]
    found, rows, place = red_cells(field)
    counts = np.zeros(logits.shape[1], bool)
    counts[place] = True
    P, alone = (softmax(shifted(X, shift) / temperature) for X in logits)
    doubtful = (1 - P[:, 0] >= MAY_BE_INFECTED) & counts
    if "neighbours" not in field:
        field["neighbours"] = neighbours(field, logits[0])
    pairs = field["neighbours"][doubtful[field["neighbours"]].all(1)]
    P = count_parasites_once(P, alone, pairs, HEALTHY)
    P, _ = adapt_to_share(P, HEALTHY, EXPECTED, counts)
    labels = P[place].argmax(1)
    counted = Counter(TYPES[k] for k in labels)
    at_border = np.array([o["border"] for o in cells + field["others"]], bool)
    inside = ~at_border[place]
    owner, _ = owners(found, field["parasite_boxes"])
    infected = set(owner[owner >= 0].tolist())
    missed = int((owner < 0).sum()) + len(infected - set(rows.tolist()))
    return {
        "name": field["name"],
        "slide": field["slide"],
        "species": field["species"],
        "parasites": sum(field["parasites"].values()),
        "true": np.array([TYPES.index(cell["type"]) for cell in cells]),
        "clear": np.array([not cell["ambiguous"] for cell in cells]),
        "P": P[: len(cells)],
        "annotated_found": len(infected & set(rows.tolist())),
        "annotated": len(infected & set(rows.tolist())) + missed,
        "cells": len(rows) + missed,
        "predicted": len(rows) - counted[UNINFECTED],
        "red_cells": len(rows),
        "counted": counted,
        "inside": {
            "annotated": int(np.isin(rows, list(infected))[inside].sum()) + missed,
            "cells": int(inside.sum()) + missed,
            "predicted": int((labels[inside] > 0).sum()),
            "red_cells": int(inside.sum()),
        },
    }


def report_on(tested: list[dict[str, Any]]) -> dict[str, Any]:
    """Of cells: infected against uninfected, and stages; of fields: parasitaemia."""
    true = np.concatenate([t["true"] for t in tested])
    P = np.concatenate([t["P"] for t in tested])
    label = P.argmax(1)
    two = np.stack([P[:, 0], 1 - P[:, 0]], 1)
    clear = np.concatenate([t["clear"] for t in tested])
    names = ["uninfected", "infected"]
    binary = classification_metrics((true > 0).astype(np.int64), two, names)
    without = classification_metrics((true > 0).astype(np.int64)[clear], two[clear], names)
    found, right = label[true > 0] > 0, label[true == 0] == 0
    confusion = np.zeros((5, 5), int)
    np.add.at(confusion, (true, label), 1)
    large = [t for t in tested if t["parasites"] >= MIN_PARASITES]
    lines = []
    for t in large:
        predicted = t["predicted"] / max(t["red_cells"], 1)
        lines.append(
            {
                "field": t["name"],
                "parasites": t["parasites"],
                "annotated": f"{t['annotated']}/{t['cells']}",
                "annotated_found": f"{t['annotated_found']}/{t['red_cells']}",
                "predicted": f"{t['predicted']}/{t['red_cells']}",
                "of all": round(predicted / (t["annotated"] / t["cells"]), 3),
                "inside": round(ratio_inside(t["inside"]), 3),
                "of those found": round(t["predicted"] / t["annotated_found"], 3),
            }
        )
    within = {
        key: sum(abs(line[key] - 1) <= TOLERANCE for line in lines)
        for key in ("of all", "of those found", "inside")
    }
    whole = sum(t["predicted"] for t in tested), sum(t["red_cells"] for t in tested)
    marked = sum(t["annotated"] for t in tested), sum(t["cells"] for t in tested)
    seen = sum(t["annotated_found"] for t in tested)
    return {
        "cells": len(true),
        "infected": int((true > 0).sum()),
        "roc_auc": binary["roc_auc"],
        "roc_auc_clear": without["roc_auc"],
        "sensitivity": float(found.mean()) if len(found) else math.nan,
        "specificity": float(right.mean()) if len(right) else math.nan,
        "balanced_accuracy": float((found.mean() + right.mean()) / 2) if len(found) else math.nan,
        "confusion": confusion.tolist(),
        "fields_with_20": len(large),
        "within_20_percent": within,
        "parasitaemia": {
            "predicted": whole[0] / whole[1],
            "of all": marked[0] / marked[1],
            "of those found": seen / whole[1],
        },
        "fields20": lines,
    }


def ratio_inside(t: dict[str, int]) -> float:
    """Predicted parasitaemia by the annotated one."""
    return t["predicted"] / max(t["red_cells"], 1) / (t["annotated"] / t["cells"])


def draw(tested: list[dict[str, Any]], path: Path) -> None:
    """Predicted against annotated infected cells of every field."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(4.6, 4.3), dpi=110)
    top = 1.1 * max(max(t["annotated"], t["predicted"]) for t in tested)
    line = np.array([0.0, top])
    axes.fill_between(line, 0.8 * line, 1.2 * line, color="#dddddd", label="±20 %")
    axes.plot(line, line, color="#888888", lw=1)
    colours = dict(zip(("falciparum", "vivax"), class_colours(2), strict=True))
    random = np.random.default_rng(0)
    for species, colour in colours.items():
        mine = [t for t in tested if t["species"] == species]
        spread = random.uniform(-0.25, 0.25, (2, len(mine)))  # fields with the same few
        axes.plot(
            np.array([t["annotated"] for t in mine]) + spread[0],
            np.array([t["predicted"] for t in mine]) + spread[1],
            *("o",),
            color=colour,
            ms=4,
            alpha=0.7,
            mew=0,
            label=f"P. {species}, {len(mine)} fields",
        )
    axes.set(xlim=(-1, top), ylim=(-1, top), aspect="equal")
    axes.set(xlabel="annotated infected cells", ylabel="infected cells found")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


# --- the packaged model --------------------------------------------------------------------------


def package(options: argparse.Namespace) -> None:
    """The last epoch of the training on all slides, calibrated by the slides held out in folds."""
    run = options.folder / "runs" / f"all{options.name}"
    model = nb.load_checkpoint(run / "last.safetensors", device="cpu")
    results = json.loads((options.folder / f"results{options.name}.json").read_text())
    stages = stage_shift(options.folder / "splits" / "all")
    added = dict(zip(TYPES, shifted(stages, results["shift"]).tolist(), strict=True))
    used = ("roc_auc", "sensitivity", "specificity", "balanced_accuracy", "cells", "infected")
    model.info.update(
        name="malaria",
        applies_to=["RBC"],
        unknown=UNKNOWN,
        recognised=recognised(results["all"]["confusion"]),
        prevalence=EXPECTED,
        prior=[round(math.exp(added[kind]), 4) for kind in model.classes],
        temperature=round(results["temperature"], 4),
    )
    model.network.settings = model.network.settings.model_copy(update={"views": VIEWS})
    model.info["views"] = VIEWS
    data = read_crop_dataset(options.folder / "splits" / "all")
    crops = TrainingCrops(data.splits["train"], model.network.settings)
    places = np.linspace(0, len(crops) - 1, SAMPLE_CROPS).round().astype(int)
    model.info["stain_seen"] = describe_stains(
        [model.network.fit_crop(crop) for crop in crops.plain(map(int, places))]
    )
    training = model.info["training"]
    training["command"] = "python benchmarks/malaria.py"
    training["metrics"] = {"slides held out": {k: results["all"][k] for k in used}}
    training["detector"] = DETECTOR
    nb.save_checkpoint(model, options.folder / "malaria.safetensors")


def recognised(confusion: list[list[int]]) -> dict[str, list[int]]:
    """How many of each type are called so, and how many there are, on slides held out."""
    return {
        kind: [row[k], sum(row)] for k, (kind, row) in enumerate(zip(TYPES, confusion, strict=True))
    }


if __name__ == "__main__":
    main()
