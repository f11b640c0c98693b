"""Classifiers across laboratories: trained on one, tested on others, with and without BeerLaNet.

    python benchmarks/classify.py --out classify [--only ROW ...]
    python benchmarks/classify.py --table

White-cell types are trained on `wbc-types/pbc` and tested on `bccd` and `cellavision`; tumour
patches are trained on `turin` and tested on `lc25000`; red cells, infected or not, are trained on
seven slides of `malaria-fields` and tested on the three of fold A of malaria.py (`--malaria` is the
folder of malaria_data.py). Everything is what a user gets: `nb.train_classifier` and `nb.evaluate`.
White cells are found by the packaged detector, once, so that all laboratories show them at the same
size. Results of single runs, with their confusion matrices, go to benchmarks/results/classify.jsonl
(`--results`), which is committed. A run whose result is there is not repeated, and one that was
killed is resumed. The table has balanced accuracy, as mean ± standard deviation over the seeds;
"four types" is that of white cells without basophils, of which there are two in bccd and three in
cellavision.

Of ResNet-18 no ImageNet weights are in ../shared: it starts at random. It, tumour patches and red
cells have a smaller budget (`BUDGETS`), the same for all rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch

import napari_beerlanet as nb
from napari_beerlanet.core.evaluation.classification import locate_cells
from napari_beerlanet.core.formats.class_folders import read_crop_dataset

SHARED = Path(__file__).resolve().parents[2] / "shared"
RESULTS = Path(__file__).resolve().parent / "results" / "classify.jsonl"
HELD_OUT = 40  # of each type, to validate on; probably of the same patients
PER_TYPE = 200  # of each type to train on
TYPES = ("neutrophil", "lymphocyte", "monocyte", "eosinophil", "basophil")
TASKS = {
    "white cells": ("bccd", "cellavision"),
    "tumour": ("lc25000",),
    "malaria": ("other slides",),
}
RARE = "basophil"
SMALL = {"train": 300, "val": 50}  # crops of a class, of tumour patches and red cells
TEST_CELLS = 500  # uninfected, of the slides to test on
TEST_SLIDES = ("1701151546", "1703121298", "1409171742")

# In blood there are four to ten lymphocytes for a monocyte. Without this, monocytes are what cells
# are taken for that are like none of the home laboratory's.
PRIOR = {"lymphocyte": 5.0, "monocyte": 0.6}
NO_JITTER = {"jitter": False, "blur_jitter": 0.0}
ROWS = {
    "none": {"front_end": "none", **NO_JITTER},
    "none + stain jitter": {"front_end": "none"},
    "BeerLaNet": {"front_end": "beerlanet", **NO_JITTER},
    "BeerLaNet + stain jitter": {"front_end": "beerlanet"},
    "grey": {"front_end": "grey", **NO_JITTER},
    "BeerLaNet beside RGB + stain jitter": {"front_end": "beerlanet", "beside_rgb": True},
    "best recipe": {"front_end": "none", "epochs": 12},
    "best recipe, BeerLaNet": {"front_end": "beerlanet", "epochs": 12},
}
"""The differences between the rows; all that is not named is the same.

