"""Train on BCCD, measure on another laboratory: front end and stain jitter on and off.

    python benchmarks/cross_domain.py --seeds 0 1 --epochs 20 --size 320 --out results

Every row is trained on BCCD alone, from the same COCO weights, with the same settings; other-lab
is never trained on. Prints a table and writes it to OUT/cross_domain.md.
"""

import argparse
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

from napari_beerlanet.core.augment import StainJitter
from napari_beerlanet.core.trainer import StainTrainer, validate
from napari_beerlanet.core.yolo import read_pt

SHARED = Path(__file__).resolve().parents[2] / "shared"
NAMES = ("RBC", "WBC", "Platelets")
# name: front end (None: plain YOLO), stain jitter (None: Ultralytics' hue, saturation, value)
VARIANTS = {
    "plain YOLOv8n": (None, None),
    "plain, stain jitter": (None, StainJitter()),
    "front end, linear": ({"light": False}, None),
    "front end": ({"light": True}, None),
    "front end, stain jitter": ({"light": True}, StainJitter()),
}


def main():
    options = parse()
    out = options.out.resolve()
    bccd, other = write_bccd(out / "data"), write_other(out / "data")
    head = "| model | seed | minutes | BCCD val mAP50 | mAP50-95 | other lab mAP50 | mAP50-95 | "
    rows = [head + " | ".join(NAMES) + " |", "|---" * 10 + "|"]
    print("\n".join(rows))
    for seed in options.seeds:
        for name in options.variants:
            rows.append(one_row(name, seed, options, out, bccd, other))
            print(rows[-1], flush=True)
            (out / "cross_domain.md").write_text("\n".join(rows) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("cross_domain"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def one_row(name, seed, options, out, bccd, other):
    began = time.perf_counter()
    model = train(name, seed, options, out, bccd)
    minutes = (time.perf_counter() - began) / 60
    here = validate(model, bccd, imgsz=options.size, folder=out / "val")
    there = validate(model, other, imgsz=options.size, folder=out / "val")
    numbers = [here.map50, here.map, there.map50, there.map, *there.ap50]
    cells = [name, str(seed), f"{minutes:.1f}", *(f"{x:.3f}" for x in numbers)]
    return "| " + " | ".join(cells) + " |"


def train(name, seed, options, out, data):
    front, jitter = VARIANTS[name]
    folder = out / f"{name} {seed}".replace(",", "").replace(" ", "-")
    settings = {
        "model": str(SHARED / "weights" / "yolov8n.pt"),
        "data": str(data),
        "epochs": options.epochs,
        "imgsz": options.size,
        "batch": options.batch,
        "nbs": 16,
        "warmup_epochs": 1,
        "close_mosaic": 3,
        "val": False,
        "cache": "ram",
        "device": "cpu",
        "seed": seed,
        "save_dir": str(folder),
    }
    trainer = StainTrainer(settings, jitter=jitter, front=front)
    weights = read_pt(settings["model"])
    torch.manual_seed(seed)
    model = trainer.get_model(weights.yaml, weights)
    trainer.model = model.to(memory_format=torch.channels_last)
    trainer.train()
    return trainer.ema.ema


def write_bccd(folder):
    """BCCD's VOC boxes as YOLO text; returns the path of its data.yaml."""
    source = SHARED / "data" / "bccd"
    for split in ("train", "val", "test"):
        (folder / "bccd" / "images" / split).mkdir(parents=True, exist_ok=True)
        (folder / "bccd" / "labels" / split).mkdir(parents=True, exist_ok=True)
        for stem in (source / "ImageSets" / "Main" / f"{split}.txt").read_text().split():
            image = source / "JPEGImages" / f"{stem}.jpg"
            copy = folder / "bccd" / "images" / split / image.name
            copy.write_bytes(image.read_bytes())
            lines = voc_lines(source / "Annotations" / f"{stem}.xml")
            (folder / "bccd" / "labels" / split / f"{stem}.txt").write_text("\n".join(lines))
    return write_yaml(folder, "bccd", "images/train", "images/val")


def voc_lines(path):
    """'class x y w h' of every box with an area, as shares of the image."""
    root = ElementTree.parse(path).getroot()
    width, height = (float(root.findtext(f"size/{side}")) for side in ("width", "height"))
    for found in root.iter("object"):
        corner = (float(found.findtext(f"bndbox/{k}")) for k in ("xmin", "ymin", "xmax", "ymax"))
        x1, y1, x2, y2 = corner
        x1, x2, y1, y2 = max(x1, 0), min(x2, width), max(y1, 0), min(y2, height)
        if x2 > x1 and y2 > y1:
            box = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height)
            box += ((x2 - x1) / width, (y2 - y1) / height)
            yield f"{NAMES.index(found.findtext('name'))} " + " ".join(f"{v:.6f}" for v in box)


def write_other(folder):
    """Copies, because Ultralytics writes a cache beside the labels; returns its data.yaml."""
    for kind in ("images", "labels"):
        (folder / "other" / kind).mkdir(parents=True, exist_ok=True)
        for path in (SHARED / "data" / "other-lab" / kind).iterdir():
            (folder / "other" / kind / path.name).write_bytes(path.read_bytes())
    return write_yaml(folder, "other", "images", "images")


def write_yaml(folder, name, train, val):
    path = folder / f"{name}.yaml"
    names = ", ".join(f"{k}: {v}" for k, v in enumerate(NAMES))
    path.write_text(f"path: {folder / name}\ntrain: {train}\nval: {val}\nnames: {{{names}}}\n")
    return path


if __name__ == "__main__":
    main()
