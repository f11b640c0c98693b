"""Batched inference over tiles, in the device's best number format and within its memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from napari_beerlanet.core.boxes.detections import RawDetections
from napari_beerlanet.core.boxes.matching import non_max_suppression
from napari_beerlanet.core.common.device import (
    copy_to,
    free_memory,
    image_layout,
    is_out_of_memory,
    no_gradients,
    on_cpu_note,
)
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.detection import tiling
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.tiling import TileGrid
from napari_beerlanet.core.stains.front_end import StainFit, fit_stain

BATCH_SIZES = {"cuda": 16, "mps": 4}
"""Tiles per batch by type of device; 1 on others."""

_MAX_DETECTIONS_PER_TILE = 10_000


class InferenceRunner:
    """A fused copy of the network on a device: float16 on CUDA, channels last."""

    def __init__(self, network: StainDetectionModel, device: torch.device) -> None:
        self.device, self.source = device, network
        self.notes: list[str] = []  # what a person should know on where it runs
        self.half = device.type == "cuda"
        self.network = copy_to(network, device).eval().fuse(verbose=False).to(device)
        self.network.requires_grad_(False)
        self.network = self.network.to(memory_format=image_layout(device))
        if self.half:
            self.network = self.network.half()  # the front end stays float32
        # Of networks that suppress duplicates by themselves.
        self.network.model[-1].max_det = _MAX_DETECTIONS_PER_TILE
        self._stride = int(self.network.stride.max())
        self._lock = threading.Lock()  # Ultralytics' head keeps the last image's anchors

    def run(
        self,
        pixels: npt.NDArray[np.uint8],
        grid: TileGrid,
        fit: StainFit | None,
        *,
        min_score: float,
        iou: float,
        batch: int | Literal["auto"],
        notes: list[str],
        report: Report | None = None,
    ) -> tuple[RawDetections, StainFit]:
        """Everything in the image (H, W, 3 or 4) with a score of at least `min_score`, best first.

        Without a fit the front end is fitted to the first tile, which then must be the whole image.
        Returns the fit, too. What a person should know is added to `notes`.
        """
        requested = BATCH_SIZES.get(self.device.type, 1) if batch == "auto" else batch
        requested = size = min(requested, len(grid.tiles))
        parts: list[RawDetections] = []
        while len(parts) < len(grid.tiles):
            report_progress(report, len(parts), len(grid.tiles), "finding cells")
            tiles = grid.tiles[len(parts) : len(parts) + size]
            cut = [tiling.read_tile(pixels, tile, grid.size) for tile in tiles]
            fit = fit or fit_stain(self.network, cut[0])
            try:
                parts += self._infer_batch(cut, tiles, grid, fit, min_score, iou)
                continue
            except Exception as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            # Not in the handler: there the error still holds what the batch has in memory.
            size //= 2
            self.free_memory()
        report_progress(report, 1, 1, "finding cells")
        if size < requested:
            notes.append(f"Memory did not suffice for {requested} tiles at a time; {size} did.")
        assert fit is not None
        return self.merge_tiles(parts, grid, iou), fit

    def infer_tiles(
        self,
        cut: list[npt.NDArray[np.uint8]],
        tiles: list[Rectangle],
        grid: TileGrid,
        fit: StainFit,
        *,
        min_score: float,
        iou: float,
    ) -> list[RawDetections]:
        """Detections in each of some tiles, which are at the grid's working size; not merged."""
        results = self._infer_batch(cut, tiles, grid, fit, min_score, iou)
        # A box outside its tile is clipped to nothing.
        return [part[(part.xyxy[:, 2:] > part.xyxy[:, :2]).all(1)] for part in results]

    def free_memory(self) -> None:
        """Give back what the device keeps for later."""
        free_memory(self.device)

    def _infer_batch(
        self,
        cut: list[npt.NDArray[np.uint8]],
        tiles: list[Rectangle],
        grid: TileGrid,
        fit: StainFit,
        min_score: float,
        iou: float,
    ) -> list[RawDetections]:
        """What is in each of some tiles, in image pixels."""
        padded = [tiling.pad_tile(tile, self._stride) for tile in cut]
        top, left = padded[0][1]
        x = fit.mix_tiles(self.network, np.stack([tile for tile, _ in padded]))
        x = x.to(memory_format=image_layout(self.device))
        with self._lock, no_gradients(self.device):
            raw = self.network.predict_mixed(x.half() if self.half else x)
        end2end = bool(getattr(self.network, "end2end", False))
        found = select_boxes(raw, self.network.model[-1].nc, min_score, iou, end2end)
        offset = np.array([left, top, left, top], np.float32)
        return [
            RawDetections(
                tiling.to_image_boxes(grid, tile, part.xyxy - offset), part.labels, part.scores
            )
            for tile, part in zip(tiles, found, strict=True)
        ]

    def merge_tiles(
        self, parts: Sequence[RawDetections], grid: TileGrid, iou: float
    ) -> RawDetections:
        """Detections of all tiles as one list; of tiles that were not run the part is empty."""
        everything = RawDetections.concatenate(parts)
        sides = everything.xyxy[:, 2:] - everything.xyxy[:, :2]
        owner = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
        real = (sides > 0).all(1)  # a box outside its tile is clipped to nothing
        everything, owner = everything[real], owner[real]
        if len(parts) == 1:
            return everything
        return everything[
            tiling.merge_tiles(
                grid, everything.xyxy, everything.scores, everything.labels, owner, iou
            )
        ]


def on_cpu(network: StainDetectionModel, device: torch.device, what: str) -> InferenceRunner:
    """A runner on the CPU, as the memory of a device does not suffice for `what`."""
    free_memory(device)
    runner = InferenceRunner(network, torch.device("cpu"))
    runner.notes = [on_cpu_note(device, what)]
    return runner


@torch.no_grad()
def select_boxes(
    raw: Any, classes: int, min_score: float, iou: float, end2end: bool = False
) -> list[RawDetections]:
    """The boxes in each of n images by a network's output, in pixels of its input, best first.

    `raw` (n, 4 + classes, anchors) has centres, sizes and scores, of which a box keeps the highest;
    duplicates are suppressed. A network that suppresses them by itself (`end2end`) returns
    (n, boxes, 6): corners, score, label.

    Ultralytics' own function takes seconds for a tile with thousands of candidates unless
    torchvision is loaded, and after some time leaves tiles out.
    """
    prediction = raw[0] if isinstance(raw, (list, tuple)) else raw
    if end2end:
        scores, labels = prediction[..., 4], prediction[..., 5]
    else:
        scores, labels = prediction[:, 4 : 4 + classes].max(dim=1)
    image, place = (scores > min_score).nonzero(as_tuple=True)
    if end2end:
        corners = prediction[image, place, :4].float()
    else:
        box = prediction[image, :4, place].float()
        centre, size = box[:, :2], box[:, 2:]
        corners = torch.cat([centre - size / 2, centre + size / 2], dim=1)
    facts = (scores[image, place], labels[image, place], image)
    # All images in one table, so that it is one transfer from the device.
    table = torch.cat([corners, *(fact.float()[:, None] for fact in facts)], dim=1).cpu().numpy()
    ends = np.searchsorted(table[:, 6], np.arange(1, len(prediction)))
    selected = []
    for rows in np.split(table, ends):
        part = RawDetections(
            np.ascontiguousarray(rows[:, :4]), rows[:, 5].astype(np.int64), rows[:, 4].copy()
        )
        if not end2end:
            part = part[non_max_suppression(part.xyxy, part.scores, part.labels, iou)]
        selected.append(part[:_MAX_DETECTIONS_PER_TILE])
    return selected
