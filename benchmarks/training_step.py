"""What the front end costs in training: a step of YOLOv8n with and without it.

    python benchmarks/training_step.py [--size 640] [--batch 4] [--repeats 5]

Forward, loss and backward of a batch of mosaics of real smears (see `decompose.py`), with the same
network and threads, in turns, best of several; wall and CPU time, as the machine may be busy.
"""

import argparse
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from decompose import mosaic

from napari_beerlanet.core.common.threads import thread_count
from napari_beerlanet.core.detection.network import StainDetectionModel

SHARED = Path(__file__).resolve().parents[2] / "shared"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--shared", type=Path, default=Path(__file__).resolve().parents[2] / "shared"
    )
    options = parser.parse_args()
    torch.set_num_threads(thread_count())
    torch.manual_seed(0)
    model = StainDetectionModel("yolov8n.yaml", nc=3, imgsz=options.size)
    model.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
    model = model.train().to(memory_format=torch.channels_last)
    batch = batch_of(options)
    front_end, best = model.apply_front_end, {}
    for turn in range(options.repeats + 1):
        for name, apply in (("plain YOLOv8n", lambda x: x), ("with the front end", front_end)):
            model.apply_front_end = apply
            took = timed(lambda: step(model, batch))
            if turn:  # the first one compiles
                best[name] = np.minimum(best.get(name, np.inf), took)
    plain = best["plain YOLOv8n"]
    print(f"{options.size} × {options.size}, batch {options.batch}, {thread_count()} threads\n")
    print("| | wall | ratio | CPU | ratio |\n|---|---|---|---|---|")
    for name, (wall, cpu) in best.items():
        ratios = (wall / plain[0], cpu / plain[1])
        print(f"| {name} | {wall:.2f} s | {ratios[0]:.2f} | {cpu:.2f} s | {ratios[1]:.2f} |")


def batch_of(options):
    """Four different mosaics, or as many, with some boxes."""
    image = torch.from_numpy(mosaic(options.shared)).permute(2, 0, 1).float() / 255
    image = image[:, : options.size, : options.size]
    turned = [image, image.flip(1), image.flip(2), image.flip(1, 2)]
    images = torch.stack([turned[k % 4] for k in range(options.batch)])
    boxes = torch.rand(8 * options.batch, 4) * 0.2 + 0.2
    number = torch.arange(8 * options.batch) // 8
    return {"img": images, "cls": torch.zeros(len(boxes), 1), "bboxes": boxes, "batch_idx": number}


def step(model, batch):
    model.zero_grad()
    model(batch)[0].sum().backward()


def timed(work):
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return np.array([time.perf_counter() - wall, time.process_time() - cpu])


if __name__ == "__main__":
    main()
