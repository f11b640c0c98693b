"""`Classifier`: a trained network that says what crops, or the boxes of an image, show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from napari_beerlanet.core.boxes.classes import classes_to_classify, healthy_types
from napari_beerlanet.core.boxes.detections import (
    ENTROPY_COLUMN,
    PROBABILITY_COLUMN,
    Detections,
    channel_name,
    type_columns,
)
from napari_beerlanet.core.boxes.geometry import area, clip
from napari_beerlanet.core.classification.crops import (
    Pixels,
    check_crop_boxes,
    crop_neighbours,
    cut_crops,
    denoise_crop,
    hide_neighbours,
    read_crops,
    reading_order,
    to_rgb8,
    whole_crop,
)
from napari_beerlanet.core.classification.network import ClassificationNetwork
from napari_beerlanet.core.classification.settings import StainSource
from napari_beerlanet.core.common.device import (
    copy_to,
    describe_device,
    free_memory,
    image_layout,
    is_out_of_memory,
    no_gradients,
    on_cpu_note,
    place_on,
    precise_dtype,
)
from napari_beerlanet.core.common.messages import count_of, quoted
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.images.rgb import check_rgb
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.core.stains.domain_shift import mean_stain, stain_warnings, summarize_stain
from napari_beerlanet.core.stains.front_end import (
    StainFit,
    decompose_settings,
    fit_palette,
    fit_stain,
    own_stain,
)
from napari_beerlanet.core.stains.slide_pixels import SlidePixels

MAY_BE_INFECTED = 0.03
"""Probability from which on a cell is looked at a second time, without its neighbours."""

BATCH_SIZES = {"cuda": 256, "mps": 64}
"""Crops per batch by type of device; `_CPU_BATCH` on others."""

Scores = npt.NDArray[np.float32]

_CPU_BATCH = 32
_CPU = torch.device("cpu")
_SAMPLE_CROPS = 16  # whose stains are compared with those of training
_EXPECTED_CELLS = 20.0  # as many as the expected share of infected cells counts for
_SHARE_STEPS = 200


@dataclass(frozen=True, eq=False)
class Classification:
    """What n crops show.

    `labels` (n,) int64 into `names`, `scores` (n, k) float32 calibrated probabilities that sum to
    1, in the order of the crops or boxes. `report`: plain facts on how they came about; its
    "warnings" are sentences on how the image differs from those of training.
    """

    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    names: list[str]
    report: dict[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def confidence(self) -> npt.NDArray[np.float32]:
        """(n,) the probability of the label."""
        return np.asarray(self.table()[PROBABILITY_COLUMN])

    @property
    def entropy(self) -> npt.NDArray[np.float32]:
        """(n,) −Σ p ln p: 0 where one class is certain, ln k where all are as likely."""
        return np.asarray(self.table()[ENTROPY_COLUMN])

    def counts(self) -> dict[str, int]:
        """How many there are of each class, in the order of `names`."""
        numbers = np.bincount(self.labels, minlength=len(self.names))
        return dict(zip(self.names, numbers.tolist(), strict=True))

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """Columns (n,) by name: type, its probability, entropy, and the probability of each."""
        return type_columns(self.names, self.scores, self.labels)

    def to_frame(self) -> Any:
        """A pandas data frame, one row per crop."""
        import pandas as pd

        return pd.DataFrame(self.table())


class Classifier:
    """What `load_checkpoint` returns for a classifier: `network`, `info`, and its `device`.

    `network` is float32 and as trained; a copy of it does the work. `info` is a plain dict.
    """

    def __init__(
        self,
        network: ClassificationNetwork,
        info: dict[str, Any],
        device: torch.device | str = "cpu",
    ) -> None:
        # What a person should know on where it runs is in `notes`.
        self.device, self.notes = place_on(network, torch.device(device))
        self.network = network.float().eval()
        self.info = info
        self._runner: ClassificationNetwork | None = None

    def __repr__(self) -> str:
        classes = ", ".join(self.info["classes"])
        return f"Classifier({self.info.get('name', '')!r}: {classes}; on {self.device})"

    def classify(
        self,
        images: Any,
        boxes: Any = None,
        report: Report | None = None,
        batch: int | Literal["auto"] = "auto",
        *,
        fit: StainSource | None = None,
        counted: npt.NDArray[np.bool_] | None = None,
    ) -> Classification:
        """Classify crops, or the boxes of an image.

        Parameters
        ----------
        images
            A list of crops (H, W, 3 or 4), each with its object in the middle, or one; uint8,
            uint16 or float in [0, 1]. With `boxes`: one image, which is read in parts if it is
            lazy (`SlidePixels`, or a dask array (H, W, 3) of uint8).
        boxes
            `Detections`, or (n, 4) x1, y1, x2, y2 in pixels. Crops are cut so that an object takes
            as much of its crop as in training.
        batch
            Crops at a time; halved where memory does not suffice.
        fit
            Where stains are fitted: "crop" or "image" (then crops without an image are themselves
            their image); None is as in training.
        counted
            (n,) which boxes tell the share of infected cells, see `adapt`; None: all.
        """
        if batch != "auto" and (not isinstance(batch, (int, np.integer)) or batch < 1):
            raise ValueError(
                f'batch must be a whole number of at least 1 or "auto", not {quoted(batch)}.'
            )
        if fit not in (None, "crop", "image"):
            raise ValueError(f'fit must be "crop" or "image", not {quoted(fit)}.')
        fit = fit or self.network.settings.fit
        notes: list[str] = []
        read, count, whole, order = self._crop_reader(images, boxes, notes)
        front = None
        if whole is not None and fit == "image" and self.network.fits_images:
            front = self._fit_image(whole, subprogress(report, 0.0, 0.2))
        rest = report if front is None else subprogress(report, 0.2, 1.0)
        logits = np.empty((count, len(self.classes)))
        logits[order] = self._run(read, count, front, batch, notes, rest)
        scores = self._calibrated(logits)
        if boxes is not None:
            scores = self._count_once(scores, whole, boxes, counted, front, notes)
            scores = self.adapt(scores, counted)
        facts = {
            "model": self.info.get("name", ""),
            "device": describe_device(self.device),
            "crops": count,
            "fit": fit,
            "warnings": self.domain_warnings(read, count),
            "notes": notes,
        }
        report_progress(report, 1, 1, "done")
        return Classification(scores.argmax(1), scores, self.classes, facts)

    def classify_detections(
        self,
        image: Any,
        detections: Detections,
        classes: Sequence[str] | None = None,
        *,
        confidence: float | Mapping[str, float] = 0.0,
        counted: npt.NDArray[np.bool_] | None = None,
        fit: StainSource | None = None,
        batch: int | Literal["auto"] = "auto",
        report: Report | None = None,
    ) -> Detections:
        """Detections of an image with their types as columns, see `Detections.with_types`.

        Boxes of `classes` (None: those that the classifier is meant for) with at least this
        `confidence` are classified; those without area or outside of the image have no type. What
        is to be known on it is in the report, under "classification". The result is above the
        confidence; all candidates stay with it. `counted` (n,), of these, is as for `classify`.
        """
        source = detections if detections.candidates is None else detections.candidates
        chosen = classes_to_classify(self.info, source.names, classes or ()) if len(source) else []
        wanted = np.isin(source.labels, [source.names.index(name) for name in chosen])
        wanted &= source.is_above(confidence)
        shape = image.shape[:2] if _is_lazy(image) else check_rgb(image).shape
        usable = area(clip(source.xyxy, shape)) > 0
        rows = np.flatnonzero(wanted & usable)
        telling = None if counted is None else counted[rows]
        result = self.classify(image, source.xyxy[rows], report, batch, fit=fit, counted=telling)
        name = str(self.info.get("name", ""))
        typed = source.with_types(result.names, result.scores, result.labels, rows, name)
        left = int((wanted & ~usable).sum())
        note = f"{count_of(left, 'box has', 'boxes have')} no area in the image and no type."
        facts = {**result.report, "classes": chosen}
        facts["notes"] = [*facts["notes"], *([note] if left else [])]
        report_now = {**detections.report, **typed.report, "classification": facts}
        return replace(typed, report=report_now).above(confidence)

    def adapt(self, scores: Scores, counted: npt.NDArray[np.bool_] | None = None) -> Scores:
        """Probabilities (n, k) of an image's boxes, for its own share of infected cells.

        Of a classifier that says of what share its probabilities are (`info["prevalence"]`); others
        leave them as they are. `counted` (n,): the boxes that tell the share; None: all.
        """
        healthy = self._healthy
        if healthy is None:
            return scores
        return adapt_to_share(scores, healthy, float(self.info["prevalence"]), counted)[0]

    @property
    def _healthy(self) -> npt.NDArray[np.bool_] | None:
        """(k,) the types without parasites of a classifier that counts infected cells, or None."""
        healthy = np.isin(self.classes, healthy_types(self.classes))
        counts = self.info.get("prevalence") and healthy.any() and not healthy.all()
        return healthy if counts else None

    def _count_once(
        self,
        scores: Scores,
        image: Any,
        boxes: Any,
        counted: npt.NDArray[np.bool_] | None,
        front: StainFit | None,
        notes: list[str],
    ) -> Scores:
        """Probabilities (n, k) of boxes where a parasite that two crops show is that of one cell.

        Cells that may be infected and have another such cell in their crop are looked at a second
        time, with all cells around them painted over; see `count_parasites_once`.
        """
        healthy, fill = self._healthy, self.network.settings.fill
        if healthy is None:
            return scores
        xyxy = check_crop_boxes(getattr(boxes, "xyxy", boxes), image.shape[:2])
        used = np.arange(len(xyxy)) if counted is None else np.flatnonzero(counted)
        doubtful = scores[used][:, ~healthy].sum(1) >= MAY_BE_INFECTED
        near = crop_neighbours(xyxy[used], np.flatnonzero(doubtful), fill)
        pairs = used[near[doubtful[near[:, 1]]]]
        seen, lazy = np.unique(pairs[:, 0]), _is_lazy(image)
        if not len(seen):
            return scores
        seen = seen[reading_order(xyxy[seen])] if lazy else seen
        first, last = np.searchsorted(used[near[:, 0]], (seen, seen + 1))
        cut, size = read_crops if lazy else cut_crops, self.network.settings.input_size

        def read(part: slice) -> Pixels:
            crops = cut(image, xyxy[seen[part]], size, fill)
            for crop, k, a, b in zip(crops, seen[part], first[part], last[part], strict=True):
                crop[:] = hide_neighbours(crop, xyxy[k], xyxy[used[near[a:b, 1]]], fill)
            return self._denoised(crops)

        alone = np.full_like(scores, np.nan)
        alone[seen] = self._calibrated(self._run(read, len(seen), front, "auto", notes, None))
        return count_parasites_once(scores, alone, pairs, healthy)

    def prepare_crops(self, images: Sequence[Any]) -> Pixels:
        """Images that are crops already as the network gets them, (n, size, size, 3) uint8.

        A normalizer is not applied: that is up to who knows the whole image.
        """
        settings = self.network.settings
        crops = [whole_crop(to_rgb8(image), settings.input_size) for image in images]
        if settings.denoise:
            crops = [denoise_crop(crop) for crop in crops]
        size = settings.input_size
        return np.stack(crops) if crops else np.empty((0, size, size, 3), np.uint8)

    def score_crops(
        self, crops: Pixels, front: StainFit | None = None, notes: list[str] | None = None
    ) -> Scores:
        """Calibrated probabilities (n, k) of what `prepare_crops` returns.

        `front`: the stains of the image that they are of; None fits those of each crop. What a
        person should know is added to `notes`.
        """
        read, notes = crops.__getitem__, [] if notes is None else notes
        return self._calibrated(self._run(read, len(crops), front, "auto", notes, None))

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by label."""
        return list(self.info["classes"])

    def decompose(self, rgb: Any, report: Report | None = None) -> Decomposition:
        """The image's stains as the network sees them: K steps from the learned start.

        They are called "Model channel 1" …
        """
        stain = own_stain(self.network, "classifier")
        rgb = rgb if self.network.normalizer is None else self.network.normalize(rgb)
        channels = tuple(channel_name(k) for k in range(stain.components))
        return decompose(rgb, report=report, **self.stain_settings).with_names(channels)

    @property
    def stain_settings(self) -> dict[str, Any]:
        """How the network decomposes stains, as arguments of `decompose`."""
        return decompose_settings(own_stain(self.network, "classifier"))

    def to(self, device: torch.device | str) -> Classifier:
        """The same model on another device."""
        return Classifier(copy_to(self.network, _CPU), self.info, device)

    @property
    def runner(self) -> ClassificationNetwork:
        """A copy of the network for inference, float16 on CUDA; made at the first use."""
        if self._runner is None:
            self._runner = self._make_runner(self.device)
        return self._runner

    def _make_runner(self, device: torch.device) -> ClassificationNetwork:
        network: Any = copy_to(self.network, device).eval().requires_grad_(False)
        runner: ClassificationNetwork = network.to(memory_format=image_layout(device))
        return runner.half() if device.type == "cuda" else runner  # the front end stays float32

    # --- crops -----------------------------------------------------------------------------------

    def _crop_reader(
        self, images: Any, boxes: Any, notes: list[str]
    ) -> tuple[Callable[[slice], Pixels], int, Any, npt.NDArray[np.int64]]:
        """A function that gives crops (m, size, size, 3), their number, the image if any.

        Last, which of the boxes or crops each one is (n,).
        """
        settings = self.network.settings
        size = settings.input_size

        if boxes is not None:
            lazy = _is_lazy(images)
            pixels = self._normalize_image(images, lazy, notes)
            xyxy = check_crop_boxes(getattr(boxes, "xyxy", boxes), pixels.shape[:2])
            order = reading_order(xyxy) if lazy else np.arange(len(xyxy))
            cut = read_crops if lazy else cut_crops
            return (
                lambda part: self._denoised(cut(pixels, xyxy[order[part]], size, settings.fill)),
                len(xyxy),
                pixels,
                order,
            )
        given = _as_list(images)

        def read(part: slice) -> Pixels:
            return self.prepare_crops([self.network.normalize(one, notes) for one in given[part]])

        return read, len(given), None, np.arange(len(given))

    def _denoised(self, crops: Pixels) -> Pixels:
        """Crops (n, size, size, 3) as the network gets them."""
        if not self.network.settings.denoise or not len(crops):
            return crops
        return np.stack([denoise_crop(crop) for crop in crops])

    def _normalize_image(self, image: Any, lazy: bool, notes: list[str]) -> Any:
        """An image that crops are cut of, after the normalizer if there is one."""
        normalizer = self.network.normalizer
        if not lazy:
            return to_rgb8(self.network.normalize(image, notes))
        if normalizer is None:
            return image
        slide = image if isinstance(image, SlidePixels) else SlidePixels([image])
        shown, _, colour_map = slide.normalized(normalizer, slide.palette())
        notes += colour_map.notes
        return shown

    def _fit_image(self, image: Any, report: Report | None) -> StainFit:
        """The stain fit of a whole image, which may be lazy."""
        if hasattr(image, "palette"):
            return fit_palette(self.network, image.palette(report))
        return fit_stain(self.network, np.asarray(image))

    def _run(
        self,
        read: Callable[[slice], Pixels],
        count: int,
        front: StainFit | None,
        batch: int | Literal["auto"],
        notes: list[str],
        report: Report | None,
    ) -> npt.NDArray[np.float64]:
        """Logits (n, k)."""
        requested = BATCH_SIZES.get(self.device.type, _CPU_BATCH) if batch == "auto" else int(batch)
        requested = size = max(min(requested, count), 1)
        device, network = self.device, None
        notes += [note for note in self.notes if note not in notes]
        parts: list[npt.NDArray[np.float64]] = []
        done = 0
        while done < count:
            report_progress(report, done, count, "classifying")
            crops = read(slice(done, done + size))
            try:
                if network is None:
                    network = self.runner if device == self.device else self._make_runner(device)
                parts.append(self._infer(network, device, crops, front))
                done += len(crops)
                continue
            except Exception as error:
                if not is_out_of_memory(error) or (size == 1 and device.type == "cpu"):
                    raise
            # Not in the handler: there the error still holds what the batch has in memory.
            free_memory(device)
            if size > 1:
                size //= 2
            else:
                notes.append(on_cpu_note(device, "a single crop"))
                device, network, size = _CPU, None, min(_CPU_BATCH, requested)
        if size < requested and device == self.device:
            notes.append(f"Memory did not suffice for {requested} crops at a time; {size} did.")
        return np.concatenate([np.empty((0, len(self.classes))), *parts])

    def _infer(
        self,
        network: ClassificationNetwork,
        device: torch.device,
        crops: Pixels,
        front: StainFit | None,
    ) -> npt.NDArray[np.float64]:
        """Logits (m, k) of crops (m, size, size, 3), of a network that is on the device."""
        precise = precise_dtype(device)
        with no_gradients(device):
            if front is not None:
                mixed = front.mix_tiles(network, crops)
            else:
                planes = np.ascontiguousarray(crops.transpose(0, 3, 1, 2))
                mixed = network.apply_front_end(torch.from_numpy(planes).to(device) / 255)
            mixed = mixed.to(memory_format=image_layout(device))
            mixed = mixed.half() if device.type == "cuda" else mixed
            views = network.settings.views
            if views == 1:
                logits = network.forward_mixed(mixed).to(precise)
            else:
                turned = turned_views(mixed, views)
                each = [network.forward_mixed(view).to(precise) for view in turned]
                logits = torch.stack(each).log_softmax(2).logsumexp(0) - math.log(views)
        return np.asarray(logits.cpu().numpy(), np.float64)

    def _calibrated(self, logits: npt.NDArray[np.float64]) -> Scores:
        # Logit adjustment: training is balanced, what is classified need not be.
        logits = logits + np.log(self.info.get("prior") or np.ones(len(self.classes)))
        return _softmax(logits / float(self.info.get("temperature") or 1.0))

    def domain_warnings(self, read: Callable[[slice], Pixels], count: int) -> list[str]:
        """As the detector's; stains of crops are compared with those of training crops."""
        seen = self.info.get("stain_seen")
        if not seen or not count:
            return []
        places = np.unique(np.linspace(0, count - 1, min(count, _SAMPLE_CROPS)).round().astype(int))
        crops = [read(slice(k, k + 1))[0] for k in places]
        summaries = [summarize_stain(self.network.fit_crop(crop), crop) for crop in crops]
        return stain_warnings(seen, mean_stain(summaries))


