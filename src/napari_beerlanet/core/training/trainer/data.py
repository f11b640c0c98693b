"""Training data: Ultralytics' dataset over images that we have read, and stain augmentation.

`StainJitter` renders other laboratories from one. By Beer and Lambert I = exp(x₀ − S D). With S
three known dyes, D is S⁻¹ (x₀ − ln I), and the same cells under other dyes S', other strengths a
and another background x₀' are I' = exp(x₀' − S' (a ⊙ D)). That is one 3 × 3 matrix on optical
densities, and boxes stay where they are. What a camera makes of the light follows: stray light,
and a 3 × 3 matrix on intensities. `HedJitter` is the usual augmentation of histology, to compare
with.
"""

from __future__ import annotations

import copy
import math
import os
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.geometry import centre_inside, cxcywh_to_xyxy, xyxy_to_cxcywh
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.threads import run_parallel
from napari_beerlanet.core.detection.object_sizes import (
    MIN_KNOWN_BOXES,
    TrainingSizes,
    weighted_median,
)
from napari_beerlanet.core.detection.ultralytics_api import RandomHSV, YOLODataset, cv2
from napari_beerlanet.core.formats.dataset import (
    Dataset,
    ImageInspection,
    LabelledImage,
    inspect_images,
)
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import PADDING_GREY, fill_transparent, to_uint8
from napari_beerlanet.core.project.crops import MIN_CROP_SIDE, cut_crop, plan_crops
from napari_beerlanet.core.stains.solver.spectra import default_spectra
from napari_beerlanet.samples import photograph_path

_SAMPLE_STRIDE = 7  # every seventh pixel shows the background
_LOG_TABLE = np.log(np.maximum(np.arange(256), 1) / 255).astype(np.float32)
_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])  # of RGB
_HED = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
"""Optical densities in RGB of haematoxylin, eosin and DAB, as scikit-image's `rgb_from_hed`."""


class ImageJitter:
    """An Ultralytics transform: labels["img"] (H, W, 3) uint8 BGR to the same in other colours.

    `share` is how many images are changed at all; `source` is a `random.Random`, or None for
    Python's own random numbers.
    """

    share: float
    source: random.Random | None

    def __call__(self, labels: dict[str, Any]) -> dict[str, Any]:
        """Change labels["img"]; padding keeps its grey."""
        labels["img"] = self.apply(labels["img"])
        return labels

    def apply(self, image: npt.NDArray[np.uint8], height: int | None = None) -> Any:
        """An image (H, W, 3) uint8 BGR in other colours; padding keeps its grey.

        Only its first `height` rows are blurred or sharpened, where the rest is no part of them.
        """
        if self._random.random() >= self.share:
            return image
        blank = (image == PADDING_GREY).all(2)
        changed = self._change(image, blank, height)
        changed[blank] = PADDING_GREY
        return changed

    def _change(
        self, image: npt.NDArray[np.uint8], blank: npt.NDArray[np.bool_], height: int | None
    ) -> npt.NDArray[np.uint8]:
        """A changed copy of the image; `blank` (H, W) is padding."""
        raise NotImplementedError

    @property
    def _random(self) -> Any:
        return self.source or random


@dataclass
class HedJitter(ImageJitter):
    """Haematoxylin, eosin and DAB of each image scaled and shifted at random.

    D = −ln(I) R⁻¹, R the densities of the three dyes in RGB, becomes α ⊙ D + β.

    Parameters
    ----------
    scale
        α is uniform in 1 ± scale, for each dye by itself.
    shift
        β is uniform in ± shift, in units of optical density (natural logarithm).
    """

    scale: float = 0.2
    shift: float = 0.05
    share: float = 0.9
    source: random.Random | None = field(default=None, init=False, repr=False, compare=False)

    def _change(
        self, image: npt.NDArray[np.uint8], blank: npt.NDArray[np.bool_], height: int | None
    ) -> npt.NDArray[np.uint8]:
        a = [1 + self._random.uniform(-self.scale, self.scale) for _ in range(3)]
        b = [self._random.uniform(-self.shift, self.shift) for _ in range(3)]
        S = _HED.T[::-1]  # channels (BGR) × dyes
        affine = np.column_stack([(S * a) @ np.linalg.inv(S), -S @ b]).astype(np.float32)
        lit = np.exp(np.asarray(cv2.transform(_LOG_TABLE[image], affine)))
        return np.asarray(np.rint(np.clip(lit * 255, 0, 255)), dtype=np.uint8)


