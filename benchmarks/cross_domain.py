"""Train on BCCD, measure on another laboratory: front end and stain jitter on and off.

    python benchmarks/cross_domain.py --seeds 0 1 --epochs 12 --out results

Every row is trained on BCCD's train split alone, from the same COCO weights, with the same
settings, and its last epoch is measured by Ultralytics' validation at the training size; other-lab
is never trained on. Prints a table and writes it to OUT/cross_domain.md.
"""

import argparse
import copy
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from smears import NAMES, write_bccd, write_other_lab

from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.ultralytics_api import DetectionModel, DetectionValidator
from napari_beerlanet.core.formats.dataset import Dataset, read_dataset
from napari_beerlanet.core.training.setup import training_sample
from napari_beerlanet.core.training.trainer.data import StainJitter
from napari_beerlanet.core.training.trainer.trainer import StainTrainer

SHARED = Path(__file__).resolve().parents[2] / "shared"
# name: settings of the front end (None: plain YOLO), stain jitter (None: hue, saturation, value)
VARIANTS = {
    "plain": (None, None),
    "plain, stain jitter": (None, StainJitter()),
    "front end": ({}, None),
    "front end, stain jitter": ({}, StainJitter()),
    "front end linear, stain jitter": ({"light": False}, StainJitter()),
    "front end intensity, stain jitter": ({"domain": "intensity"}, StainJitter()),
}


def main():
    options = parse(__doc__.splitlines()[0], Path("cross_domain"), 12)
    out = options.out.resolve()
    bccd = write_bccd(options.shared, out / "bccd", tight=not options.raw)
    other = write_other_lab(options.shared, out / "other-lab")
    head = ["model", "seed", "minutes", "BCCD val mAP50", "mAP50-95", "other lab mAP50", "mAP50-95"]
    head += [f"{name} AP50" for name in NAMES] + [f"{name} AP50-95" for name in NAMES]
    rows = [line(head), "|---" * len(head) + "|"]
    print("\n".join(rows), flush=True)
    for seed in options.seeds:
        for name in options.variants:
            rows.append(one_row(name, seed, options, out, bccd, other))
            print(rows[-1], flush=True)
            (out / "cross_domain.md").write_text("\n".join(rows) + "\n")


def parse(about, out, epochs):
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--batch", type=int, default=8)
    default = ["plain", "plain, stain jitter", "front end", "front end, stain jitter"]
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=default)
    parser.add_argument("--raw", action="store_true", help="BCCD's own boxes and margins")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def line(cells):
    return "| " + " | ".join(cells) + " |"


def one_row(name, seed, options, out, bccd, other):
    began = time.perf_counter()
    model = train(name, seed, options, out, bccd)
    minutes = (time.perf_counter() - began) / 60
    here = validate(model, bccd, imgsz=options.size, folder=out / "val")
    there = validate(model, other, imgsz=options.size, folder=out / "val")
    numbers = [here.map50, here.map, there.map50, there.map, *there.ap50, *there.maps]
    return line([name, str(seed), f"{minutes:.1f}", *(f"{x:.3f}" for x in numbers)])


def validate(model, data, *, imgsz, folder, split="val", batch=16):
    """Ultralytics' box metrics (`map50`, `map`, `ap50`, `maps`, …) of a model on one split.

    The validator runs as in training, where it neither looks for the data in the network nor
    writes a cache beside it.
    """
    dataset = read_dataset(data)
    trainer = StainTrainer(
        {"model": "none.pt", "data": str(data), "split": split, "imgsz": imgsz, "cache": False}
        | {"device": str(next(model.parameters()).device), "save_dir": str(folder)},
        dataset=Dataset(dataset.path, dataset.names, {"train": [], split: dataset.splits[split]}),
    )
    trainer.model = copy.deepcopy(model).eval()
    trainer.model.loss = lambda batch, found: (None, {})
    trainer.ema = SimpleNamespace(ema=trainer.model)
    trainer.stopper = SimpleNamespace(possible_stop=False)
    trainer.amp, trainer.epoch, trainer.loss_items = False, 0, {}
    trainer.test_loader = trainer.get_dataloader(trainer.data[split], batch, rank=-1, mode="val")
    validator = DetectionValidator(trainer.test_loader, folder, copy.copy(trainer.args), {})
    with torch.no_grad():
        validator(trainer=trainer)
    return validator.metrics.box


def train(name, seed, options, out, data):
    """The averaged weights after the last epoch."""
    front, jitter = VARIANTS[name]
    settings = {
        "model": "none.pt",
        "data": str(data),
        "epochs": options.epochs,
        "imgsz": options.size,
        "batch": options.batch,
        "val": False,
        "device": "cpu",
        "seed": seed,
        "save_dir": str(out / f"{name} {seed}".replace(",", "").replace(" ", "-")),
    }
    dataset = read_dataset(data)
    trainer = StainTrainer(settings, jitter=jitter, dataset=dataset)
    trainer.model = build(front, seed, options, dataset).to(memory_format=torch.channels_last)
    trainer.train()
    return trainer.ema.ema


def build(front, seed, options, dataset):
    """A network with the COCO weights; its front end starts from the training images' colours."""
    weights = load_checkpoint(options.shared / "weights" / "yolov8n.pt", "cpu").network
    torch.manual_seed(seed)
    kind = {} if front is None else {"imgsz": options.size, **front}
    maker = DetectionModel if front is None else StainDetectionModel
    model = maker(weights.yaml, nc=len(NAMES), verbose=False, **kind)
    model.names = dict(enumerate(NAMES))
    model.load(weights, verbose=False)
    if front is not None:
        model.fit_mix([one.pixels for one in training_sample(dataset, options.size)])
    return model


if __name__ == "__main__":
    main()
