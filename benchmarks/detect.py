"""How fast detection is, against Ultralytics on a field and against SAHI on a slide.

    python benchmarks/detect.py [--model blood-cells] [--repeats 7] [--side 8000] [--only sizes]

A field of 640 × 480 is compared with `YOLO("yolov8n.pt").predict` of the same image, a large image
(its side such that both lay the same tiles) with SAHI's sliced prediction of the same network: as
it is, each slice decomposed by itself, and with our decomposition of the whole image. All run in
one process with the same threads, in turns, best of several; of the large image one run each, after
one on a part of it, with the CPU time beside it, which says more on a busy machine. `sizes`: what
it costs to find the cell size, in made and real fields, against a run with that size given.
"""

import argparse
import copy
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.geometry import iou
from napari_beerlanet.core.detection import ultralytics_api  # keeps Ultralytics offline and quiet
from napari_beerlanet.core.detection.object_sizes import largest_size, reference_size
from napari_beerlanet.core.detection.pipeline import ImageCache
from napari_beerlanet.core.stains.front_end import fit_stain
from napari_beerlanet.samples import blood_smear

SHARED = Path(__file__).resolve().parents[2] / "shared"
TILE = 640


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="blood-cells")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--side", type=int, default=8000)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--only", choices=["field", "sizes", "slide"])
    options = parser.parse_args()
    # On the CPU Ultralytics takes a thread less than there are cores, for all of the process.
    torch.set_num_threads = lambda count: None
    model = nb.load_checkpoint(options.model, device="cpu")
    print(f"{torch.get_num_threads()} threads, {ultralytics_api.__version__=}")
    tables = {"field": field_table, "sizes": size_table, "slide": slide_table}
    for name, table in tables.items():
        if options.only in (None, name) and (name != "slide" or options.side):
            table(model, options)


def field_table(model, options):
    image = field(options.shared)
    weights = options.shared / "weights" / "yolov8n.pt"
    plain = (
        ultralytics_api.YOLO(str(weights))
        if weights.exists()
        else ultralytics_api.YOLO("yolov8n.yaml")
    )
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