@dataclass
class StainJitter(ImageJitter):
    """An image under another stain, light and camera.

    Parameters
    ----------
    dyes
        Standard deviation of each dye's absorption per channel (unit spectra).
    strength
        Standard deviation of ln of the strength: of all dyes together, and half of it of each.
    light
        (lowest, highest) intensity of the background, in [0, 1].
    cast
        Standard deviation of ln of the background's intensity per channel.
    focus
        Largest blur (standard deviation in pixels); as often, edges are sharpened.
    flare
        Largest part of the light that has not passed the specimen: it makes nuclei pale.
    saturation
        (lowest, highest) factor of the camera's saturation.
    hue
        Standard deviation of a turn of the camera's hues about grey, in radians.
    """

    dyes: float = 0.12
    strength: float = 0.5
    light: tuple[float, float] = (0.5, 1.0)
    cast: float = 0.12
    focus: float = 1.0
    flare: float = 0.0
    saturation: tuple[float, float] = (1.0, 1.0)
    hue: float = 0.0
    share: float = 0.9
    source: random.Random | None = field(default=None, init=False, repr=False, compare=False)

    def _change(
        self, image: npt.NDArray[np.uint8], blank: npt.NDArray[np.bool_], height: int | None
    ) -> npt.NDArray[np.uint8]:
        changed = self._restain(image, blank)
        changed[:height] = self._refocus(changed[:height])
        return changed

    def _restain(
        self, image: npt.NDArray[np.uint8], blank: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.uint8]:
        X = _LOG_TABLE[image]
        seen = X[::_SAMPLE_STRIDE, ::_SAMPLE_STRIDE][~blank[::_SAMPLE_STRIDE, ::_SAMPLE_STRIDE]]
        if not len(seen):
            return image.copy()
        x0 = np.percentile(seen, 95, axis=0).astype(np.float32)
        M, x1 = self._matrix(), self._illumination()
        np.subtract(x0, X, out=X)
        lit = np.exp(x1 - np.asarray(cv2.transform(X, M.astype(np.float32))))
        if self.flare:
            stray = self._random.uniform(0, self.flare)
            lit = stray + (1 - stray) * lit
        if self.hue or self.saturation != (1.0, 1.0):
            lit = np.asarray(cv2.transform(lit, self._camera()))
        return np.asarray(np.rint(np.clip(lit * 255, 0, 255)), dtype=np.uint8)

    def _matrix(self) -> npt.NDArray[np.float64]:
        """S' diag(a) S⁻¹ (3, 3) in BGR."""
        S = default_spectra(3)[::-1]
        other = np.abs(S + [[self._random.gauss(0, self.dyes) for _ in range(3)] for _ in range(3)])
        other /= np.linalg.norm(other, axis=0)
        common = self._random.gauss(0, self.strength)
        a = np.exp([common + self._random.gauss(0, self.strength / 2) for _ in range(3)])
        return np.asarray((other * a) @ np.linalg.inv(S))

    def _camera(self) -> npt.NDArray[np.float32]:
        """The colour matrix of another camera (3, 3) in BGR: grey stays grey."""
        low, high = self.saturation
        s = math.exp(self._random.uniform(math.log(low), math.log(high)))
        turn = self._random.gauss(0, self.hue)
        c, n = s * math.cos(turn), s * math.sin(turn)
        matrix = np.linalg.inv(_YIQ) @ [[1, 0, 0], [0, c, -n], [0, n, c]] @ _YIQ
        return np.asarray(matrix[::-1, ::-1], dtype=np.float32).copy()

    def _illumination(self) -> npt.NDArray[np.float32]:
        level = math.log(self._random.uniform(*self.light))
        x1 = np.array([level + self._random.gauss(0, self.cast) for _ in range(3)])
        return np.asarray(np.minimum(x1, 0), dtype=np.float32)

    def _refocus(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        amount = self._random.uniform(-1, 1) * self.focus
        if abs(amount) < 0.2:
            return image
        blurred = cv2.GaussianBlur(image, (0, 0), abs(amount))
        if amount > 0:
            return np.asarray(blurred)
        return np.asarray(cv2.addWeighted(image, 2.0, blurred, -1.0, 0))


LoadedImage = tuple[npt.NDArray[np.uint8], tuple[int, int], tuple[int, int]]


class ImageNotes:
    """What a normalizer says of images: a sentence for each of its notes, told once."""

    def __init__(self) -> None:
        self._images: dict[str, set[str]] = {}
        self._told: set[str] = set()
        self._lock = threading.Lock()  # images are read by several threads

    def add(self, path: str | Path, notes: Sequence[str]) -> None:
        """Remember the notes of an image."""
        with self._lock:
            for note in notes:
                self._images.setdefault(note, set()).add(os.path.basename(path))

    def new_sentences(self) -> list[str]:
        """Return a sentence for each note that has not been told, with the images that it is of."""
        with self._lock:
            new = {note: sorted(self._images[note]) for note in self._images.keys() - self._told}
        self._told.update(new)
        sentences = []
        for note, (first, *others) in sorted(new.items()):
            more = f" and {count_of(len(others), 'more image')}" if others else ""
            sentences.append(f"{note.rstrip('.')} ({first}{more}).")
        return sentences


class StainDataset(YOLODataset):  # type: ignore[misc]
    """Batches of `LabelledImage`s (`img_path`) with a jitter in place of hue and saturation.

    Images are read, and normalised by the `normalizer` if there is one, as `detect` does it;
    nothing is written beside them.
    """

    def __init__(
        self,
        *,
        img_path: Sequence[LabelledImage],
        facts: Mapping[Path, ImageInspection],
        jitter: ImageJitter | None = None,
        normalizer: Any = None,
        notes: ImageNotes | None = None,
        **settings: Any,
    ) -> None:
        self.facts, self.jitter, self.normalizer = facts, jitter, normalizer
        self.items = {item_name(item): item for item in img_path}
        self.notes = notes
        super().__init__(img_path=img_path, task="detect", **settings)

    def get_img_files(self, img_path: Sequence[LabelledImage]) -> list[str]:
        """A name for each item: its path, and what of the image it shows."""
        return [item_name(item) for item in img_path]

    def get_labels(self) -> list[dict[str, Any]]:
        """The labels as Ultralytics keeps them."""
        return [
            {
                "im_file": item_name(item),
                "shape": shown_shape(item, self.facts),
                "cls": item.labels.astype(np.float32)[:, None],
                "bboxes": item.cxcywh.astype(np.float32),
                "segments": [],
                "keypoints": None,
                "normalized": True,
                "bbox_format": "xywh",
            }
            for item in self.img_path
        ]

    def load_image(self, i: int, rect_mode: bool = True, resize_short: bool = False) -> LoadedImage:
        """Image i (h, w, 3) BGR, its longer side resized to `imgsz`; (H, W) before; (h, w)."""
        if self.ims[i] is not None:
            return self.ims[i], self.im_hw0[i], self.im_hw[i]
        image = read_item(self.items[self.im_files[i]], self.normalizer, self.notes)
        height, width = image.shape[:2]
        ratio = self.imgsz / max(height, width)
        if ratio != 1:
            size = [min(math.ceil(side * ratio), self.imgsz) for side in (width, height)]
            image = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
        loaded = image, (height, width), image.shape[:2]
        if self.augment and self.cache != "ram":
            self._cache_image(i, loaded)
        return loaded

    def cache_images(self) -> None:
        """Keep all images in memory; Ultralytics' own way draws a bar on standard output."""
        loaded = run_parallel([lambda i=i: self.load_image(i) for i in range(self.ni)])  # type: ignore[misc]
        images, self.im_hw0, self.im_hw = (list(part) for part in zip(*loaded, strict=True))
        self.ims = self._ImageCache(images)

    def _cache_image(self, i: int, loaded: LoadedImage) -> None:
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


class ReplayedPhotograph:
    """The packaged photograph of a smear, each time turned and stained differently.

    It shows red cells, a white cell and platelets, and is of the data that the packaged model has
    learned from. Images are (1, 3, size, size) float32 RGB in [0, 1], normalised as the training
    images are. The random numbers are its own, so that the training images are those of a run
    without it; like theirs, they begin anew where torch's do, with each epoch.
    """

    def __init__(self, size: int, jitter: ImageJitter | None, normalizer: Any = None) -> None:
        self._random = random.Random()
        self._seed: int | None = None
        self._jitter = copy.copy(jitter)
        if self._jitter is not None:
            self._jitter.source = self._random
        image = read_bgr(photograph_path("Blood smear (BCCD)"), normalizer)
        shape = [round(side * size / max(image.shape[:2])) for side in image.shape[:2]]
        top, left = ((size - side) // 2 for side in shape)
        self._image = np.full((size, size, 3), PADDING_GREY, np.uint8)
        self._image[top : top + shape[0], left : left + shape[1]] = cv2.resize(
            image, shape[::-1], interpolation=cv2.INTER_AREA
        )

    def as_taken(self) -> torch.Tensor:
        """Upright and in its own colours."""
        return self._to_tensor(self._image)

    def __call__(self) -> torch.Tensor:
        """The next one."""
        if torch.initial_seed() != self._seed:
            self._seed = torch.initial_seed()
            self._random.seed(self._seed)
        image = self._image if self._jitter is None else self._jitter.apply(self._image)
        image = np.rot90(image, self._random.randrange(4))
        return self._to_tensor(image[:, ::-1] if self._random.random() < 0.5 else image)

    @staticmethod
    def _to_tensor(image: npt.NDArray[np.uint8]) -> torch.Tensor:
        planes = np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1))
        return torch.from_numpy(planes)[None].float() / 255