def adapt_to_share(
    scores: Scores,
    healthy: npt.NDArray[np.bool_],
    expected: float,
    counted: npt.NDArray[np.bool_] | None = None,
) -> tuple[Scores, float]:
    """Probabilities (n, k) for the share of infected cells that is likeliest, and that share.

    `scores` are right where `expected` of all cells are infected, that is, of a class that is not
    `healthy` (k,). The share of the cells `counted` (n,) is found from their own scores, by the EM
    of Saerens, Latinne and Decaestecker (2002), with `expected` counting for twenty cells more.
    Where one cell in eight is infected a faint parasite is likelier than where one in a hundred is.
    """
    infected = np.clip(scores[:, ~healthy].sum(1, dtype=np.float64), 1e-7, 1 - 1e-7)
    likelihood = infected / (1 - infected) * (1 - expected) / expected
    mine = likelihood if counted is None else likelihood[counted]
    share = expected
    for _ in range(_SHARE_STEPS):
        found = (share * mine / (share * mine + 1 - share)).sum()
        before = share
        share = float((found + expected * _EXPECTED_CELLS) / (len(mine) + _EXPECTED_CELLS))
        if abs(share - before) < 1e-9:
            break
    factor = share / (1 - share) * (1 - expected) / expected
    adapted = scores * np.where(healthy, 1.0, factor)
    return np.asarray(adapted / adapted.sum(1, keepdims=True), np.float32), share


