"""Detection on a slide takes memory for some of its tiles, not for all of its pixels.

`benchmarks/slide_memory.py` searches a gigapixel under a limit of 2 GB.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")

SIDE = 12_000
"""Pixels of the slide's side: 432 MB as RGB, 576 MB as one number per pixel."""

ALLOWED_MB = 350
"""Beyond what there is with the model loaded: tables of colours are 128 MB, whatever the slide."""

SEARCH = """
import json, resource, sys
import numpy as np
from discs import disc_detector, draw, scattered
from napari_beerlanet.core.detection.slide_detector import detect_slide

side, allowed = int(sys.argv[1]), int(sys.argv[2])
field = draw((1000, 1000), scattered((1000, 1000), 40, seed=1))


class MadeSlide:
    dtype, ndim, chunks = np.dtype(np.uint8), 3, (512, 512, 3)
    read = 0

    def __init__(self, step):
        self.shape, self.field = (side // step, side // step, 3), field[::step, ::step]
        self.top = self.shape[0] // 24

    def __getitem__(self, index):
        rows, columns = (np.arange(*s.indices(n)) for s, n in zip(index, self.shape))
        pixels = self.field[rows[:, None] % len(self.field), columns % len(self.field)]
        pixels[rows >= self.top] = 243
        MadeSlide.read += pixels.size
        return pixels


def data_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])


model, levels = disc_detector(), [MadeSlide(step) for step in (1, 4, 16)]
settings = {"object_size": 40, "tile": 256}
detect_slide(model, [field], **settings)  # loads and compiles
if allowed:
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + allowed * 1_000_000,) * 2)
found = detect_slide(model, levels, **settings)
print(json.dumps({"boxes": len(found), "read": MadeSlide.read}))
"""


def test_a_slide_under_a_limit_of_memory(root):
    done = subprocess.run(
        [sys.executable, "-c", SEARCH, str(SIDE), str(ALLOWED_MB)],
        cwd=root / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["read"] >= 3 * SIDE**2, "not every pixel was read"
    assert seen["boxes"] > 100
