"""A network run over tiles: in batches, in the device's best number format, within its memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from . import tiling
from .network import StainDetectionModel
from .progress import Report, tell
from .stainfit import StainFit, fit_stain
from .tiling import Plan, Tile
from .yolo import non_max_suppression

_BATCH = {"cuda": 16, "mps": 4}
_MOST = 10_000  # objects in one tile
_PATIENCE = 30.0  # seconds per tile that Ultralytics may take to thin boxes out
_NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")


@dataclass(frozen=True)
class Found:
    """Boxes xyxy (n, 4) float32, labels (n,) int64, scores (n,) float32."""

    xyxy: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]

    @classmethod
    def together(cls, parts: Sequence[Found]) -> Found:
        """All parts, one after the other."""
        return cls(
            np.concatenate([np.zeros((0, 4), np.float32), *(p.xyxy for p in parts)]),
            np.concatenate([np.zeros(0, np.int64), *(p.labels for p in parts)]),
            np.concatenate([np.zeros(0, np.float32), *(p.scores for p in parts)]),
        )

    def __getitem__(self, which: Any) -> Found:
        return Found(self.xyxy[which], self.labels[which], self.scores[which])

    def __len__(self) -> int:
        return len(self.xyxy)


def lacks_memory(error: Exception) -> bool:
    """Whether an error says that memory did not suffice; not every device has a class for that."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)


class Runner:
    """A fused copy of the network on a device: float16 on CUDA, channels last."""

    def __init__(self, network: StainDetectionModel, device: torch.device) -> None:
        self.device = device
        self.half = device.type == "cuda"
        self.network = copy.deepcopy(network).eval().fuse(verbose=False).to(device)
        self.network.requires_grad_(False)
        self.network = self.network.to(memory_format=torch.channels_last)
        if self.half:
            self.network = self.network.half()  # the front end stays float32
        self.network.model[-1].max_det = _MOST  # of networks that thin boxes out by themselves
        self._stride = int(self.network.stride.max())
        self._one_at_a_time = threading.Lock()  # Ultralytics' head keeps the last image's anchors

    def run(
        self,
        pixels: npt.NDArray[np.uint8],
        plan: Plan,
        fit: StainFit | None,
        *,
        least: float,
        iou: float,
        batch: int | Literal["auto"],
        notes: list[str],
        report: Report | None = None,
    ) -> tuple[Found, StainFit]:
        """Everything in the image (H, W, 3 or 4) with a score of at least `least`, best first.

        Without a fit the front end is fitted to the first tile, which then must be the whole image.
        Returns the fit, too. What a person should know is added to `notes`.
        """
        asked = _BATCH.get(self.device.type, 1) if batch == "auto" else batch
        asked = size = min(asked, len(plan.tiles))
        parts: list[Found] = []
        while len(parts) < len(plan.tiles):
            tell(report, len(parts), len(plan.tiles), "finding objects")
            now = plan.tiles[len(parts) : len(parts) + size]
            cut = [tiling.cut_out(pixels, tile, plan.size) for tile in now]
            fit = fit or fit_stain(self.network, cut[0])
            try:
                parts += self._batch(cut, now, plan, fit, least, iou)
                continue
            except Exception as error:
                if size == 1 or not lacks_memory(error):
                    raise
            # Not in the handler: there the error still holds what the batch has in memory.
            size //= 2
            self.free_memory()
        tell(report, 1, 1, "finding objects")
        if size < asked:
            notes.append(f"Memory did not suffice for {asked} tiles at a time; {size} did.")
        assert fit is not None
        return self.merged(parts, plan, iou), fit

    def find(
        self,
        cut: list[npt.NDArray[np.uint8]],
        tiles: list[Tile],
        plan: Plan,
        fit: StainFit,
        *,
        least: float,
        iou: float,
    ) -> list[Found]:
        """What is in each of some tiles, cut out at the plan's size; not merged, at once."""
        found = self._batch(cut, tiles, plan, fit, least, iou)
        # A box outside its tile is clipped to nothing.
        return [part[(part.xyxy[:, 2:] > part.xyxy[:, :2]).all(1)] for part in found]

    def free_memory(self) -> None:
        """Give back what the device keeps for later."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def _batch(
        self,
        cut: list[npt.NDArray[np.uint8]],
        tiles: list[Tile],
        plan: Plan,
        fit: StainFit,
        least: float,
        iou: float,
    ) -> list[Found]:
        """What is in each of some tiles, in image pixels."""
        grey = [tiling.padded(tile, self._stride) for tile in cut]
        top, left = grey[0][1]
        x = fit.see(self.network, np.stack([tile for tile, _ in grey]))
        x = x.to(memory_format=torch.channels_last)
        with self._one_at_a_time, torch.inference_mode():
            raw = self.network.find(x.half() if self.half else x)
            thin = non_max_suppression(
                raw,
                least,
                iou,
                max_det=_MOST,
                max_time_img=_PATIENCE,
                nc=self.network.model[-1].nc,
                end2end=bool(getattr(self.network, "end2end", False)),
            )
        found = [t.float().cpu().numpy() for t in thin]
        offset = np.array([left, top, left, top], np.float32)
        return [
            Found(
                tiling.to_image(plan, tile, boxes[:, :4] - offset),
                boxes[:, 5].astype(np.int64),
                boxes[:, 4].astype(np.float32),
            )
            for tile, boxes in zip(tiles, found, strict=True)
        ]

    def merged(self, parts: Sequence[Found], plan: Plan, iou: float) -> Found:
        """What is in all tiles as one list; of tiles that were not looked at the part is empty."""
        everything = Found.together(parts)
        sides = everything.xyxy[:, 2:] - everything.xyxy[:, :2]
        owner = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
        real = (sides > 0).all(1)  # a box outside its tile is clipped to nothing
        everything, owner = everything[real], owner[real]
        if len(parts) == 1:
            return everything
        return everything[
            tiling.merge(plan, everything.xyxy, everything.scores, everything.labels, owner, iou)
        ]
