"""What the findings cost that are no single file: each in a process of its own, as a table.

    python benchmarks/hostile.py

Seconds of the processor, peak resident memory of the process, and the last thing that it said. What
`tests/fuzz --corpus` prints of hostile files, this prints of commands and calls: `convert` of very
many images, absurd numbers of components, `detect` in a forked child, what an import leaves behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_CLI = [sys.executable, "-m", "napari_beerlanet", "convert"]

_DECOMPOSE = """
import numpy as np
import napari_beerlanet as nb
try:
    nb.decompose(np.full((64, 64, 3), 200, np.uint8), components={count})
except ValueError as error:
    print(error)
"""

_FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import napari_beerlanet as nb
model = nb.load_checkpoint("blood-cells", "cpu")
from napari_beerlanet.samples import blood_smear
image = blood_smear((300, 300)).image
found = len(model.detect(image))
child = os.fork()
if not child:
    os._exit(0 if len(model.detect(image)) == found else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("the child finds the same boxes" if code == 0 else f"the child ended with {code}")
"""

_TRACES = """
import warnings
import cv2, numpy, torch
def traces():
    return (cv2.getNumThreads(), str(numpy.get_printoptions()), str(torch._tensor_str.PRINT_OPTS),
            list(warnings.filters))
before = traces()
from napari_beerlanet.core.detection import network
print("nothing is left behind" if traces() == before else f"changed: {before} {traces()}")
"""


def _csv(path: Path, images: int) -> None:
    lines = [f"{k}.png,cell,{k % 90},1,{k % 90 + 5},6" for k in range(images)]
    path.write_text("\n".join(["image,class,x1,y1,x2,y2", *lines]))


def _coco(path: Path, images: int, categories: int) -> None:
    size = {"width": 100, "height": 100}
    content = {
        "images": [{"id": k, "file_name": f"{k}.png", **size} for k in range(images)],
        "categories": [{"id": k, "name": f"class {k}"} for k in range(categories)],
        "annotations": [
            {"image_id": k, "category_id": k % categories, "bbox": [1, 1, 5, 5]}
            for k in range(images)
        ],
    }
    path.write_text(json.dumps(content))


def measure(command: list[str]) -> tuple[float, float, str]:
    """Seconds of the processor, megabytes at the peak, and the last line of a process."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)
        used = os.wait4(process.pid, 0)[2]
        out.seek(0)
        said = out.read().strip().splitlines()[-1]
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, said


def main() -> None:
    """Print the table."""
    os.environ.update(YOLO_OFFLINE="true")
    print("| what | s | MB | answer |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _csv(folder / "a.csv", 5000)
        _coco(folder / "a.json", 40_000, 3)
        _coco(folder / "b.json", 20_000, 20_000)
        cases = {
            "`convert` of a CSV of 5 000 images": [*_CLI, "a.csv", "1", "--to=voc"],
            "`convert` of a COCO of 40 000 images": [*_CLI, "a.json", "2", "--to=yolo"],
            "`convert` of 20 000 images and classes": [*_CLI, "b.json", "3", "--to=voc"],
            "`decompose(components=5000)`": [sys.executable, "-c", _DECOMPOSE.format(count=5000)],
            "`decompose(components=10**9)`": [sys.executable, "-c", _DECOMPOSE.format(count=10**9)],
            "`detect` in a forked child": [sys.executable, "-c", _FORK],
            "the detector is imported": [sys.executable, "-c", _TRACES],
        }
        os.chdir(folder)
        for what, command in cases.items():
            seconds, megabytes, said = measure(command)
            print(f"| {what} | {seconds:.1f} | {megabytes:.0f} | {said} |", flush=True)


if __name__ == "__main__":
    main()
