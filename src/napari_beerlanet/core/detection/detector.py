"""`Detector`: a trained network that detects objects in images of any size and magnification."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from napari_beerlanet.core.boxes.detections import Detections, channel_name
from napari_beerlanet.core.boxes.matching import non_max_suppression
from napari_beerlanet.core.common.device import copy_to, is_out_of_memory, place_on
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.detection.inference import InferenceRunner, on_cpu
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.openvino_network import choose_precision
from napari_beerlanet.core.detection.pipeline import DetectionPipeline, ImageCache
from napari_beerlanet.core.detection.scale_search import pooled_size
from napari_beerlanet.core.detection.settings import DetectSettings, OpenVinoMode
from napari_beerlanet.core.images import PixelSize
from napari_beerlanet.core.images.rgb import check_rgb, to_uint8
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.core.stains.front_end import decompose_settings, own_stain

Window = tuple[slice, slice]
"""Rows and columns, from their first to the one after their last."""

_DEFAULTS = DetectSettings()


class Detector:
    """What `load_checkpoint` returns: `network`, `info` (a plain dict) and the `device` it runs on.

    `network` is float32 and as trained; a fused copy of it does the work.
    """

    def __init__(
        self, network: StainDetectionModel, info: dict[str, Any], device: torch.device | str = "cpu"
    ) -> None:
        # What a person should know on where it runs is in `notes`.
        self.device, self.notes = place_on(network, torch.device(device))
        self.network = network.float().eval()
        self.info = info
        self._runner: InferenceRunner | None = None
        self._image_cache = ImageCache()

    def __repr__(self) -> str:
        classes = ", ".join(self.info["classes"])
        return f"Detector({self.info.get('name', '')!r}: {classes}; on {self.device})"

    def detect(
        self,
        rgb: Any,
        confidence: float = _DEFAULTS.confidence,
        iou: float = _DEFAULTS.iou,
        object_size: float | Literal["auto"] = _DEFAULTS.object_size,
        tile: int | Literal["auto"] = _DEFAULTS.tile,
        report: Report | None = None,
        *,
        pixel_size: float | PixelSize | None = _DEFAULTS.pixel_size,
        size_hint: float | None = None,
        densities: bool = _DEFAULTS.densities,
        batch: int | Literal["auto"] = _DEFAULTS.batch,
        openvino: OpenVinoMode = _DEFAULTS.openvino,
    ) -> Detections:
        """Detect objects in an image (H, W, 3 or 4): uint8, uint16 or float in [0, 1].

        Parameters
        ----------
        confidence
            Minimum score. Everything above 0.01 stays in `candidates`, so that `above` can choose
            again without another run.
        iou
            Boxes of one class with a larger intersection over union are duplicates.
        object_size
            Typical size of the objects in image pixels (√ of a box's area), or "auto": from the
            physical pixel sizes where image and model have one, otherwise as the image suggests.
        tile
            Side of tiles in working pixels; an image that is hardly larger is taken whole.
        pixel_size
            Micrometres per pixel, or (y, x).
        size_hint
            An object size to try first where it is "auto" and found in the image, as that of the
            image before. It is used only where objects turn out to have that size.
        densities
            Add columns "Model channel k mean" and "… sum" (over a box's pixels) for every component
            that the model has learned (none of a model without BeerLaNet) and, where it knows those
            of its training, "unlike training" and "class agreement": see `domain_shift_scores` and
            `class_agreement`.
        batch
            Tiles at a time; halved where memory does not suffice.
        openvino
            On the CPU, what runs the network: "auto" is OpenVINO where it is installed (unless
            the environment variable NAPARI_BEERLANET_OPENVINO says otherwise), in float32, or for
            images of many tiles in bfloat16 where the CPU has it and some of the tiles, run both
            ways, have the same boxes. "float32" and "bfloat16" are OpenVINO with that precision,
            "off" is torch.
        """
        settings = DetectSettings(
            confidence=confidence,
            iou=iou,
            object_size=object_size,
            tile=tile,
            pixel_size=pixel_size,
            densities=densities,
            batch=batch,
            openvino=openvino,
        )
        notes = list(self.notes)
        pixels = self.network.normalize(to_uint8(check_rgb(rgb).pixels), notes)
        cached = self._image_cache.get(pixels)
        pipeline = DetectionPipeline(
            self.runner, self.info, pixels, settings, report, cached, size_hint
        )
        pipeline.notes += notes
        raw = pipeline.detect_at(pipeline.choose_scale())
        result = Detections(
            raw.xyxy,
            raw.labels,
            raw.scores,
            self.classes,
            image_shape=pixels.shape[:2],
            pixel_size=settings.pixel_size_yx,
            report=pipeline.run_report(raw),
            columns=pipeline.columns(raw) if densities else {},
        )
        report_progress(report, 1, 1, "done")
        return result.above(confidence)

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by label."""
        return list(self.info["classes"])

    def decompose(self, rgb: Any, report: Report | None = None) -> Decomposition:
        """The image's stains as the network sees them: K steps from the learned start.

        They are called "Model channel 1" …, as the columns of its detections. A detector without
        BeerLaNet has none, which is a `ValueError`.
        """
        stain = own_stain(self.network, "detector")
        rgb = rgb if self.network.normalizer is None else self.network.normalize(rgb)
        channels = tuple(channel_name(k) for k in range(stain.components))
        return decompose(rgb, report=report, **self.stain_settings).with_names(channels)

    @property
    def stain_settings(self) -> dict[str, Any]:
        """How the network decomposes stains, as arguments of `decompose`."""
        return decompose_settings(own_stain(self.network, "detector"))

    def to(self, device: torch.device | str) -> Detector:
        """The same model on another device."""
        return Detector(copy_to(self.network, torch.device("cpu")), self.info, device)

    def runs_on(self, openvino: OpenVinoMode = _DEFAULTS.openvino) -> str:
        """Where and in what the network is run, for instance "CPU, OpenVINO"."""
        precision = choose_precision(openvino, []) if self.device.type == "cpu" else None
        return self.runner.describe(precision)

    @property
    def runner(self) -> InferenceRunner:
        """The fused network; made at the first use, on the CPU where memory does not suffice."""
        if self._runner is not None:
            return self._runner
        try:
            self._runner = InferenceRunner(self.network, self.device)
            return self._runner
        except Exception as error:
            if self.device.type == "cpu" or not is_out_of_memory(error):
                raise
        # Not kept: the next run may find more memory.
        return on_cpu(self.network, self.device, "the network")


def detect_windows(
    model: Detector,
    read: Callable[[Window], npt.NDArray[Any]],
    windows: Sequence[Window],
    shape: tuple[int, int],
    *,
    confidence: float = _DEFAULTS.confidence,
    iou: float = _DEFAULTS.iou,
    report: Report | None = None,
    **settings: Any,
) -> Detections:
    """Detections of `model.detect` in the windows of an image of `shape` (H, W), in its pixels.

    `read(window)` gives the pixels (h, w, 3 or 4). Where windows overlap, duplicates are suppressed
    as for `iou`.
    """
    parts = []
    for k, window in enumerate(windows):
        part = subprogress(report, k / len(windows), (k + 1) / len(windows))
        detections = model.detect(read(window), confidence, iou, report=part, **settings)
        if settings.get("size_hint") is None:  # windows of one image show objects of one size
            settings["size_hint"] = pooled_size([detections])
        parts.append(detections if detections.candidates is None else detections.candidates)
    if len(parts) == 1 and _window_corner(windows[0]) == (0, 0) and parts[0].image_shape == shape:
        return parts[0].above(confidence)
    return _merge_windows(parts, windows, shape, iou).above(confidence)


def _merge_windows(
    parts: Sequence[Detections], windows: Sequence[Window], shape: tuple[int, int], iou: float
) -> Detections:
    """All parts at their positions in the image."""
    moved = [
        part.xyxy + np.array([*_window_corner(window)[::-1]] * 2, np.float32)
        for part, window in zip(parts, windows, strict=True)
    ]
    first = max(parts, key=lambda part: math.prod(part.image_shape or (0, 0)))
    everything = Detections(
        np.concatenate(moved),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.scores for part in parts]),
        first.names,
        columns={
            name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns
        },
        image_shape=shape,
        pixel_size=first.pixel_size,
        report=first.report | {"windows": len(parts), "notes": _unique_notes(parts)},
    )
    if not _any_overlap(windows):
        return everything
    kept = non_max_suppression(everything.xyxy, everything.scores, everything.labels, iou)
    return everything[kept]


def _window_corner(window: Window) -> tuple[int, int]:
    """First row and column."""
    rows, columns = window
    return int(rows.start or 0), int(columns.start or 0)


def _any_overlap(windows: Sequence[Window]) -> bool:
    """Whether any two share a pixel."""
    return any(
        max(a.start, c.start) < min(a.stop, c.stop) and max(b.start, d.start) < min(b.stop, d.stop)
        for i, (a, b) in enumerate(windows)
        for c, d in windows[:i]
    )


def _unique_notes(parts: Sequence[Detections]) -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(note for part in parts for note in part.report.get("notes", [])))