The best recipe is that of `white_cells.py`, which also trains on all crops of the home laboratory.
"""

BEST = ("best recipe", "best recipe, BeerLaNet")
BEST_OF = ("white cells", "mobilenet_v2")  # what has a best recipe
BACKBONES = {
    "mobilenet_v2": {},
    "resnet18": {
        **{"batch": 32, "learning_rate": 1e-3, "cosine": True, "warm_up": 15},
        **{"averaging": 0.97, "label_smoothing": 0.1},
    },
}
BUDGETS = {
    ("white cells", "mobilenet_v2"): {"input_size": 96, "epochs": 5, "views": 4},
    ("tumour", "mobilenet_v2"): {"input_size": 96, "epochs": 4, "views": 1},
    ("malaria", "mobilenet_v2"): {"input_size": 80, "epochs": 4, "views": 1},
    ("white cells", "resnet18"): {"input_size": 64, "epochs": 6, "views": 1},
    ("tumour", "resnet18"): {"input_size": 64, "epochs": 6, "views": 1},
    ("malaria", "resnet18"): {"input_size": 64, "epochs": 6, "views": 1},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("classify"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--only", nargs="*", help="rows, by their names; by default all")
    parser.add_argument("--backbones", nargs="*", default=list(BACKBONES))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--fill", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--malaria", type=Path, help="the folder of malaria_data.py")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(options.threads)
        run_all(options)
    print_table(read_results(options.results))


def run_all(options):
    done = {key_of(found) for found in read_results(options.results)}
    for task in options.tasks:
        labs = None
        for backbone in options.backbones:
            for seed in options.seeds:
                for row in options.only or ROWS:
                    if (task, backbone, row, seed) in done:
                        continue
                    if row in BEST and (task, backbone) != BEST_OF:
                        continue
                    labs = labs or LABORATORIES[task](options)
                    found = run(options, labs, task, backbone, row, seed)
                    options.results.parent.mkdir(parents=True, exist_ok=True)
                    with options.results.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                    print(
                        json.dumps({k: v for k, v in found.items() if k != "confusion"}), flush=True
                    )


def run(options, labs, task, backbone, row, seed):
    """Train on the first laboratory, test on the others."""
    home, *others = labs
    folder = options.out / "runs" / f"{task}-{backbone}-{row}-{seed}".replace(" ", "_")
    settings = {"seed": seed, **BACKBONES[backbone], **BUDGETS[task, backbone], **ROWS[row]}
    if task == "white cells":
        settings["fill"] = options.fill
    if backbone == "mobilenet_v2":
        settings["weights"] = options.shared / "weights" / "mobilenet_v2.pt"
    started = time.monotonic()
    resume = (folder / "state.pt").exists()
    if folder.exists() and not resume:
        shutil.rmtree(folder)
    data = labs[home]
    if row in BEST:
        data = data.with_name("all.yaml")
    clf = nb.train_classifier(data, folder, backbone, resume=resume, **settings)
    trained = time.monotonic() - started
    measured = {lab: nb.evaluate(clf, labs[lab]) for lab in others}
    measured[home] = clf.info["training"]["metrics"]
    adjusted = {}
    if row in BEST:
        clf.info["prior"] = [PRIOR.get(name, 1.0) for name in clf.classes]
        adjusted = {lab: nb.evaluate(clf, labs[lab]) for lab in others}
    shutil.rmtree(folder)
    return {
        **{"task": task, "backbone": backbone, "row": row, "seed": seed},
        "balanced_accuracy": {lab: round(m["balanced_accuracy"], 4) for lab, m in measured.items()},
        "with prior": {lab: round(m["balanced_accuracy"], 4) for lab, m in adjusted.items()},
        "confusion": {lab: measured[lab]["confusion"] for lab in others},
        "seconds": [round(trained), round(time.monotonic() - started)],
        **{
            "size": settings["input_size"],
            "epochs": settings["epochs"],
            "crops": clf.info["training"]["images"],
        },
    }


def key_of(found):
    return tuple(found[key] for key in ("task", "backbone", "row", "seed"))


def read_results(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- data ----------------------------------------------------------------------------------------


def find_white_cells(options):
    return write_white_cells(options.shared, options.out / "data")


def write_white_cells(shared, folder):
    """The laboratories' data.yaml, by name; cells found by the packaged detector."""
    detector = None
    labs = {lab: folder / lab / "data.yaml" for lab in ("pbc", "bccd", "cellavision")}
    for lab, path in labs.items():
        if not path.exists():
            detector = detector or nb.load_checkpoint("blood-cells")
            write_lab(shared / "data" / "wbc-types" / lab, path.parent, detector, lab == "pbc")
    return labs


def write_lab(source, folder, detector, home):
    """Boxes of the white cells in the middle of a laboratory's crops, in YOLO's layout.

    data.yaml of the laboratory to train on has `PER_TYPE` crops of a type, all.yaml all.
    """
    dataset = read_crop_dataset(source)
    items = next(iter(dataset.splits.values()))
    splits = split_home(items) if home else {"val": items}
    for split, some in splits.items():
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for item in locate_cells(some, detector, 0.8, "WBC"):
            name = f"{dataset.names[item.label]}-{item.image.name}"
            shutil.copy(item.image, folder / "images" / split / name)
            text = " ".join(f"{v:.6f}" for v in item.cxcywh)
            label = folder / "labels" / split / Path(name).with_suffix(".txt")
            label.write_text(f"{item.label} {text}\n")
    small = ["images/train"] if home else ["images/val"]
    for name, train in (
        ("all.yaml", [*small, *(["images/more"] if home else [])]),
        ("data.yaml", small),
    ):
        lines = [f"train: {train}", "val: images/val", f"names: {dataset.names}"]
        (folder / name).write_text("\n".join(lines) + "\n")