def count_parasites_once(
    scores: Scores,
    alone: Scores,
    pairs: npt.NDArray[np.int64],
    healthy: npt.NDArray[np.bool_],
) -> Scores:
    """Probabilities (n, k) of cells, some of which are judged by what they show alone.

    `alone` (n, k) are those of the cells with all others painted over, NaN where nobody looked, and
    `pairs` (p, 2) are i, j where the crop of i shows j. Of two cells, the one that looks less
    infected alone is judged so: what its crop showed besides is the other's.
    """
    infected, left = scores[:, ~healthy].sum(1), alone[:, ~healthy].sum(1)
    i, j = pairs.T
    judged = i[(left[i] < left[j]) & (left[i] < infected[i])]
    result = scores.copy()
    result[judged] = alone[judged]
    return result


# (quarter turns, whether mirrored): any first few of them are as different as can be.
_VIEWS = (
    *((0, False), (1, True), (2, False), (3, True)),
    *((1, False), (0, True), (3, False), (2, True)),
)


def turned_views(images: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Images (N, c, s, s) in the first `count` of eight views; the first is as they are."""
    return [
        (images.flip(3) if mirrored else images).rot90(turns, (2, 3))
        for turns, mirrored in _VIEWS[:count]
    ]


def _is_lazy(image: Any) -> bool:
    """Whether an image is (H, W, 3) uint8 that is not in memory."""
    if isinstance(image, np.ndarray) or getattr(image, "dtype", None) != np.uint8:
        return False
    shape: tuple[int, ...] = getattr(image, "shape", ())
    return len(shape) == 3 and shape[2] == 3


def _as_list(images: Any) -> Sequence[Any]:
    """Crops as a list: of one (H, W, c), of several, or of an array (n, H, W, c)."""
    if isinstance(images, Sequence) and not isinstance(images, (str, bytes)):
        return images
    shape = getattr(images, "shape", ())
    return images if len(shape) == 4 else [images]


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    shifted = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
    return np.asarray(shifted / shifted.sum(1, keepdims=True), np.float32)