def read_bgr(
    path: str | Path, normalizer: Any = None, notes: ImageNotes | None = None
) -> npt.NDArray[np.uint8]:
    """Return an image file as (H, W, 3) uint8 BGR, normalised; what alpha hides becomes padding.

    What the normalizer says of it is added to `notes`.
    """
    pixels = to_uint8(read_image(path).pixels)
    if normalizer is not None:
        done = normalizer.apply(pixels)
        pixels = done.rgb
        if notes is not None:
            notes.add(path, done.notes)
    return np.ascontiguousarray(fill_transparent(pixels)[..., ::-1])


# --- how large objects are shown ------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageView(LabelledImage):
    """A window of an image, filled up with padding to `shape` (H, W), to which boxes are relative.

    Training resizes the longer side of `shape`, so that it decides how large objects are shown.
    """

    shape: tuple[int, int]
    window: Rectangle
    side: int
    annotations: Annotations


_SAME_SIZE = math.log(1.3)  # sizes that differ by less than this need no other resolution
_MAX_VIEWS = 64  # of an image


def training_views(dataset: Dataset, info: Mapping[str, Any], image_size: int) -> Dataset:
    """The dataset with each image shown so that its objects are as large as the parent knows them.

    An image is shown whole, its longer side resized to `image_size`, where that hardly changes
    anything, or where the parent of this `info` knows no sizes of what is annotated. Otherwise it
    is filled up with padding, or cut into windows, as regions of a project are. Where another
    `image_size` than the parent's is asked for, the usual image is shown whole, and those of other
    magnifications as it.
    """
    training = TrainingSizes.of(info.get("object_sizes") or {}, dataset.names)
    items = [item for split in ("train", "val") for item in dataset.splits.get(split, ())]
    inspect_images(dataset, items)
    shapes = {item.image: dataset.inspections[item.image].shape for item in items}
    found = [
        training.deviation(
            np.sqrt((item.cxcywh[:, 2:] * shapes[item.image][::-1]).prod(1)), item.labels
        )
        for item in items
    ]
    off, boxes = np.array([v for v, _ in found]), np.array([n for _, n in found])
    if boxes.sum() < MIN_KNOWN_BOXES:
        return dataset
    # A few boxes do not prove that an image is of another magnification than the others.
    evidence = boxes / (boxes + MIN_KNOWN_BOXES)
    usual = weighted_median(np.nan_to_num(off), evidence)
    other = np.abs(off - usual) * evidence >= _SAME_SIZE  # False for NaN
    off = np.where(other, off, usual)
    larger = 0.0  # ln of how much objects are shown larger than the parent knows them
    if image_size != info["image_size"]:
        longest = [max(*shapes[item.image], 1) for item in items]
        larger = weighted_median(off + np.log(image_size / np.array(longest)), evidence)
    wanted = (image_size * np.exp(off - larger)).tolist()
    views = {
        item: _views_of(item, shapes[item.image], pixels, dataset.names)
        for item, pixels in zip(items, wanted, strict=True)
    }
    splits = {
        split: [view for item in there for view in views.get(item, [item])]
        for split, there in dataset.splits.items()
    }
    return replace(dataset, splits=splits)


