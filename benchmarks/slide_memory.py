"""The memory that `detect_slide` takes on slides of several sizes, and under a limit.

    python benchmarks/slide_memory.py [--gigapixels 0.06 0.25 1] [--limit 2] [--kind data]
        [--tissue 0.05] [--model NAME] [--densities]

Each slide is searched in a process of its own. Its pixels are made as they are read, with noise, so
that there are as many colours as in a scan, and no disk is needed. The table has the peak resident
memory (what the machine must have), the peak of memory that may be written to (data, used or not),
the peak address space (what is merely reserved, most of it by the libraries), and what came of it
under a limit of `--limit` gigabytes of

    data      memory that the process may write to (RLIMIT_DATA)
    address   address space (RLIMIT_AS, `ulimit -v`)
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

FIELD = 2048  # pixels of the field that the slide repeats


class MadeSlide:
    """A level (H, W, 3) uint8 of a slide of `side` pixels, `step` times smaller; made when read.

    The first `tissue` of its rows have cells, the rest is background.
    """

    dtype, ndim = np.dtype(np.uint8), 3

    def __init__(self, side: int, step: int, tissue: float) -> None:
        from napari_beerlanet.samples import blood_smear

        self.shape, self._step = (side // step, side // step, 3), step
        self.chunks = (512, 512, 3)
        self._field = blood_smear((FIELD, FIELD), seed=1).image[::step, ::step]
        self._rows = round(tissue * self.shape[0])

    def __getitem__(self, index: Any) -> Any:
        rows, columns = (np.arange(*s.indices(n)) for s, n in zip(index, self.shape, strict=False))
        y, x = rows[:, None] % len(self._field), columns % len(self._field)
        chance = np.random.default_rng((rows[0], columns[0]))
        pixels = self._field[y, x].astype(np.int16)
        pixels += chance.integers(-6, 7, (len(y), 1, 3), np.int16)
        pixels[rows >= self._rows] = 243
        return np.clip(pixels, 0, 255, out=pixels).astype(np.uint8)


def status(name: str) -> float:
    """A line of Linux's report on this process, in gigabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1e6


class PeakData(threading.Thread):
    """The most memory that this process could write to (VmData, which RLIMIT_DATA limits), in GB.

    Linux keeps the peaks of the others only; this one is looked at twenty times a second.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self.start()

    def run(self) -> None:
        """Look until the process ends."""
        while True:
            self.peak = max(self.peak, status("VmData"))
            time.sleep(0.05)


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Search one slide."""
    if options.limit:
        kinds = {"data": resource.RLIMIT_DATA, "address": resource.RLIMIT_AS}
        resource.setrlimit(kinds[options.kind], (round(options.limit * 1e9),) * 2)
    from napari_beerlanet.core.checkpoints.checkpoint import load_detector
    from napari_beerlanet.core.detection.slide_detector import detect_slide

    model = load_detector(options.model, "cpu")
    loaded = {"loaded": status("VmHWM"), "loaded_data": status("VmData")}
    data = PeakData()
    side = round((options.gigapixels[0] * 1e9) ** 0.5)
    levels = [MadeSlide(side, step, options.tissue) for step in (1, 4, 16)]
    begin = time.process_time()
    found = detect_slide(model, levels, object_size=50, densities=options.densities)
    return {
        **loaded,
        "side": side,
        "boxes": len(found),
        "tiles": found.report["tiles_looked_at"],
        "seconds": time.process_time() - begin,
        "resident": status("VmHWM"),
        "data": data.peak,
        "address": status("VmPeak"),
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigapixels", type=float, nargs="+", default=[0.06, 0.25, 1.0])
    parser.add_argument("--limit", type=float, default=0.0)
    parser.add_argument("--kind", choices=("data", "address"), default="data")
    parser.add_argument("--tissue", type=float, default=0.05)
    parser.add_argument("--model", default="blood-cells")
    parser.add_argument("--densities", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return 0
    limit = f"{options.limit:g} GB of {options.kind}" if options.limit else "none"
    print(f"limit: {limit}\n")
    print(
        "| slide | tiles | boxes | CPU s | model loaded: resident, data | peak resident "
        "| peak data | peak address space |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for size in options.gigapixels:
        words = [*sys.argv[1:], "--child", "--gigapixels", str(size)]
        done = subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or ["killed"]
            print(f"| {size:g} gigapixels | exit {done.returncode}: {why[0][:200]} |", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {row['side']:,} × {row['side']:,} | {row['tiles']} | {row['boxes']:,} "
            f"| {row['seconds']:.0f} | {row['loaded']:.2f}, {row['loaded_data']:.2f} GB "
            f"| {row['resident']:.2f} GB | {row['data']:.2f} GB | {row['address']:.1f} GB |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
