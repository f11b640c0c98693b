"""The command `benchmark-device`: one table of what a GPU does, and how fast, beside the CPU."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from napari_beerlanet.cli.common import (
    DEFAULT_MODEL,
    UsageError,
    add_device_option,
    echo,
    print_message,
    raise_if_interrupted,
    whole_number,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from napari_beerlanet.core.detection.detector import Detector

HELP = "time a GPU against the CPU, in one table to send us"
DESCRIPTION = (
    "Decompose an image, run the layer forward and backward, detect cells and take training steps "
    "on the CPU and on the device, and print one table with times, how far the device's results "
    "are from the CPU's, versions and the device's name. It takes a minute or two and writes no "
    "file. No GPU was at hand when this program was written: please send us the table."
)
_MIN_SIDE = 128
_BATCH = 4  # images of a training step
_TIMED_S = 0.5  # at least, of one measurement

Measured = tuple[float, Any]  # seconds, the result


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = command.add_argument
    add_device_option(command)
    add(
        "--model", default=DEFAULT_MODEL, metavar="MODEL", help="a detector (default: the packaged)"
    )
    add(
        "--side",
        type=whole_number,
        default=640,
        metavar="PIXELS",
        help="side of the images (default 640)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print the table."""
    from napari_beerlanet.core.common.device import describe_device, pick_device

    if options.side < _MIN_SIDE:
        raise UsageError(f"--side must be at least {_MIN_SIDE}, not {options.side}.")
    device = pick_device(options.device)
    on_cpu = pick_device("cpu")
    for line in _machine(device):
        echo(line)
    echo("")
    print_message("measuring the CPU ...")
    columns = {"CPU": measure_device(on_cpu, options.model, options.side)}
    if device.type != "cpu":
        print_message(f"measuring {describe_device(device)} ...")
        columns[str(device)] = measure_device(device, options.model, options.side)
    for line in speed_table(columns):
        echo(line)
    echo("")
    if device.type == "cpu":
        echo("Only the CPU was measured: torch finds no GPU here, or another device was asked for.")
    else:
        echo("Difference: the largest one from the CPU's result; of boxes, the share without a")
        echo(
            "counterpart (IoU above 0.9). Detection is in float16 on CUDA. “memory”: there was too"
        )
        echo("little of it; try --side 320. Please send us this table.")
    return 0


def measure_device(device: torch.device, model: str, side: int) -> dict[str, Measured | str]:
    """Seconds and result of each stage on a device, or why there is none."""
    from napari_beerlanet.core.common.device import free_memory, is_out_of_memory
    from napari_beerlanet.core.common.messages import error_detail

    image = _smear(side)
    detector: list[Detector] = []
    stages: dict[str, Callable[[], Measured]] = {
        f"decompose {side} × {side}, colours": lambda: _decompose(image, device, "palette"),
        f"decompose {side} × {side}, pixels": lambda: _decompose(image, device, "dense"),
        f"layer {side} × {side}, forward": lambda: _layer(image, device, backward=False),
        f"layer {side} × {side}, and backward": lambda: _layer(image, device, backward=True),
        "load the detector": lambda: _load(model, device, detector),
        f"detect in {2 * side} × {2 * side}": lambda: _detect(detector[0], _smear(2 * side)),
        f"training step, {_BATCH} images of {side} × {side}": lambda: _train(
            detector[0], device, side
        ),
    }
    results: dict[str, Measured | str] = {}
    for name, stage in stages.items():
        raise_if_interrupted()
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
    import numpy as np

    if expected is None:
        return ""
    if isinstance(expected, np.ndarray):
        return f"{float(np.abs(found - expected).max()):.1e}"
    from napari_beerlanet.core.boxes.geometry import iou

    most = max(len(expected), len(found))
    if not most:
        return "no boxes"
    near = iou(expected.xyxy, found.xyxy) > 0.9
    matched = min(int(near.any(0).sum()), int(near.any(1).sum()))
    return f"{100 * (1 - matched / most):.1f} % of {len(expected)} boxes"


def _machine(device: torch.device) -> list[str]:
    """What is measured with what."""
    import torch

    from napari_beerlanet.core.common.device import describe_device
    from napari_beerlanet.core.training.monitor import package_versions

    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    lines = [f"Device: {describe_device(device)}"]
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        lines.append(f"CUDA {torch.version.cuda}, {facts.total_memory / 2**30:.0f} GiB")
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    lines.append(f"CPU: {platform.processor() or platform.machine()}, {cores}")
    return [*lines, f"{platform.system()} {platform.release()}", versions]


def _smear(side: int) -> npt.NDArray[np.uint8]:
    """(side, side, 3) of a synthetic smear, with as many colours as a photograph."""
    from napari_beerlanet.samples import blood_smear

    image: npt.NDArray[np.uint8] = blood_smear((side, side), seed=0, cell_diameter=60.0).image
    return image


def _time(work: Callable[[], Any], device: torch.device) -> Measured:
    """The median over half a second, after a call that does not count, and the last result."""
    from napari_beerlanet.core.common.device import synchronize

    result: Any = None

    def once() -> float:
        nonlocal result
        started = time.perf_counter()
        result = work()
        synchronize(device)
        return time.perf_counter() - started

    once()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < _TIMED_S:
        seconds.append(once())
    return statistics.median(seconds), result


def _decompose(image: Any, device: torch.device, method: str) -> Measured:
    from napari_beerlanet.core.stains.decompose import decompose

    settings: dict[str, Any] = {"iterations": 10, "method": method, "device": device}
    seconds, done = _time(lambda: decompose(image, **settings), device)
    return seconds, done.densities


def _layer(image: Any, device: torch.device, backward: bool) -> Measured:
    import numpy as np
    import torch

    from napari_beerlanet.core.stains.layer import BeerLaNet

    layer = BeerLaNet().to(device)
    planes = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
    planes = planes.to(device).float() / 255

    def step() -> torch.Tensor:
        layer.zero_grad()
        with torch.set_grad_enabled(backward):
            densities: torch.Tensor = layer(planes)
            if not backward:
                return densities
            densities.square().mean().backward()  # type: ignore[no-untyped-call]
            assert layer.raw_spectra.grad is not None
            return layer.raw_spectra.grad

    seconds, result = _time(step, device)
    return seconds, result.detach().cpu().float().numpy()


def _load(model: str, device: torch.device, loaded: list[Detector]) -> Measured:
    from napari_beerlanet.core.checkpoints.checkpoint import load_detector

    started = time.perf_counter()
    loaded.append(load_detector(model, device))
    assert loaded[0].runner is not None  # fused and on its device
    return time.perf_counter() - started, None


def _detect(detector: Detector, image: Any) -> Measured:
    from napari_beerlanet.core.detection import pipeline

    def run_once() -> Any:
        detector._image_cache = pipeline.ImageCache()  # else a second run has nothing to do
        return detector.detect(image, object_size=60.0, densities=False)

    return _time(run_once, detector.device)


def _train(detector: Detector, device: torch.device, side: int) -> Measured:
    import torch

    from napari_beerlanet.core.common.device import copy_to
    from napari_beerlanet.core.training.estimate import training_step

    network = copy_to(detector.network, device).train().requires_grad_(True)
    image = torch.from_numpy(_smear(side).transpose(2, 0, 1).copy()).to(device).float() / 255
    images = image[None].repeat(_BATCH, 1, 1, 1)
    return _time(lambda: training_step(network, images), device)[0], None