def _views_of(
    item: LabelledImage, shape: tuple[int, int], wanted: float, names: list[str]
) -> list[LabelledImage]:
    """Windows of an image of which `wanted` pixels become as long as training images."""
    if not min(shape) or abs(math.log(wanted / max(shape))) < _SAME_SIZE:
        return [item]
    boxes = cxcywh_to_xyxy(item.cxcywh, shape)
    regions = (Region.whole_image(shape),)
    drawn = Annotations(boxes, item.labels, names, regions=regions, image_shape=shape)
    side = max(round(wanted), MIN_CROP_SIDE)
    windows = [planned.window for planned in plan_crops(drawn, side)]
    if len(windows) > _MAX_VIEWS:
        full = [w for w in windows if centre_inside(boxes, np.array([w.corners])).any()] or windows
        chosen = np.unique(np.linspace(0, len(full) - 1, min(len(full), _MAX_VIEWS)).astype(int))
        windows = [full[k] for k in chosen]
    blank = np.broadcast_to(np.uint8(0), (*shape, 3))
    views: list[LabelledImage] = []
    for window in windows:
        crop = cut_crop(blank, drawn, window, side)
        size = crop.pixels.shape[0], crop.pixels.shape[1]
        cxcywh = xyxy_to_cxcywh(crop.xyxy, size)
        views.append(
            ImageView(
                item.image,
                crop.labels,
                cxcywh,
                shape=size,
                window=window,
                side=side,
                annotations=drawn,
            )
        )
    return views


def item_name(item: LabelledImage) -> str:
    """The path, and of a view which it is."""
    if not isinstance(item, ImageView):
        return str(item.image)
    return f"{item.image} {item.window.corners} {item.side}"


def shown_shape(item: LabelledImage, facts: Mapping[Path, ImageInspection]) -> tuple[int, int]:
    """(H, W) of what is shown of an image, padding included."""
    return item.shape if isinstance(item, ImageView) else facts[item.image].shape


def read_item(
    item: LabelledImage, normalizer: Any = None, notes: ImageNotes | None = None
) -> npt.NDArray[np.uint8]:
    """What is shown of an image, as `read_bgr`."""
    pixels = read_bgr(item.image, normalizer, notes)
    if not isinstance(item, ImageView):
        return pixels
    return cut_crop(pixels, item.annotations, item.window, item.side).pixels
