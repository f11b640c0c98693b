"""A trained network that finds objects in images of any size and magnification."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import torch

from .boxes import Detections
from .decompose import Decomposition, decompose
from .finding import ImageRun, PixelSize, is_number
from .images import check_rgb, to_bytes
from .network import StainDetectionModel
from .progress import Report, tell
from .runner import Runner
from .stainfit import ImageMemory


class Detector:
    """What `load_checkpoint` returns: `network`, `info` (a plain dict) and the `device` it runs on.

    `network` is float32 and as trained; a fused copy of it does the work.
    """

    def __init__(
        self, network: StainDetectionModel, info: dict[str, Any], device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.network = network.to(self.device).float().eval()
        self.info = info
        self._runner: Runner | None = None
        self._memory = ImageMemory()

    def __repr__(self) -> str:
        classes = ", ".join(self.info["classes"])
        return f"Detector({self.info.get('name', '')!r}: {classes}; on {self.device})"

    def detect(
        self,
        rgb: Any,
        confidence: float = 0.25,
        iou: float = 0.7,
        object_size: float | Literal["auto"] = "auto",
        tile: int | Literal["auto"] = "auto",
        report: Report | None = None,
        *,
        pixel_size: float | PixelSize | None = None,
        densities: bool = True,
        batch: int | Literal["auto"] = "auto",
    ) -> Detections:
        """Find objects in an image (H, W, 3 or 4): uint8, uint16 or float in [0, 1].

        Parameters
        ----------
        confidence
            Least score. Everything above 0.01 stays in `candidates`, so that `above` can choose
            again without another run.
        iou
            Boxes of one class that overlap more than this are one object.
        object_size
            Typical size of the objects in image pixels (√ of a box's area), or "auto": from the
            physical pixel sizes where image and model have one, otherwise as the image suggests.
        tile
            Side of tiles in working pixels; an image that is hardly larger is taken whole.
        pixel_size
            Micrometres per pixel, or (y, x).
        densities
            Add columns "OD k mean" and "OD k sum" (over a box's pixels) for every component and,
            where the model has them of its training, "unlike training" (see `unlike_seen`).
        batch
            Tiles at a time; halved where memory does not suffice.
        """
        _check_thresholds(confidence, iou)
        pixels = to_bytes(check_rgb(rgb).pixels)
        size = _pair(pixel_size)
        seen = self._memory.recall(pixels)
        run = ImageRun(self.runner, self.info, pixels, iou, tile, batch, report, seen)
        found = run.at(run.choose(object_size, size))
        result = Detections(
            found.xyxy,
            found.labels,
            found.scores,
            self.classes,
            image_shape=pixels.shape[:2],
            pixel_size=size,
            report=run.facts(),
            columns=run.columns(found) if densities else {},
        )
        tell(report, 1, 1, "done")
        return result.above(confidence)

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by label."""
        return list(self.info["classes"])

    def decompose(self, rgb: Any, report: Report | None = None) -> Decomposition:
        """The image's stains as the network sees them: K steps from the learned start."""
        return decompose(rgb, report=report, **self.stain_settings)

    @property
    def stain_settings(self) -> dict[str, Any]:
        """How the network takes stains apart, as arguments of `decompose`."""
        stain = self.network.stain
        with torch.no_grad():
            S, lam, gamma = (p.double().cpu() for p in (stain.spectra, stain.lam, stain.gamma))
        return {
            "iterations": stain.iterations,
            "spectra": S.numpy(),
            "lam": float(lam),
            "gamma": float(gamma),
            "domain": stain.domain,
            "unit_spectra": stain.unit_spectra,
            "reference_pixels": stain.reference_pixels,
        }

    def to(self, device: torch.device | str) -> Detector:
        """The same model on another device."""
        return Detector(copy.deepcopy(self.network), self.info, device)

    @property
    def runner(self) -> Runner:
        """The fused network; made at the first use."""
        if self._runner is None:
            self._runner = Runner(self.network, self.device)
        return self._runner


def _check_thresholds(confidence: float, iou: float) -> None:
    for name, value in (("confidence", confidence), ("iou", iou)):
        if not is_number(value) or not 0 <= value <= 1:
            raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}.")


def _pair(size: Any) -> PixelSize | None:
    if size is None:
        return None
    pair = (size, size) if is_number(size) else size
    try:
        y, x = pair
        right = all(is_number(v) and 0 < v < math.inf for v in (y, x))
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(f"pixel_size must be micrometres above 0, or (y, x), not {size!r}.")
    return float(y), float(x)
