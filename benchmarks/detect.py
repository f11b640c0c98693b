"""How fast detection is, against Ultralytics on a field and against SAHI on a slide.

    python benchmarks/detect.py [--model blood-cells] [--repeats 7] [--side 8000]

A field of 640 × 480 is compared with `YOLO("yolov8n.pt").predict` of the same image, a large image
with SAHI's sliced prediction of the same network with the same tiles. All run in one process with
the same threads, in turns, best of several. SAHI's slices are decomposed one by one; ours have one
decomposition for the whole image.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet.core import yolo  # keeps Ultralytics offline and quiet
from napari_beerlanet.core.boxes import iou
from napari_beerlanet.core.sizes import largest_size, typical_size
from napari_beerlanet.sample_data import blood_smear

SHARED = Path(__file__).resolve().parents[2] / "shared"
TILE = 640


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="blood-cells")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--side", type=int, default=8000)
    parser.add_argument("--shared", type=Path, default=SHARED)
    options = parser.parse_args()
    model = nb.load_checkpoint(options.model, device="cpu")
    print(f"{torch.get_num_threads()} threads, {yolo.__version__=}")
    field_table(model, options)
    if options.side:
        slide_table(model, options)


def field_table(model, options):
    image = field(options.shared)
    weights = options.shared / "weights" / "yolov8n.pt"
    plain = yolo.YOLO(str(weights)) if weights.exists() else yolo.YOLO("yolov8n.yaml")
    bgr = np.ascontiguousarray(image[..., ::-1])
    ways = {
        'YOLO("yolov8n.pt").predict': lambda: plain.predict(bgr, verbose=False, device="cpu"),
        "detect": lambda: model.detect(image),
        "detect, densities=False": lambda: model.detect(image, densities=False),
        "detect, working at 640": lambda: model.detect(
            image, object_size=typical(model) * max(image.shape) / 640, densities=False
        ),
    }
    seconds = in_turns(ways, options.repeats)
    first = next(iter(seconds.values()))
    print(f"\n{image.shape[1]} × {image.shape[0]}\n\n| | time | ratio |\n|---|---|---|")
    for name, value in seconds.items():
        print(f"| {name} | {1e3 * value:.0f} ms | {value / first:.2f} |")


def slide_table(model, options):
    image = slide(options.side, options.shared)
    overlap = 1.5 * largest_size(model.info["object_sizes"], 0) / TILE
    found, sliced = {}, sliced_by_sahi(model, overlap)
    ways = {
        "SAHI": lambda: found.update(sahi=sliced(image)),
        "detect": lambda: found.update(
            ours=model.detect(image, object_size=typical(model), tile=TILE, densities=False)
        ),
    }
    seconds = in_turns(ways, 1)
    print(f"\n{options.side} × {options.side}, tiles of {TILE}, overlap {overlap:.2f}\n")
    print("| | time | megapixel per second | boxes |\n|---|---|---|---|")
    counts = {"SAHI": len(found["sahi"]), "detect": len(found["ours"])}
    for name, value in seconds.items():
        rate = image.shape[0] * image.shape[1] / 1e6 / value
        print(f"| {name} | {value:.1f} s | {rate:.2f} | {counts[name]} |")
    compare(found["ours"], found["sahi"], image.shape[0], overlap)


def compare(ours, sahi, side, overlap):
    """How many boxes away from SAHI's borders have a partner, and how close it is."""
    step = TILE * (1 - overlap)
    sure = ours.xyxy[ours.scores >= 0.5]
    inside = np.array([all(away(v, step, side) for v in box) for box in sure], bool)
    best = iou(sure[inside], sahi).max(1, initial=0) if len(sahi) else np.zeros(inside.sum())
    print(
        f"\nOf {inside.sum()} boxes with a score of at least 0.5 away from borders "
        f"{100 * (best > 0.9).mean():.2f} % have one of SAHI's with an IoU above 0.9; "
        f"median IoU {np.median(best):.4f}."
    )


def away(value, step, side):
    """Whether a coordinate is farther than 8 pixels from where SAHI's tiles begin or end."""
    starts = np.minimum(np.arange(0, side, int(step)), max(side - TILE, 0))
    borders = np.concatenate([starts, starts + TILE])
    return bool((np.abs(borders - value) > 8).all())


def sliced_by_sahi(model, overlap):
    """SAHI over the same network: returns image -> boxes (n, 4)."""
    from sahi import AutoDetectionModel
    from sahi.predict import get_sliced_prediction

    plain = yolo.YOLO("yolov8n.yaml")
    plain.model = model.network
    plain.overrides.update(imgsz=TILE, iou=0.7)
    wrapped = AutoDetectionModel.from_pretrained(
        "ultralytics", model=plain, confidence_threshold=0.25, device="cpu", image_size=TILE
    )

    def predict(image):
        result = get_sliced_prediction(
            image,
            wrapped,
            slice_height=TILE,
            slice_width=TILE,
            overlap_height_ratio=overlap,
            overlap_width_ratio=overlap,
            perform_standard_pred=False,
            postprocess_type="NMS",
            postprocess_match_metric="IOS",
            verbose=0,
        )
        return np.array([p.bbox.to_xyxy() for p in result.object_prediction_list], np.float64)

    return predict


def typical(model):
    return typical_size(model.info["object_sizes"])


def field(shared):
    files = sorted((shared / "data" / "bccd" / "JPEGImages").glob("*.jpg"))
    return (
        np.asarray(Image.open(files[0]).convert("RGB")) if files else blood_smear((480, 640)).image
    )


def slide(side, shared):
    """Smears of another laboratory side by side, at the model's own resolution."""
    files = sorted((shared / "data" / "malaria" / "images").glob("*.jpg"))
    if not files:
        return np.tile(blood_smear((1000, 1000)).image, (-(-side // 1000),) * 2 + (1,))[
            :side, :side
        ]
    pictures = [Image.open(f).convert("RGB") for f in files]
    small = [np.asarray(p.resize((p.width * 2 // 5, p.height * 2 // 5))) for p in pictures]
    rows, columns = -(-side // small[0].shape[0]), -(-side // small[0].shape[1])
    grid = [[small[(i + j) % len(small)] for j in range(columns)] for i in range(rows)]
    return np.vstack([np.hstack(row) for row in grid])[:side, :side].copy()


def in_turns(ways, repeats):
    """Best time of each, in turns, after one to warm up where there are several."""
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(repeats + (repeats > 1)):
        for name, work in ways.items():
            began = time.perf_counter()
            work()
            if turn or repeats == 1:
                best[name] = min(best[name], time.perf_counter() - began)
    return best


if __name__ == "__main__":
    main()
