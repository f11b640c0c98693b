"""The paper's table on the data of ../shared: all methods, three tasks, other laboratories.

    python benchmarks/paper_table.py --out paper-table [--seeds 0 1 2] [--workers 1] [--estimate]

Detection: trained on BCCD, tested on another laboratory's smears, with YOLOv8n. Classification:
white-cell types of `pbc`, tested on `bccd` and `cellavision`; tumour patches of `turin`, tested on
`lc25000`; with ResNet-18, which starts at random, as no ImageNet weights are in ../shared. Writes
OUT/benchmark.yaml and what it needs, then runs `napari-beerlanet benchmark` on it. Killed, the same
command resumes it.

By default networks and images have a size that two CPU cores finish within days rather than months:
smears of 320 pixels for 15 epochs, crops of 96 pixels for 12. `--full` takes the paper's: 640
pixels for 50 epochs, crops of 224 pixels for 20, batches of 128, and StainGAN of the paper's size.
"""

import argparse
import sys
from pathlib import Path

import yaml
from classify import LABORATORIES
from smears import write_bccd, write_other_lab

from napari_beerlanet.cli.main import main as command
from napari_beerlanet.core.benchmark.settings import METHODS

SHARED = Path(__file__).resolve().parents[2] / "shared"
# From scratch on a thousand crops, the paper's rate and batch would not converge in 12 epochs.
SCRATCH = {"learning_rate": 1e-3, "cosine": True, "warm_up": 15, "averaging": 0.97}
SMALL = {"detect": (320, 15, 8), "classify": (96, 12, 32)}  # pixels, epochs, batch
FULL = {"detect": (640, 50, 8), "classify": (224, 20, 128)}
SMALL_GAN = {"filters": 16, "blocks": 6, "crop": 128, "steps": 600}
FULL_GAN = {"filters": 64, "blocks": 9, "crop": 256, "steps": 20_000}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("paper-table"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of each job")
    parser.add_argument("--full", action="store_true", help="the paper's sizes and epochs")
    parser.add_argument("--estimate", action="store_true", help="only say how long it will take")
    parser.add_argument("--shared", type=Path, default=SHARED)
    options = parser.parse_args()
    file = write_settings(options)
    words = ["benchmark", str(file), "--out", str(options.out / "results"), "--paper"]
    words += ["--workers", str(options.workers), *(["--estimate"] if options.estimate else [])]
    return command(words)


def write_settings(options):
    """The data sets and OUT/benchmark.yaml; returns its path."""
    out, shared = options.out.resolve(), options.shared.resolve()
    bccd, other = out / "data" / "bccd", out / "data" / "other-lab"
    for folder, write in ((bccd, write_bccd), (other, write_other_lab)):
        if not (folder / "data.yaml").exists():
            write(shared, folder)
    white = LABORATORIES["white cells"](shared, out / "data" / "white cells")
    tumour = LABORATORIES["tumour"](shared, out / "data" / "tumour")
    sizes = FULL if options.full else SMALL
    content = {
        "methods": options.methods,
        "seeds": options.seeds,
        "tasks": [
            {
                "name": "blood cells",
                "kind": "detect",
                "train": str(bccd / "data.yaml"),
                "tests": {"other lab": {"data": str(other / "data.yaml"), "split": "val"}},
                "weights": str(shared / "weights" / "yolov8n.pt"),
                **sized(sizes["detect"]),
            },
            classification("white cells", white, sizes, {"fill": 0.8}, options.full),
            classification("tumour", tumour, sizes, {}, options.full),
        ],
        "staingan": FULL_GAN if options.full else SMALL_GAN,
        **({"threads": options.threads} if options.threads else {}),
    }
    file = out / "benchmark.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def classification(name, laboratories, sizes, more, full):
    """Trained on the first of the laboratories, tested on the others."""
    home, *others = laboratories
    return {
        "name": name,
        "kind": "classify",
        "train": str(laboratories[home]),
        "tests": {lab: {"data": str(laboratories[lab]), "split": "val"} for lab in others},
        "backbone": "resnet18",
        **sized(sizes["classify"]),
        "options": more if full else {**SCRATCH, **more},
    }


def sized(numbers):
    return dict(zip(("image_size", "epochs", "batch"), numbers, strict=True))


if __name__ == "__main__":
    sys.exit(main())
