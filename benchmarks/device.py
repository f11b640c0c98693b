"""What a GPU does, and how fast, beside the CPU, as one table to send us.

    python benchmarks/device.py [--device cuda:0] [--side 640]

Decomposes an image, runs the layer forward and backward, detects cells and takes training steps on
the CPU and on the device. Prints times, how far the device's results are from the CPU's, versions
and the device's name; takes a minute or two and writes no file.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from napari_beerlanet.core.boxes.geometry import iou
from napari_beerlanet.core.checkpoints.checkpoint import load_detector
from napari_beerlanet.core.common.device import (
    copy_to,
    describe_device,
    free_memory,
    is_out_of_memory,
    pick_device,
    synchronize,
)
from napari_beerlanet.core.common.messages import error_detail
from napari_beerlanet.core.detection import pipeline
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.layer import BeerLaNet
from napari_beerlanet.core.training.estimate import training_step
from napari_beerlanet.core.training.monitor import package_versions
from napari_beerlanet.samples import blood_smear

BATCH = 4  # images of a training step
TIMED_S = 0.5  # at least, of one measurement

Measured = tuple[float, Any]  # seconds, the result


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda:0, mps")
    parser.add_argument("--model", default="blood-cells", help="a detector")
    parser.add_argument("--side", type=int, default=640, help="of the images, in pixels")
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    print("\n".join(_machine(device)), end="\n\n")
    print("measuring the CPU ...", file=sys.stderr)
    columns = {"CPU": measure_device(pick_device("cpu"), options.model, options.side)}
    if device.type != "cpu":
        print(f"measuring {describe_device(device)} ...", file=sys.stderr)
        columns[str(device)] = measure_device(device, options.model, options.side)
    print("\n".join(speed_table(columns)), end="\n\n")
    if device.type == "cpu":
        print("Only the CPU was measured: torch finds no GPU here, or another was asked for.")
    else:
        print("Difference: the largest one from the CPU's result; of boxes, the share without a")
        print("counterpart (IoU above 0.9). Detection is in float16 on CUDA. “memory”: there was")
        print("too little of it; try --side 320. Please send us this table.")


def measure_device(device: torch.device, model: str, side: int) -> dict[str, Measured | str]:
    """Seconds and result of each stage on a device, or why there is none."""
    image = _smear(side)
    detector: list[Detector] = []
    stages: dict[str, Callable[[], Measured]] = {
        f"decompose {side} × {side}, colours": lambda: _decompose(image, device, "palette"),
        f"decompose {side} × {side}, pixels": lambda: _decompose(image, device, "dense"),
        f"layer {side} × {side}, forward": lambda: _layer(image, device, backward=False),
        f"layer {side} × {side}, and backward": lambda: _layer(image, device, backward=True),
        "load the detector": lambda: _load(model, device, detector),
        f"detect in {2 * side} × {2 * side}": lambda: _detect(detector[0], _smear(2 * side)),
        f"training step, {BATCH} images of {side} × {side}": lambda: _train(
            detector[0], device, side
        ),
    }
    results: dict[str, Measured | str] = {}
    for name, stage in stages.items():
        if not detector and name.startswith(("detect", "training")):
            results[name] = "no detector"
            continue
        try:
            results[name] = stage()
        except Exception as error:  # the other stages still tell something
            short = is_out_of_memory(error)
            results[name] = "memory" if short else f"failed: {error_detail(error, 60)}"
        free_memory(device)
    return results


def speed_table(columns: dict[str, dict[str, Measured | str]]) -> list[str]:
    """Lines of a Markdown table: a row per stage, a column per device."""
    first, *others = columns.values()
    rows = [["", *columns, *(["ratio", "difference"] if others else [])]]
    for stage, reference in first.items():
        row = [stage, _cell(reference)]
        for other in others:
            row.append(_cell(other[stage]))
            both = reference, other[stage]
            if isinstance(both[0], str) or isinstance(both[1], str):
                row += ["", ""]
            else:
                row += [f"{both[0][0] / both[1][0]:.2f}×", _difference(both[0][1], both[1][1])]
        rows.append(row)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        f"| {' | '.join(word.ljust(width) for word, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _cell(result: Measured | str) -> str:
    return result if isinstance(result, str) else f"{1000 * result[0]:.1f} ms"


def _difference(expected: Any, found: Any) -> str:
    """How far a result is from the CPU's: a number for arrays, a share for boxes."""
    if expected is None:
        return ""
    if isinstance(expected, np.ndarray):
        return f"{float(np.abs(found - expected).max()):.1e}"
    most = max(len(expected), len(found))
    if not most:
        return "no boxes"
    near = iou(expected.xyxy, found.xyxy) > 0.9
    matched = min(int(near.any(0).sum()), int(near.any(1).sum()))
    return f"{100 * (1 - matched / most):.1f} % of {len(expected)} boxes"


def _machine(device: torch.device) -> list[str]:
    """What is measured with what."""
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    lines = [f"Device: {describe_device(device)}"]
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        lines.append(f"CUDA {torch.version.cuda}, {facts.total_memory / 2**30:.0f} GiB")
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    lines.append(f"CPU: {platform.processor() or platform.machine()}, {cores}")
    return [*lines, f"{platform.system()} {platform.release()}", versions]


def _smear(side: int) -> np.ndarray:
    """(side, side, 3) of a synthetic smear, with as many colours as a photograph."""
    return blood_smear((side, side), seed=0, cell_diameter=60.0).image


def _time(work: Callable[[], Any], device: torch.device) -> Measured:
    """The median over half a second, after a call that does not count, and the last result."""
    result = None

    def once() -> float:
        nonlocal result
        started = time.perf_counter()
        result = work()
        synchronize(device)
        return time.perf_counter() - started

    once()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < TIMED_S:
        seconds.append(once())
    return statistics.median(seconds), result


def _decompose(image: Any, device: torch.device, method: str) -> Measured:
    settings = {"iterations": 10, "method": method, "device": device}
    seconds, done = _time(lambda: decompose(image, **settings), device)
    return seconds, done.densities


def _layer(image: Any, device: torch.device, backward: bool) -> Measured:
    layer = BeerLaNet().to(device)
    planes = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
    planes = planes.to(device).float() / 255

    def step() -> torch.Tensor:
        layer.zero_grad()
        with torch.set_grad_enabled(backward):
            densities = layer(planes)
            if not backward:
                return densities
            densities.square().mean().backward()
            return layer.raw_spectra.grad

    seconds, result = _time(step, device)
    return seconds, result.detach().cpu().float().numpy()


def _load(model: str, device: torch.device, loaded: list[Detector]) -> Measured:
    started = time.perf_counter()
    loaded.append(load_detector(model, device))
    assert loaded[0].runner is not None  # fused and on its device
    return time.perf_counter() - started, None


def _detect(detector: Detector, image: Any) -> Measured:
    def run_once() -> Any:
        detector._image_cache = pipeline.ImageCache()  # else a second run has nothing to do
        return detector.detect(image, object_size=60.0, densities=False)

    return _time(run_once, detector.device)


def _train(detector: Detector, device: torch.device, side: int) -> Measured:
    network = copy_to(detector.network, device).train().requires_grad_(True)
    image = torch.from_numpy(_smear(side).transpose(2, 0, 1).copy()).to(device).float() / 255
    images = image[None].repeat(BATCH, 1, 1, 1)
    return _time(lambda: training_step(network, images), device)[0], None


if __name__ == "__main__":
    main()
