"""Batched inference over tiles, in the device's best number format and within its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from napari_beerlanet.core.boxes.detections import RawDetections
from napari_beerlanet.core.boxes.geometry import iou as overlap_of
from napari_beerlanet.core.boxes.matching import non_max_suppression
from napari_beerlanet.core.common.device import (
    copy_to,
    describe_device,
    free_memory,
    image_layout,
    is_out_of_memory,
    no_gradients,
    on_cpu_note,
)
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.threads import (
    kernels_being_compiled,
    map_threads,
    thread_count,
)
from napari_beerlanet.core.detection import tiling
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.openvino_network import (
    ConversionError,
    OpenVinoNetwork,
    Precision,
    choose_precision,
    inference_threads,
    may_round,
    openvino_network,
)
from napari_beerlanet.core.detection.settings import OpenVinoMode
from napari_beerlanet.core.detection.tiling import TileGrid
from napari_beerlanet.core.stains.front_end import StainFit, TileMixer, fit_stain

BATCH_SIZES = {"cuda": 16, "mps": 4}
"""Tiles per batch by type of device; 1 on others."""

_MAX_DETECTIONS_PER_TILE = 10_000
_COMPILE_POLL_S = 0.1
_MAX_STREAMS = 4  # tiles that are in OpenVINO at a time: each takes memory
_TILES_PER_STREAM = 4  # from which they pay: the network is compiled once more for them
_MIN_ROUNDED_TILES = 64  # from which bfloat16 pays: some are run both ways, to see whether it may
_TILES_PER_COMPARISON = 32
_MAX_COMPARISONS, _ENOUGH_BOXES = 16, 200
_SURE, _SAME_IOU, _MIN_SAME = 0.25, 0.9, 0.995  # the share of sure boxes that are in both
_MIN_PARTNER_SCORE = 0.01
_TORCH_WORKERS = {"cpu": 2, "cuda": 2}  # by type of device; others are not known to take it


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
        head = self.network.model[-1]
        head.max_det = _MAX_DETECTIONS_PER_TILE  # of those that suppress duplicates by themselves
        head.stride = head.stride.cpu()  # it takes them as numbers, and would wait for the device
        self._stride = int(self.network.stride.max())
        self._lock = threading.Lock()  # Ultralytics' head keeps the last image's anchors
        self._refusal = ""  # why OpenVINO cannot run this network
        self._refusal_told = False
        self._converted: dict[tuple[Precision, int, int], OpenVinoNetwork] = {}
        self._preparation: threading.Thread | None = None

    def prepare(self) -> None:
        """Have OpenVINO ready as early as may be: converted in a thread the first time.

        A run that does not wait for it is torch's meanwhile. While kernels are being compiled that
        is put off: it would take as long again, on cores that a first detection needs.
        """
        if self._preparation is None and self.device.type == "cpu":
            self._preparation = threading.Thread(target=self._prepare, name="beerlanet-openvino")
            self._preparation.start()

    def openvino(
        self, mode: OpenVinoMode, notes: list[str], wait: bool = False
    ) -> OpenVinoNetwork | None:
        """The network as OpenVINO runs it by a setting; None where torch does.

        Of a network that it cannot run that is told in `notes`, once.
        """
        precision = choose_precision(mode, notes) if self.device.type == "cpu" else None
        preparing = self._preparation is not None and self._preparation.is_alive()
        if precision is None or (preparing and not wait):
            return None
        found = self._convert(precision)
        self.tell_refusal(notes)
        return None if self._refusal else found

    def tell_refusal(self, notes: list[str]) -> None:
        """Add to `notes`, once, that OpenVINO cannot run the network, or failed in a run."""
        if self._refusal and not self._refusal_told:
            self._refusal_told = True
            notes.append(f"OpenVINO cannot run this network ({self._refusal}), so torch does.")

    def _prepare(self) -> None:
        precision = choose_precision("auto", [])
        while precision is not None and kernels_being_compiled():
            time.sleep(_COMPILE_POLL_S)
            if not threading.main_thread().is_alive():
                return  # the program ends
        if precision is not None:
            self._convert(precision)

    def _convert(self, precision: Precision, streams: int = 1) -> OpenVinoNetwork | None:
        key = precision, inference_threads(), streams
        if key not in self._converted and not self._refusal:
            try:
                found = openvino_network(self.network, *key)
            except ConversionError as error:
                self._refusal = str(error)
            else:
                same = {k: v for k, v in self._converted.items() if k[:2] == key[:2]}
                self._converted = same | {key: found}
        return self._converted.get(key)

    def for_many_tiles(
        self, openvino: OpenVinoNetwork | None, tiles: int
    ) -> tuple[OpenVinoNetwork | None, int]:
        """What runs so many tiles in the place of `openvino`, and how many threads are to call it.

        Each thread takes a tile from reading to its boxes, so that one reads or suppresses
        duplicates while the network is busy with another's. OpenVINO runs a tile on one core and
        as many tiles as there are cores rather than each on all of them, which wait for each other.
        """
        if thread_count() < 2 or tiles < 2:
            return openvino, 1
        if openvino is None:
            return None, _TORCH_WORKERS.get(self.device.type, 1)
        streams = min(openvino.threads, _MAX_STREAMS)
        if streams < 2 or tiles < _TILES_PER_STREAM * streams:
            return openvino, 2
        return self._convert(openvino.precision, streams) or openvino, streams

    def round_if_same(
        self,
        openvino: OpenVinoNetwork | None,
        mode: OpenVinoMode,
        pixels: Any,
        grid: TileGrid,
        fit: StainFit | TileMixer,
        iou: float,
    ) -> OpenVinoNetwork | None:
        """bfloat16 in the place of `openvino` for many tiles, if it finds the same in some of them.

        Only what a setting leaves open is decided here. `pixels` (H, W, 3 or 4) may be lazy.
        """
        total = len(grid.tiles)
        if openvino is None or openvino.precision != "float32" or total < _MIN_ROUNDED_TILES:
            return openvino
        rounded = self._convert("bfloat16") if may_round(mode) else None
        if rounded is None:
            return openvino
        count = min(total // _TILES_PER_COMPARISON, _MAX_COMPARISONS)
        sure, same = 0, 0
        for number in np.linspace(0, total - 1, count + 2)[1:-1].astype(int):
            cut, tile = tiling.read_tile(pixels, grid.tiles[number], grid.size), grid.tiles[number]
            exact, other = (
                self._infer_batch([cut], [tile], grid, fit, _MIN_PARTNER_SCORE, iou, way)[0]
                for way in (openvino, rounded)
            )
            for one, two in ((exact, other), (other, exact)):
                found, there = _count_partners(one, two)
                sure, same = sure + found, same + there
            if sure >= _ENOUGH_BOXES:
                break
        return rounded if sure and same >= _MIN_SAME * sure else openvino

    def describe(self, openvino: OpenVinoNetwork | Precision | None) -> str:
        """Where the network runs, or would with a precision: for instance "CPU, OpenVINO"."""
        device = describe_device(self.device)
        if openvino is None or self._refusal:
            return device
        precision = openvino.precision if isinstance(openvino, OpenVinoNetwork) else openvino
        return f"{device}, OpenVINO{'' if precision == 'float32' else f' ({precision})'}"

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
        openvino: OpenVinoNetwork | None = None,
        report: Report | None = None,
    ) -> tuple[RawDetections, StainFit]:
        """Everything in the image (H, W, 3 or 4) with a score of at least `min_score`, best first.

        Without a fit the front end is fitted to the first tile, which then must be the whole image.
        Returns the fit, too. What a person should know is added to `notes`.
        """
        requested = BATCH_SIZES.get(self.device.type, 1) if batch == "auto" else batch
        total = len(grid.tiles)
        requested = size = min(requested, total)
        network, workers = self.for_many_tiles(openvino, total)
        parts: list[RawDetections] = []
        report_progress(report, 0, total, "finding cells")
        already_read: dict[Rectangle, npt.NDArray[np.uint8]] = {}
        if fit is None:
            first = tiling.read_tile(pixels, grid.tiles[0], grid.size)
            fit, already_read[grid.tiles[0]] = fit_stain(self.network, first), first
        front_end = TileMixer(fit) if total > 1 else fit

        def work(tiles: list[Rectangle]) -> list[RawDetections]:
            cut = [
                already_read[tile]
                if tile in already_read
                else tiling.read_tile(pixels, tile, grid.size)
                for tile in tiles
            ]
            return self._infer_batch(cut, tiles, grid, front_end, min_score, iou, network)

        while len(parts) < total:
            batches = [grid.tiles[k : k + size] for k in range(len(parts), total, size)]
            try:
                with closing(map_threads(work, batches, min(workers, len(batches)))) as results:
                    for result in results:
                        parts += result
                        report_progress(report, len(parts), total, "finding cells")
                continue
            except Exception as error:
                if (size == 1 and workers == 1) or not is_out_of_memory(error):
                    raise
            # Not in the handler: there the error still holds what the batch has in memory.
            size, workers, network = max(size // 2, 1), 1, openvino
            self.free_memory()
        if size < requested:
            notes.append(f"Memory did not suffice for {requested} tiles at a time; {size} did.")
        return self.merge_tiles(parts, grid, iou), fit

    def infer_tiles(
        self,
        cut: list[npt.NDArray[np.uint8]],
        tiles: list[Rectangle],
        grid: TileGrid,
        fit: StainFit | TileMixer,
        *,
        min_score: float,
        iou: float,
        openvino: OpenVinoNetwork | None = None,
    ) -> list[RawDetections]:
        """Detections in each of some tiles, which are at the grid's working size; not merged."""
        results = self._infer_batch(cut, tiles, grid, fit, min_score, iou, openvino)
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
        fit: StainFit | TileMixer,
        min_score: float,
        iou: float,
        openvino: OpenVinoNetwork | None,
    ) -> list[RawDetections]:
        """What is in each of some tiles, in image pixels; those of background are not run."""
        single = len(grid.tiles) == 1
        shown = [k for k, tile in enumerate(cut) if single or not tiling.is_empty(tile, 1.0)]
        parts = [RawDetections.concatenate([])] * len(cut)
        if not shown:
            return parts
        padded = [tiling.pad_tile(cut[k], self._stride) for k in shown]
        top, left = padded[0][1]
        x = fit.mix_tiles(self.network, np.stack([tile for tile, _ in padded]))
        raw = self._predict(x, openvino)
        end2end = bool(getattr(self.network, "end2end", False))
        found = select_boxes(raw, self.network.model[-1].nc, min_score, iou, end2end)
        offset = np.array([left, top, left, top], np.float32)
        for k, part in zip(shown, found, strict=True):
            boxes = tiling.to_image_boxes(grid, tiles[k], part.xyxy - offset)
            parts[k] = RawDetections(boxes, part.labels, part.scores)
        return parts

    def _predict(self, x: torch.Tensor, openvino: OpenVinoNetwork | None) -> Any:
        """What the network's head returns of `x` (N, 3, h, w)."""
        if openvino is not None and not self._refusal:
            try:
                return openvino(x)
            except RuntimeError as error:  # too little memory is a `MemoryError`
                self._refusal = str(error).strip().splitlines()[-1]
        x = x.to(memory_format=image_layout(self.device))
        with self._lock, no_gradients(self.device):
            return self.network.predict_mixed(x.half() if self.half else x)

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


def _count_partners(one: RawDetections, other: RawDetections) -> tuple[int, int]:
    """The number of sure boxes of one result, and of those that are in another, too."""
    sure = one[one.scores > _SURE]
    overlap = overlap_of(sure.xyxy, other.xyxy) * (sure.labels[:, None] == other.labels)
    return len(sure), int((overlap.max(1, initial=0) > _SAME_IOU).sum())


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
        # Not prediction[image, :4, place], of which XLA devices return other images' boxes.
        box = prediction[:, :4].mT[image, place].float()
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