def size_table(model, options):
    """What the automatic cell size costs, against a run with that size given."""
    print("\n| field | cell size | found as | network's pixels, automatic / given | time | ratio |")
    print("|---|---|---|---|---|---|")
    shown = count_pixels(model)
    ratios = []
    for name, image in size_fields(options.shared):
        report, pixels = {}, {}

        def run(way, report=report, pixels=pixels, image=image, **size):
            model._image_cache = ImageCache()  # or the second run would know the size
            shown.clear()
            report[way] = model.detect(image, **size).report
            pixels[way] = sum(shown)

        run("automatic")
        size = report["automatic"]["object_size"]
        ways = {
            "automatic": lambda run=run: run("automatic"),
            "given": lambda run=run, size=size: run("given", object_size=size),
        }
        seconds = in_turns(ways, max(options.repeats // 2, 2))
        work = pixels["automatic"] / pixels["given"]
        ratios.append((work, seconds["automatic"] / seconds["given"]))
        print(
            f"| {name}, {image.shape[1]} × {image.shape[0]} | {size:.0f} | "
            f"{report['automatic']['chosen']} | {work:.2f} | {1e3 * seconds['automatic']:.0f} / "
            f"{1e3 * seconds['given']:.0f} ms | {ratios[-1][1]:.2f} |"
        )
    (work, time_ratio), (most_work, most_time) = np.median(ratios, 0), np.max(ratios, 0)
    print(f"\nMedian {work:.2f} (pixels) and {time_ratio:.2f} (time), ", end="")
    print(f"at most {most_work:.2f} and {most_time:.2f}.")


def count_pixels(model):
    """A list to which the network adds the number of pixels of all that it is shown."""
    network, shown = model.runner.network, []
    predict = network.predict_mixed

    def counted(mixed):
        shown.append(mixed.shape[0] * mixed.shape[2] * mixed.shape[3])
        return predict(mixed)

    network.predict_mixed = counted
    return shown


def size_fields(shared):
    """Made fields of all sizes, and some of each laboratory: (name, pixels)."""
    for diameter in (10, 16, 28, 40, 55, 75, 90, 120, 160, 200):
        shape = (600, 800) if diameter >= 40 else (15 * diameter, 20 * diameter)
        yield f"made, {diameter}", blood_smear(shape, cell_diameter=diameter, seed=4).image
    folders = ("bccd/JPEGImages", "other-lab/images", "malaria/images")
    folders += ("malaria-fields/falciparum/images", "malaria-fields/vivax/images")
    for name in folders:
        files = sorted((shared / "data" / name).glob("*.jpg"))
        for path in files[:: max(len(files) // 6, 1)][:6]:
            yield name.split("/images")[0], np.asarray(Image.open(path).convert("RGB"))


def slide_table(model, options):
    overlap = round(1.5 * largest_size(model.info["object_sizes"], 0))
    steps = -(-(options.side - TILE) // (TILE - overlap))
    image = slide(TILE + steps * (TILE - overlap), options.shared)
    settings = {"object_size": typical(model), "tile": TILE, "densities": False}
    ways = {
        "SAHI": lambda image: sliced(model.network, image, overlap),
        "SAHI, our decomposition": lambda image: sliced(with_fit(model, image), image, overlap),
        "detect, torch": lambda image: model.detect(image, openvino="off", **settings),
        "detect": lambda image: model.detect(image, **settings),
    }
    found, spent = {}, {}
    part = np.ascontiguousarray(image[: 4 * TILE, : 4 * TILE])
    for name, work in ways.items():
        model._image_cache = ImageCache()  # or the second way would know the stains
        work(part)
        began, cpu = time.perf_counter(), time.process_time()
        found[name] = work(image)
        spent[name] = time.perf_counter() - began, time.process_time() - cpu
    print(f"\n{image.shape[1]} × {image.shape[0]}, tiles of {TILE}, overlap {overlap}")
    print(f"detect ran on {found['detect'].report['device']}\n")
    print("| | time | CPU time | megapixel per second | × SAHI | × SAHI, CPU | boxes |")
    print("|---|---|---|---|---|---|---|")
    for name, (clock, cpu) in spent.items():
        rate = image.shape[0] * image.shape[1] / 1e6 / clock
        ratio = [a / b for a, b in zip(spent["SAHI"], (clock, cpu), strict=True)]
        print(
            f"| {name} | {clock:.1f} s | {cpu:.1f} s | {rate:.2f} | {ratio[0]:.2f} | "
            f"{ratio[1]:.2f} | {len(found[name])} |"
        )
    borders = np.arange(steps + 1) * (TILE - overlap)
    borders = np.concatenate([borders, borders + TILE])
    for name in ("SAHI", "SAHI, our decomposition"):
        compare(found["detect"], found[name], name, borders)


def compare(ours, theirs, name, borders):
    """How many boxes away from tiles' borders have a partner, and how close it is."""
    sure = ours.xyxy[ours.scores >= 0.3]
    x, y = ((sure[:, None, k::2] - borders[None, :, None]) for k in (0, 1))
    cut = [((v[..., 0] < 8) & (v[..., 1] > -8)).any(1) for v in (x, y)]
    inside = sure[~(cut[0] | cut[1])]
    best = iou(inside, theirs).max(1, initial=0) if len(theirs) else np.zeros(len(inside))
    print(
        f"\nOf {len(inside)} boxes with a score of at least 0.3 that no tile cuts, "
        f"{100 * (best > 0.95).mean():.2f} % have one of {name} with an IoU above 0.95; "
        f"median IoU {np.median(best):.4f}."
    )


def with_fit(model, image):
    """A copy of the network that decomposes as the whole image is."""
    network, fit = copy.deepcopy(model.network), fit_stain(model.network, image)

    def apply_front_end(images):
        tiles = (images * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
        return fit.mix_tiles(model.network, tiles)

    network.apply_front_end = apply_front_end
    return network


def sliced(network, image, overlap):
    """SAHI over a network: boxes (n, 4)."""
    from sahi import AutoDetectionModel
    from sahi.predict import get_sliced_prediction

    plain = ultralytics_api.YOLO("yolov8n.yaml")
    plain.model = network
    plain.overrides.update(imgsz=TILE, iou=0.7)
    wrapped = AutoDetectionModel.from_pretrained(
        "ultralytics", model=plain, confidence_threshold=0.25, device="cpu", image_size=TILE
    )
    result = get_sliced_prediction(
        image,
        wrapped,
        slice_height=TILE,
        slice_width=TILE,
        overlap_height_ratio=(overlap + 0.5) / TILE,
        overlap_width_ratio=(overlap + 0.5) / TILE,
        perform_standard_pred=False,
        postprocess_type="NMS",  # its default joins boxes of cells that touch
        postprocess_match_metric="IOU",
        postprocess_match_threshold=0.7,
        verbose=0,
    )
    boxes = [p.bbox.to_xyxy() for p in result.object_prediction_list]
    return np.array(boxes, np.float64).reshape(-1, 4)


def typical(model):
    return reference_size(model.info)


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
