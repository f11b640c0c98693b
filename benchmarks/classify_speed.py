"""What the front end costs a classifier: training steps and crops per second of ResNet-18.

    python benchmarks/classify_speed.py [--size 128] [--batch 32] [--batches 4] [--repeats 5]

Real crops of white cells. Plain torchvision and the classifier get the same crops and threads, in
turns, best of several; wall and CPU time, as the machine may be busy. Inference is from arrays of
bytes to probabilities, a training step is forward, loss and backward of one batch.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from torchvision import models

from napari_beerlanet.core.checkpoints.serialize import describe_classifier
from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.classification.network import ClassificationNetwork
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.threads import thread_count

SHARED = Path(__file__).resolve().parents[2] / "shared"
CLASSES = 5
MEAN, SD = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shared", type=Path, default=SHARED)
    options = parser.parse_args()
    torch.set_num_threads(thread_count())
    torch.manual_seed(0)
    crops = read_crops(options)
    print(
        f"ResNet-18, {options.size} × {options.size}, batch {options.batch}, "
        f"{thread_count()} threads, PyTorch {torch.__version__}\n"
    )
    print("| | wall | ratio | CPU | ratio | crops per second |\n|---|---|---|---|---|---|")
    inference(crops, options)
    training(crops[: options.batch], options)


def read_crops(options):
    """(n, size, size, 3) uint8, of all types in turn."""
    folder = options.shared / "data/wbc-types/pbc"
    by_type = [sorted(p.glob("[!.]*.jpg")) for p in sorted(folder.iterdir()) if p.is_dir()]
    count = options.batch * options.batches
    files = [by_type[k % len(by_type)][k // len(by_type)] for k in range(count)]
    side = (options.size, options.size)
    return np.stack([np.asarray(Image.open(f).convert("RGB").resize(side)) for f in files])


def network(size, front_end="beerlanet"):
    settings = ClassifierSettings(input_size=size, front_end=front_end)
    made = ClassificationNetwork("resnet18", CLASSES, settings)
    if made.has_stain:
        made.fit_mix()
    return made


def inference(crops, options):
    made = network(options.size)
    names = [f"type {k}" for k in range(CLASSES)]
    model = Classifier(made, describe_classifier(made, "speed", names))
    plain = models.resnet18(num_classes=CLASSES).eval().to(memory_format=torch.channels_last)

    def run_plain():
        with torch.inference_mode():
            for start in range(0, len(crops), options.batch):
                planes = torch.from_numpy(crops[start : start + options.batch]).permute(0, 3, 1, 2)
                plain((planes.float() / 255 - MEAN) / SD).softmax(1).numpy()

    ways = {
        "inference, plain torchvision": run_plain,
        "inference, with BeerLaNet": lambda: model.classify(crops, batch=options.batch),
    }
    report(ways, len(crops), options.repeats)


def training(crops, options):
    labels = torch.arange(len(crops)) % CLASSES
    images = torch.from_numpy(crops).permute(0, 3, 1, 2).contiguous().float() / 255
    plain = models.resnet18(num_classes=CLASSES).train().to(memory_format=torch.channels_last)
    stained = network(options.size).train().to(memory_format=torch.channels_last)

    def step(model, given):
        model.zero_grad()
        functional.cross_entropy(model(given), labels).backward()

    standard = ((images - MEAN) / SD).to(memory_format=torch.channels_last)
    ways = {
        "training step, plain torchvision": lambda: step(plain, standard),
        "training step, with BeerLaNet": lambda: step(stained, images),
    }
    report(ways, len(crops), options.repeats)


def report(ways, crops, repeats):
    best = {}
    for turn in range(repeats + 1):
        for name, work in ways.items():
            took = timed(work)
            if turn:  # the first one compiles
                best[name] = np.minimum(best.get(name, np.inf), took)
    first = next(iter(best.values()))
    for name, (wall, cpu) in best.items():
        print(
            f"| {name} | {wall:.2f} s | {wall / first[0]:.2f} | {cpu:.2f} s | "
            f"{cpu / first[1]:.2f} | {crops / wall:.0f} |"
        )


def timed(work):
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return np.array([time.perf_counter() - wall, time.process_time() - cpu])


if __name__ == "__main__":
    main()
