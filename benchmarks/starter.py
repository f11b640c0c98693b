"""Make the packaged model: train on BCCD's train and val splits, report on test and elsewhere.

    python benchmarks/starter.py --out starter

Writes OUT/blood-cells.safetensors and OUT/report.json. Nothing is chosen by what is reported: it
is the last epoch, whatever its numbers. The recipe was chosen with `cross_domain.py`.

    python benchmarks/starter.py --out starter --densities-of blood-cells

Writes the same weights again, with the densities of all training boxes in the description.

    python benchmarks/starter.py --out starter --describe blood-cells

Writes the same weights again, with the present colours and limits in the description.
"""

import argparse
import json
from pathlib import Path

import torch
from smears import write_bccd, write_other_lab

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.formats.dataset import read_dataset
from napari_beerlanet.core.training.monitor import describe_training_domain
from napari_beerlanet.core.training.setup import training_sample

SHARED = Path(__file__).resolve().parents[2] / "shared"
COLOURS = class_colours(3)
UNKNOWN = {"parasites": ["WBC", "Platelets"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--densities-of", metavar="MODEL", help="only describe this one anew")
    parser.add_argument("--describe", metavar="MODEL", help="only update colours and limits")
    parser.add_argument("--out", type=Path, default=Path("starter"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = options.out.resolve()
    if options.describe:
        model = nb.load_checkpoint(options.describe, device="cpu")
        model.info.update(colours=COLOURS, unknown=UNKNOWN)
        out.mkdir(parents=True, exist_ok=True)
        nb.save_checkpoint(model, out / "blood-cells.safetensors")
        return
    bccd = write_bccd(options.shared, out / "bccd", together=True)
    if options.densities_of:
        model = nb.load_checkpoint(options.densities_of, device="cpu")
        tell_densities(model, bccd)
        nb.save_checkpoint(model, out / "blood-cells.safetensors")
        return
    other = write_other_lab(options.shared, out / "other-lab")
    nb.train_detector(
        bccd,
        output=out / "run",
        weights=options.shared / "weights" / "yolov8n.pt",
        epochs=options.epochs,
        image_size=options.size,
        seed=options.seed,
        resume=options.resume,
        progress=show,
    )
    model = nb.load_checkpoint(out / "run" / "last.safetensors", device="cpu")
    report = {
        "BCCD test": measured(model, bccd, "test"),
        "other laboratory": measured(model, other, "val"),
    }
    tell_densities(model, bccd)
    model.info.update(name="blood-cells", colours=COLOURS, unknown=UNKNOWN)
    model.info["training"]["command"] = "python benchmarks/starter.py"
    model.info["training"]["metrics"] = report
    nb.save_checkpoint(model, out / "blood-cells.safetensors")
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def tell_densities(model, data):
    """Say how dense each class is in all training images, not only in those of a run's sample."""
    dataset = read_dataset(data)
    sample = training_sample(dataset, model.info["image_size"], len(dataset.splits["train"]))
    seen = describe_training_domain(model.network, sample, {"classes": model.classes})
    model.info["densities_seen"] = seen["densities_seen"]


def measured(model, data, split):
    """What a user gets, without the curves."""
    found = nb.evaluate(model, data, split)
    return {key: found[key] for key in ("mAP50", "mAP50-95", "images", "per_class")}


def show(event):
    if event["event"] != "batch":
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
