"""Ultralytics' dataset over images and labels that we have read and checked ourselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .augment import StainJitter
from .dataset import ImageFacts
from .files import read_image
from .images import to_bytes
from .labels import Item
from .stainfit import GREY
from .threads import run_all
from .yolo import RandomHSV, YOLODataset, cv2

Loaded = tuple[npt.NDArray[np.uint8], tuple[int, int], tuple[int, int]]


class StainDataset(YOLODataset):  # type: ignore[misc]
    """Batches of `Item`s (`img_path`) that vary stains in place of hue, saturation and value.

    Images are read as `detect` reads them, and nothing is written beside them.
    """

    def __init__(
        self,
        *,
        img_path: Sequence[Item],
        facts: Mapping[Path, ImageFacts],
        jitter: StainJitter | None = None,
        **settings: Any,
    ) -> None:
        self.facts, self.jitter = facts, jitter
        super().__init__(img_path=img_path, task="detect", **settings)

    def get_img_files(self, img_path: Sequence[Item]) -> list[str]:
        """The paths."""
        return [str(item.image) for item in img_path]

    def get_labels(self) -> list[dict[str, Any]]:
        """The labels as Ultralytics keeps them."""
        return [
            {
                "im_file": str(item.image),
                "shape": self.facts[item.image].shape,
                "cls": item.labels.astype(np.float32)[:, None],
                "bboxes": item.cxcywh.astype(np.float32),
                "segments": [],
                "keypoints": None,
                "normalized": True,
                "bbox_format": "xywh",
            }
            for item in self.img_path
        ]

    def load_image(self, i: int, rect_mode: bool = True, resize_short: bool = False) -> Loaded:
        """Image i (h, w, 3) BGR, its longer side resized to `imgsz`; (H, W) before; (h, w)."""
        if self.ims[i] is not None:
            return self.ims[i], self.im_hw0[i], self.im_hw[i]
        image = read_bgr(self.im_files[i])
        height, width = image.shape[:2]
        ratio = self.imgsz / max(height, width)
        if ratio != 1:
            size = [min(math.ceil(side * ratio), self.imgsz) for side in (width, height)]
            image = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
        loaded = image, (height, width), image.shape[:2]
        if self.augment and self.cache != "ram":
            self._remember(i, loaded)
        return loaded

    def cache_images(self) -> None:
        """Keep all images in memory; Ultralytics' own way draws a bar on standard output."""
        loaded = run_all([lambda i=i: self.load_image(i) for i in range(self.ni)])  # type: ignore[misc]
        images, self.im_hw0, self.im_hw = (list(part) for part in zip(*loaded, strict=True))
        self.ims = self._ImageCache(images)

    def _remember(self, i: int, loaded: Loaded) -> None:
        """Keep the last images for the mosaics, as Ultralytics does."""
        self.ims[i], self.im_hw0[i], self.im_hw[i] = loaded
        self.buffer.append(i)
        if 1 < len(self.buffer) >= self.max_buffer_length:
            j = self.buffer.pop(0)
            self.ims[j], self.im_hw0[j], self.im_hw[j] = None, None, None

    def build_transforms(self, hyp: Any = None) -> Any:
        """Ultralytics' transforms; called again when the mosaics end.

        Those of albumentations are left out: they are there or not as that package is installed.
        """
        transforms = super().build_transforms(hyp)
        if self.augment:
            steps = [s for s in transforms.transforms if type(s).__name__ != "Albumentations"]
            if self.jitter is not None:
                steps = [self.jitter if isinstance(s, RandomHSV) else s for s in steps]
            transforms.transforms = steps
        return transforms


def read_bgr(path: str | Path) -> npt.NDArray[np.uint8]:
    """An image file as (H, W, 3) uint8 BGR; what alpha hides becomes padding."""
    pixels = to_bytes(read_image(path).pixels)
    if pixels.shape[2] == 4:
        pixels = np.where(pixels[..., 3:] > 0, pixels[..., :3], np.uint8(GREY))
    return np.ascontiguousarray(pixels[..., ::-1])