def split_home(items):
    """Items to validate on, to train on and more to train on; the same in every run.

    Of files with the same content (there are some in pbc) one is taken.
    """
    items = list({hashlib.sha256(i.image.read_bytes()).digest(): i for i in items}.values())
    splits = {"val": [], "train": [], "more": []}
    for label in sorted({item.label for item in items}):
        mine = [item for item in items if item.label == label]
        mine = [mine[k] for k in np.random.default_rng(7).permutation(len(mine))]
        splits["val"] += mine[:HELD_OUT]
        splits["train"] += mine[HELD_OUT : HELD_OUT + PER_TYPE]
        splits["more"] += mine[HELD_OUT + PER_TYPE :]
    return splits


def find_tumours(options):
    """The laboratories' folders; patches have no cell in their middle and stay as they are."""
    source = options.shared / "data" / "tumour-patches"
    names = ("healthy", "tumour")
    files = {name: [sorted((source / "turin" / name).iterdir())] for name in names}
    home = link_small(files, options.out / "data" / "turin")
    return {"turin": home, "lc25000": source / "lc25000"}


def find_red_cells(options):
    """Crops of the slides to train on and of those to test on."""
    slides = sorted(path for path in (options.malaria / "crops").iterdir())
    files = {"infected": {}, "uninfected": {}}
    for slide in slides:
        for kind in slide.iterdir():
            name = "uninfected" if kind.name == "uninfected" else "infected"
            files[name].setdefault(slide.name, []).extend(sorted(kind.glob("*.png")))
    home = {
        name: [mine for slide, mine in by_slide.items() if slide not in TEST_SLIDES]
        for name, by_slide in files.items()
    }
    folder = options.out / "data" / "other slides"
    for name, by_slide in files.items():
        mine = [path for slide in TEST_SLIDES for path in by_slide[slide]]
        some = mine[:: max(len(mine) // TEST_CELLS, 1)] if name == "uninfected" else mine
        link(some, folder / name)
    return {"slides": link_small(home, options.out / "data" / "slides"), "other slides": folder}


def link_small(files, folder):
    """Folders train and val of a class's files in groups, as many of each group as there are."""
    for name, groups in files.items():
        random = np.random.default_rng(7)
        mixed = [[group[k] for k in random.permutation(len(group))] for group in groups]
        longest = max(map(len, mixed))
        turns = [group[k] for k in range(longest) for group in mixed if k < len(group)]
        link(turns[: SMALL["val"]], folder / "val" / name)
        link(turns[SMALL["val"] :][: SMALL["train"]], folder / "train" / name)
    return folder


def link(files, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        place = folder / path.name
        if not place.exists():
            os.symlink(path.resolve(), place)


LABORATORIES = {"white cells": find_white_cells, "tumour": find_tumours, "malaria": find_red_cells}


# --- the table -----------------------------------------------------------------------------------


def print_table(results):
    """Mean ± standard deviation over the seeds, and the mean of the test laboratories."""
    for task, others in TASKS.items():
        mine = [found for found in results if found["task"] == task]
        four = ("four types",) if task == "white cells" else ()
        if mine:
            print(f"\n| {task} | | {' | '.join((*others, 'mean', *four))} | seeds |")
            print("|---" * (len(others) + len(four) + 4) + "|")
        for backbone in BACKBONES:
            rows = dict.fromkeys(f["row"] for f in mine if f["backbone"] == backbone)
            for row in sorted(rows, key=list(ROWS).index):
                group = [f for f in mine if (f["backbone"], f["row"]) == (backbone, row)]
                for key, name in (("balanced_accuracy", row), ("with prior", f"{row}, prior")):
                    if not group[0][key] or (key == "with prior" and row not in BEST):
                        continue
                    scores = np.array([[f[key][lab] for lab in others] for f in group])
                    cells = [spread(column) for column in scores.T] + [spread(scores.mean(1))]
                    if four:
                        plain = key == "balanced_accuracy"
                        cells.append(four_types(group, others) if plain else "")
                    print(f"| {name} | {backbone} | {' | '.join(cells)} | {len(group)} |")


def four_types(group, others):
    """The mean of both laboratories without the type of which there are too few."""
    if not all(f["confusion"] for f in group):
        return ""
    scores = [[without(f["confusion"][lab], RARE) for lab in others] for f in group]
    return spread(np.array(scores).mean(1))


def without(confusion, name):
    """Balanced accuracy without a class; the matrix is predicted by true."""
    matrix = np.array(confusion["matrix"])
    recall = np.diag(matrix) / np.maximum(matrix.sum(0), 1)
    return np.mean(
        [r for r, label in zip(recall, confusion["labels"], strict=True) if label != name]
    )


def spread(values):
    sd = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{sd}"


if __name__ == "__main__":
    main()
