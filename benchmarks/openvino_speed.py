"""Detection in OpenVINO against torch on a CPU: agreement of boxes, mAP and speed.

    python benchmarks/openvino_speed.py [--model blood-cells] [--images 40] [--only speed]

Speed is CPU and wall time of the network alone on a tile of 640², and of `detect` on a field, in
turns in one process, best of several. Agreement is over images of BCCD's test split and of another
laboratory, spread evenly (`--images 0`: all): mAP of each way, and the share of boxes with a
confidence above 0.25 of torch or of a way for which the other has one of the same class with an IoU
above 0.9. Once each way finds the resolution of an image by itself, once all look at the one that
torch has found, as at tiles of a slide.
"""

import argparse
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from smears import write_bccd, write_other_lab

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.geometry import iou
from napari_beerlanet.core.common.storage import pixel_hash
from napari_beerlanet.core.detection.openvino_network import has_bfloat16, inference_threads
from napari_beerlanet.core.detection.pipeline import DetectionPipeline, ImageCache
from napari_beerlanet.core.evaluation.dataset import detect_split, measure
from napari_beerlanet.core.formats.dataset import Dataset, read_dataset
from napari_beerlanet.samples import blood_smear

SHARED = Path(__file__).resolve().parents[2] / "shared"
WAYS = ("off", "float32", "bfloat16")
NAMES = {"off": "torch", "float32": "OpenVINO, float32", "bfloat16": "OpenVINO, bfloat16"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="blood-cells")
    parser.add_argument("--images", type=int, default=40, help="of each data set; 0: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--only", choices=["speed", "agreement"])
    options = parser.parse_args()
    model = nb.load_checkpoint(options.model, device="cpu")
    ways = [way for way in WAYS if way != "bfloat16" or has_bfloat16()]
    print(f"{inference_threads()} threads, model {options.model}")
    if options.only != "agreement":
        speed_table(model, ways, options.repeats)
    if options.only != "speed":
        with tempfile.TemporaryDirectory() as folder:
            for write in (write_bccd, write_other_lab):
                path = write(options.shared, Path(folder) / write.__name__[6:])
                for resolutions in (nullcontext(), same_resolutions()):
                    with resolutions as same:
                        agreement_table(model, ways, path, options.images, same)


def speed_table(model, ways, repeats):
    tile = torch.rand(1, 3, 640, 640)
    field = blood_smear((480, 640), seed=1).image
    runner = model.runner
    networks = {way: runner.openvino(way, [], wait=True) for way in ways}

    def network(way):
        runner._predict(tile, networks[way])

    def detect(way):
        model._image_cache = ImageCache()  # or the second run would know the size
        model.detect(field, openvino=way)

    print("\n| | wall | CPU | times as fast (wall) | (CPU) |\n|---|---|---|---|---|")
    for what, work in (("network, 640²", network), ("detect, 640 × 480", detect)):
        best = dict.fromkeys(ways, (np.inf, np.inf))
        for turn in range(repeats + 1):
            for way in ways:
                wall, cpu = time.perf_counter(), time.process_time()
                work(way)
                spent = time.perf_counter() - wall, time.process_time() - cpu
                if turn:
                    best[way] = tuple(map(min, best[way], spent))
        for way in ways:
            ratio = [a / b for a, b in zip(best["off"], best[way], strict=True)]
            print(
                f"| {what}: {NAMES[way]} | {1e3 * best[way][0]:.0f} ms | "
                f"{1e3 * best[way][1]:.0f} ms | {ratio[0]:.2f} | {ratio[1]:.2f} |"
            )


@contextmanager
def same_resolutions():
    """Every way looks at an image at the resolution that the first one finds."""
    find, found = DetectionPipeline._find_scale, {}

    def find_once(pipeline):
        key = pixel_hash(pipeline.pixels)
        if key not in found:
            found[key] = find(pipeline)
        return found[key]

    DetectionPipeline._find_scale = find_once
    try:
        yield ", at torch's resolutions"
    finally:
        DetectionPipeline._find_scale = find


def agreement_table(model, ways, path, count, how=None):
    dataset = read_dataset(path)
    split = "test" if dataset.splits.get("test") else "val"
    items = dataset.splits[split]
    chosen = items[:: max(len(items) // count, 1)][:count] if count else items
    dataset = Dataset(dataset.path, dataset.names, {split: chosen})
    pairs = {}
    for way in ways:
        model._image_cache = ImageCache()
        pairs[way] = detect_split(model, dataset, split, openvino=way)
    print(f"\n{path.parent.name}, {split}: {len(chosen)} of {len(items)} images{how or ''}\n")
    print("| | mAP50 | mAP50-95 | boxes | IoU > 0.9 | largest difference of confidence |")
    print("|---|---|---|---|---|---|")
    for way in ways:
        scores = measure(pairs[way], model.classes)
        found = [found for found, _ in pairs[way]]
        share, boxes, difference = agreement([found for found, _ in pairs["off"]], found)
        print(
            f"| {NAMES[way]} | {100 * scores['mAP50']:.2f} | {100 * scores['mAP50-95']:.2f} | "
            f"{boxes} | {100 * share:.2f} % | {difference:.4f} |"
        )


def agreement(expected, found):
    """Share of boxes above 0.25 of either with a partner among the other's candidates; number."""
    partners, differences = [], [0.0]
    for one, other in zip(expected, found, strict=True):
        for a, b in ((one, other), (other, one)):
            candidates = b if b.candidates is None else b.candidates
            overlap = iou(a.xyxy, candidates.xyxy) * (a.labels[:, None] == candidates.labels)
            if not len(a):
                continue
            best = overlap.max(1, initial=0)
            partners.append(best > 0.9)
            if len(candidates):
                close = np.abs(a.scores - candidates.scores[overlap.argmax(1)])[best > 0.9]
                differences.append(close.max(initial=0))
    together = np.concatenate(partners) if partners else np.ones(0, bool)
    boxes = sum(len(one) for one in found)
    return (together.mean() if len(together) else 1.0), boxes, max(differences)


if __name__ == "__main__":
    main()
