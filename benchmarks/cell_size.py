"""Is the size of cells found by itself, also by a model that one has just taught?

    python benchmarks/cell_size.py --out cell-size

"blood-cells" is fine-tuned with default settings on 1, 4 + 1 and 8 + 2 fields of another laboratory
and of BCCD, enlarged by 1, 1.6 and 2.4, with all cells annotated or red cells alone. Fields are
enlarged "whole", or "cut" to the pixels that they had, as a stronger objective shows them: then
cells are larger in training, too. Parent and child are measured on 100 other fields of the same
kind, with automatic size and with the best of five fixed ones around the true one. AP is the mean
of red and white cells, or that of red cells where they alone are annotated.
A finished run is a line of OUT/cell_size.jsonl and is not done again.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from finetune import PARENT, SHARED, Results, line
from PIL import Image
from smears import NAMES, read_voc

import napari_beerlanet as nb
from napari_beerlanet.core.formats.dataset import Dataset, read_dataset

LABS = ("other-lab", "bccd")
ENLARGED = (1.0, 1.6, 2.4)
VIEWS = ("whole", "cut")
FIELDS = {1: (1, 1), 5: (4, 1), 10: (8, 2)}  # for training and validation; an only one does both
KINDS = {"all": (0, 1, 2), "red": (0,)}  # labels that are annotated
FIXED = (0.8, 0.89, 1.0, 1.12, 1.25)  # of the median of the true sizes of red cells
HELD_OUT = 100


def main():
    options = parse()
    out = options.out.resolve()
    done = Results(out / "cell_size.jsonl")
    labs = {name: Laboratory(name, options.shared) for name in options.labs}
    shown = [
        (lab, {"lab": lab, "factor": factor, "view": view})
        for factor in options.enlarged
        for view in (options.views if factor > 1 else VIEWS[:1])
        for lab in labs
    ]
    runs = [
        (labs[lab], {**key, "fields": fields, "kind": kind, "draw": draw})
        for draw in options.draws
        for fields in options.fields
        for kind in options.kinds
        for lab, key in shown
    ]
    if options.train:
        for lab, key in runs:
            trained(key, lab, out)
        return
    for lab, key in shown:
        held_out = labs[lab].held_out(out, key)
        done.once({**key, "fields": 0}, lambda key, data=held_out: measured(PARENT, data))
    for lab, key in runs:
        held_out = lab.held_out(out, key)
        done.once(key, lambda key, lab=lab, data=held_out: measured(trained(key, lab, out), data))
        (out / "cell_size.md").write_text(table(done.rows))
    print(table(done.rows))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labs", nargs="+", choices=LABS, default=LABS)
    parser.add_argument("--enlarged", nargs="+", type=float, default=ENLARGED)
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=VIEWS)
    parser.add_argument("--fields", nargs="+", type=int, choices=FIELDS, default=(5, 1, 10))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--draws", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--train", action="store_true", help="train only, and measure later")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--out", type=Path, default=Path("cell-size"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    return options


class Laboratory:
    """Its fields, in an order that is always the same: to measure on first, then to draw from."""

    def __init__(self, name, shared):
        source = shared / "data" / name
        self.name = name
        if name == "bccd":
            splits = {
                split: (source / "ImageSets" / "Main" / f"{split}.txt").read_text().split()
                for split in ("train", "val", "test")
            }
            measure = splits["test"] + shuffled(splits["val"], 0)
            stems = measure[:HELD_OUT] + shuffled(splits["train"], 0)
            self.fields = [(source / "JPEGImages" / f"{stem}.jpg", None) for stem in stems]
        else:
            images = shuffled(sorted((source / "images").iterdir()), 0)
            self.fields = [(p, source / "labels" / f"{p.stem}.txt") for p in images]

    def held_out(self, out, key):
        """The data.yaml of fields that no model is trained on."""
        folder = out / f"{self.name}-{key['factor']:g}-{key['view']}"
        for field in self.fields[:HELD_OUT]:
            self.write(field, folder, key, KINDS["all"])
        return write_yaml(folder, dict.fromkeys(("train", "val", "test"), "images"))

    def draw(self, folder, key):
        """The data.yaml of fields that were drawn, with some `kind` of their cells annotated."""
        train, validation = FIELDS[key["fields"]]
        pool = self.fields[HELD_OUT:]
        order = np.random.default_rng([key["draw"], 1]).permutation(len(pool))
        some = [k for k in order if (read_boxes(*pool[k])[0] == 0).any()][: key["fields"]]
        chosen = [self.write(pool[k], folder, key, KINDS[key["kind"]]) for k in some]
        splits = {"train": chosen[:train], "val": chosen[-validation:]}
        return write_yaml(folder, splits)

    def write(self, field, folder, key, kept):
        """An enlarged image with its labels of `kept` classes; returns its path in the folder."""
        path, labels_path = field
        image, labels = folder / "images" / path.name, folder / "labels" / f"{path.stem}.txt"
        if not labels.exists():
            for parent in (image.parent, labels.parent):
                parent.mkdir(parents=True, exist_ok=True)
            picture = Image.open(path).convert("RGB")
            label, boxes = read_boxes(path, labels_path)
            if key["factor"] == 1:
                image.write_bytes(path.read_bytes())
            else:
                if key["view"] == "cut":
                    window = middle(boxes[label == 0], picture.size, key["factor"])
                    picture = picture.crop(window.astype(int).tolist())
                    label, boxes = cut(label, boxes, window)
                size = [round(side * key["factor"]) for side in picture.size]
                boxes = boxes * (np.array(size) / picture.size)[[0, 1, 0, 1]]
                picture = picture.resize(size, Image.Resampling.BICUBIC)
                picture.save(image, quality=95)
            centre, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
            rows = np.column_stack([label, centre / picture.size, sides / picture.size])
            labels.write_text("".join(row(*r) for r in rows if int(r[0]) in kept))
        return f"images/{path.name}"


def middle(boxes, size, factor):
    """The window (x1, y1, x2, y2) around the box nearest to the middle, `factor` times smaller."""
    size, side = np.array(size), np.round(np.array(size) / factor)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    at = centres[np.linalg.norm(centres - size / 2, axis=1).argmin()] if len(boxes) else size / 2
    corner = np.clip(np.round(at - side / 2), 0, size - side)
    return np.concatenate([corner, corner + side])


def cut(label, boxes, window):
    """Labels and boxes in a window, of which a third or more is in it."""
    inside = np.clip(boxes, window[[0, 1, 0, 1]], window[[2, 3, 2, 3]])
    area = [(b[:, 2:] - b[:, :2]).prod(1) for b in (inside, boxes)]
    kept = area[0] >= area[1] / 3
    return label[kept], (inside - window[[0, 1, 0, 1]])[kept]


def row(label, *cxcywh):
    return " ".join([f"{label:.0f}", *(f"{v:.6f}" for v in cxcywh)]) + "\n"


def read_boxes(path, labels_path):
    """Labels (n,) and boxes (n, 4) in pixels."""
    size = Image.open(path).size
    if labels_path is None:
        return read_voc(path.parents[1] / "Annotations" / f"{path.stem}.xml", size[::-1])
    rows = np.loadtxt(labels_path, ndmin=2)
    centre, half = rows[:, 1:3] * size, rows[:, 3:] * size / 2
    return rows[:, 0].astype(int), np.hstack([centre - half, centre + half])


def shuffled(items, seed):
    return [items[k] for k in np.random.default_rng(seed).permutation(len(items))]


def write_yaml(folder, splits):
    """A data.yaml of folders, or of lists of images."""
    lines = [f"names: [{', '.join(NAMES)}]"]
    for split, images in splits.items():
        if isinstance(images, list):
            (folder / f"{split}.txt").write_text("\n".join(images) + "\n")
            images = f"{split}.txt"
        lines.append(f"{split}: {images}")
    data = folder / "data.yaml"
    data.write_text("\n".join(lines) + "\n")
    return data


def trained(key, lab, out):
    """The fine-tuned model; an interrupted run goes on, a finished one is not done again."""
    folder = out / "runs" / "-".join(f"{value}" for value in key.values())
    data = lab.draw(folder / "data", key)
    return nb.fine_tune(PARENT, data, output=folder / "run", device="cpu", resume=True)


def measured(model, data):
    """AP50 and AP50-95 of each class, with automatic size ("auto") and with each fixed one."""
    if isinstance(model, str):
        model = nb.load_checkpoint(model, device="cpu")
    dataset = read_dataset(data)
    true = median_size(dataset, label=0)
    sizes = {"auto": "auto"} | {f"{f:g}": f * true for f in FIXED}
    results = {k: nb.evaluate(model, dataset, "test", object_size=v) for k, v in sizes.items()}
    return {
        "true": round(true, 1),
        "object_sizes": {k: v["median"] for k, v in model.info["object_sizes"].items()},
        "measured": {
            k: {c: (m["AP50"], m["AP50-95"]) for c, m in r["per_class"].items()}
            for k, r in results.items()
        },
    }


def median_size(dataset: Dataset, label):
    """√(width · height) in pixels of the images."""
    sides = [
        item.cxcywh[item.labels == label, 2:] * Image.open(item.image).size
        for item in dataset.splits["test"]
    ]
    return float(np.median(np.sqrt(np.concatenate(sides).prod(1))))


# --- the table -----------------------------------------------------------------------------------


def table(rows):
    """A line for each draw: AP50 and AP50-95 in percent."""
    head = ["laboratory", "enlarged", "view", "fields", "annotated", "draw", "parent, automatic"]
    head += ["automatic", "best fixed", "at", "to best fixed", "to parent", "missed"]
    lines = [line(head), "|---" * len(head) + "|"]
    parents = {(r["lab"], r["factor"], r["view"]): r for r in rows if not r["fields"]}
    for r in sorted(rows, key=lambda r: [str(v) for v in r.values()][:6]):
        classes = NAMES[:1] if r.get("kind") == "red" else NAMES[:2]
        parent = score(parents[r["lab"], r["factor"], r["view"]], "auto", classes)
        auto = score(r, "auto", classes)
        best = max((k for k in r["measured"] if k != "auto"), key=lambda k: score(r, k, classes)[1])
        fixed = score(r, best, classes)
        to_fixed, to_parent = auto[1] - fixed[1], auto[1] - parent[1]
        texts = [
            r["lab"],
            f"{r['factor']:g}",
            r["view"],
            str(r["fields"]),
            r.get("kind", ""),
            r.get("draw", ""),
        ]
        texts += [shown(parent), shown(auto), shown(fixed), best]
        texts += [f"{to_fixed:+.1f}", f"{to_parent:+.1f}"]
        lines.append(line([*map(str, texts), "**x**" if to_fixed < -0.5 or to_parent < -1 else ""]))
    return "\n".join(lines) + "\n"


def score(run, size, classes):
    """AP50 and AP50-95 in percent, the mean of classes."""
    return 100 * np.mean([run["measured"][size][name] for name in classes], axis=0)


def shown(ap):
    return f"{ap[0]:.1f} / {ap[1]:.1f}"


if __name__ == "__main__":
    main()
