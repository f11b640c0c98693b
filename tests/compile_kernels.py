"""Compile kernels, ours and napari's, which numba keeps beside their sources, for all workers.

    python tests/compile_kernels.py

`make test` runs it while mypy has the other core. Without it, every worker of a fresh clone and
every process that its tests start compiles the same for itself. What it leaves out is compiled by
the first test that needs it.
"""

import numpy as np
import torch

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.matching import match_boxes, non_max_suppression
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.viewer.fast_shapes import fast_shapes_supported
from pictures import start


def main() -> None:
    fast_shapes_supported()
    image = blood_smear((120, 160), cell_diameter=40).image
    for pixels in (image, image / 255):
        for iterations in (3, "converge"):
            nb.decompose(pixels, 3, iterations, lam=1.0, gamma=0.1)
    nb.decompose(image, iterations="converge")  # chooses among models
    opaque = np.dstack([image, np.full(image.shape[:2], 255, np.uint8)])
    for pixels in (image.astype(np.uint16) * 257, opaque):
        nb.decompose(pixels, 3, 3, lam=1.0, gamma=0.1)
    nb.decompose(image, spectra=start(3), fixed_spectra=True)
    nb.normalize(image, "vahadane", image[::-1])
    found = nb.load_checkpoint("blood-cells", device="cpu").detect(image)
    nb.load_checkpoint("white-cells", device="cpu").classify(image, boxes=found[:4])
    match_boxes(found.xyxy, found.xyxy, 0.5)
    non_max_suppression(found.xyxy, found.scores, found.labels, 0.5)
    layer = nb.BeerLaNet(3, iterations=3)
    batch = torch.from_numpy(image.transpose(2, 0, 1)[None].copy()).float() / 255
    sum(part.sum() for part in layer(batch) if isinstance(part, torch.Tensor)).backward()


if __name__ == "__main__":
    main()
