"""The search for the resolution at which an image is shown to the network.

A network knows objects of the sizes it was trained on. The same cell is 50 pixels wide in one
laboratory's images and 150 in another's; at the right working resolution it is as wide as in
training. Size here is √(width · height) of a box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.detection.object_sizes import TrainingSizes

_SIZE_TOLERANCE = math.log(1.3)  # sizes that differ by less than this need no other resolution
_HOME_TOLERANCE = math.log(1.25)  # less, because it is told from another resolution
_CLOSE = math.log(1.15)  # sizes that differ by less than this are the same
CONFIDENT_SCORE = 0.4
"""Score of detections that tell the size of objects."""
_MIN_CONFIDENT = 3  # detections
_MIN_BEST_SCORE = 0.25  # of at least one detection at a scale that is to be chosen
_SIZE_SIGMA = 0.35  # of the bell by which a size of ln ratio x counts in a scale's quality
_PRIOR = 10.0  # detections
_FAR = math.log(1.5)  # from the size that other images have, at which one alone is doubted
_USUAL_OVERLAP = 0.6  # of classes' shares with those of training, at least, where a hint holds
_CLEARLY_BETTER = 1.5  # times the quality at that size, from which on it is believed
_MAX_OTHERS = 0.25  # part of the fields that may be far from the rest, and all are of one size
_SCALE_STEP = 2.0  # between the scales that are tried
_MAX_STEPS = 4  # in which the sizes of objects are followed
# ln of how far objects are from the size of training, by that of how far they are drawn: networks
# draw them nearer to it than they are. Measured in smears of four laboratories.
_BIAS = 1.2
_OBJECT_SIZE_RANGE = (8.0, 800.0)  # image pixels of the typical objects that are tried
MAX_MAGNIFICATION = 32.0
"""Working pixels per image pixel, at most: more shows nothing new, and takes for ever."""
_MIN_VIEW_SIDE = 48  # working pixels of an image's longer side


@dataclass(frozen=True)
class ScaleSample:
    """Detections at one scale in `area` working pixels; sizes (n,) in working pixels.

    `whole`: they are all of the image's, not those of some windows.
    """

    sizes: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    area: float
    whole: bool = False


@dataclass(frozen=True)
class ScaleChoice:
    """A scale (working pixels per image pixel), and in a few words how it was chosen."""

    scale: float
    how: str


def scale_quality(sample: ScaleSample, training: TrainingSizes) -> float:
    """How much of the area is covered by confident detections of sizes and classes like training's.

    Area and not number, because the number of objects that fit into a view grows with its size.
    It counts less the further the shares of the classes are from those of training.
    """
    confident = sample.scores**2 * _agreement(sample, training)
    covered = float((confident * sample.sizes**2).sum() / sample.area)
    return covered * class_overlap(sample, training)


def class_overlap(sample: ScaleSample, training: TrainingSizes) -> float:
    """From 0 to 1, how much of the classes' shares among confident detections is as in training.

    A few detections of a rare class prove little: they are taken together with `_PRIOR` of the
    usual ones. Classes of which nothing is known are left aside.
    """
    if not training.shares.any():
        return 1.0
    labels = sample.labels[sample.scores >= CONFIDENT_SCORE]
    count = np.bincount(labels, minlength=len(training.shares)) * (training.shares > 0)
    shares = (count + _PRIOR * training.shares) / (count.sum() + _PRIOR)
    return float(np.minimum(shares, training.shares).sum())


def size_deviation(
    sample: ScaleSample, training: TrainingSizes, least: int = _MIN_CONFIDENT
) -> float | None:
    """Median of ln(size / its class's size in training), weighted by score; None if too few."""
    confident = sample.scores >= CONFIDENT_SCORE
    deviation, boxes = training.deviation(
        sample.sizes[confident], sample.labels[confident], sample.scores[confident]
    )
    return deviation if boxes >= least else None


def matches_training(sample: ScaleSample, training: TrainingSizes) -> bool:
    """Whether sizes and classes are so much like training's that no other scale need be tried."""
    deviation = size_deviation(sample, training)
    if deviation is None or abs(deviation) > _SIZE_TOLERANCE:
        return False
    confident = sample.scores >= CONFIDENT_SCORE
    return float(_agreement(sample, training)[confident].mean()) > 0.5


def _agreement(sample: ScaleSample, training: TrainingSizes) -> npt.NDArray[np.float64]:
    """(n,) from 0 to 1 for each detection; half for a class of unknown size."""
    with np.errstate(invalid="ignore", divide="ignore"):
        x = np.log(sample.sizes / training.medians[sample.labels])
    bell = np.where(np.isfinite(x), np.exp(-0.5 * (np.nan_to_num(x) / _SIZE_SIGMA) ** 2), 0.5)
    return np.asarray(bell * training.weights[sample.labels])


def candidate_scales(typical: float, shape: tuple[int, int], home: float) -> list[float]:
    """Working pixels per image pixel to try, coarse to fine: `home` times powers of two.

    `home` itself is left out where objects would be too small or too large for it.
    """
    small, large = _OBJECT_SIZE_RANGE
    coarsest, finest = max(typical / large, _MIN_VIEW_SIDE / max(shape)), typical / small
    coarsest, finest = min(coarsest, MAX_MAGNIFICATION), min(finest, MAX_MAGNIFICATION)
    first = math.ceil(math.log(coarsest / home, _SCALE_STEP))
    last = math.floor(math.log(finest / home, _SCALE_STEP))
    return [home * _SCALE_STEP**k for k in range(first, last + 1)]


def search_scale(
    look: Callable[[float, bool], ScaleSample],
    scales: Sequence[float],
    home: float,
    training: TrainingSizes,
    hint: float | None = None,
) -> ScaleChoice | None:
    """The scale at which objects have the sizes of training; None if nothing is sure at any.

    `look(scale, likely)` gives the detections at a scale, in the whole image or a sample of it;
    `likely` says that this is probably the right one. `scales` are tried coarse to fine: a coarse
    look costs little, and from 0.4 to 1.8 times the size of training a network finds objects and
    draws them about as large as they are, which tells the right scale. The first scale that agrees
    with training ends the search; only where none does, all are compared.

    `home` is the scale at which images were shown in training: it is preferred to those that hardly
    differ from it. `hint`, which other images have told, is tried before all others, and is taken
    unless objects are of quite another size or classes there: one image tells its scale less surely
    than many. Even then, a scale at which the image is hardly more like training is not believed.
    """
    samples: dict[float, ScaleSample] = {}
    if hint is not None:
        samples[hint] = look(hint, True)
        deviation = size_deviation(samples[hint], training, least=1)
        near = deviation is not None and abs(deviation) <= _FAR
        if near and class_overlap(samples[hint], training) >= _USUAL_OVERLAP:
            return ScaleChoice(hint, "as found before")

    def follow(scale: float, tolerance: float) -> float | None:
        """From a scale on where the sizes of objects lead, until they agree with training."""
        likely = False
        for _ in range(_MAX_STEPS):
            samples[scale] = look(scale, likely)
            deviation = size_deviation(samples[scale], training)
            if deviation is None:
                return None
            if abs(deviation) <= tolerance and matches_training(samples[scale], training):
                return scale
            drawn = scale * math.exp(-deviation)
            near_home = home in scales and abs(math.log(drawn / home)) <= _HOME_TOLERANCE
            scale = home if near_home else scale * math.exp(-_BIAS * deviation)
            scale = min(scale, MAX_MAGNIFICATION)
            if _is_known(scale, samples):
                return None
            tolerance, likely = _SIZE_TOLERANCE, True
        return None

    def doubtful(scale: float) -> bool:
        """Whether sizes are far from those of the hint without being much more like training."""
        if hint is None:
            return False
        drawn = scale * math.exp(-(size_deviation(samples[scale], training) or 0.0))
        if abs(math.log(drawn / hint)) <= _FAR:
            return False
        # What is rare in training need not be rare among fields of which the size is known.
        alike = TrainingSizes(training.medians, np.zeros_like(training.shares))
        here, there = (
            scale_quality(samples[one], alike) * class_overlap(samples[one], training)
            for one in (scale, hint)
        )
        return here < _CLEARLY_BETTER * there

    for start in scales:
        if _is_known(start, samples):
            continue
        found = follow(start, _SIZE_TOLERANCE if start == home else _CLOSE)
        if found is not None and doubtful(found):
            break
        if found is not None:
            return _choose(found, samples, home, training)
    # An empty image has many doubtful detections at the finest scale, which takes the longest.
    good = [scale for scale in samples if (samples[scale].scores >= _MIN_BEST_SCORE).any()]
    if not good:
        return None
    best = max(good, key=lambda scale: scale_quality(samples[scale], training))
    if hint is not None and (best == hint or doubtful(best)):
        return ScaleChoice(hint, "as found before")
    return ScaleChoice(best, f"best of {len(samples)} resolutions")


def _is_known(scale: float, samples: Mapping[float, ScaleSample]) -> bool:
    return any(abs(math.log(scale / known)) < _CLOSE for known in samples)


def _choose(
    scale: float,
    samples: Mapping[float, ScaleSample],
    home: float,
    training: TrainingSizes,
) -> ScaleChoice:
    """The scale that agrees with training, and how it was found."""
    if scale == home:
        return ScaleChoice(scale, "as in training")
    if not samples[scale].whole:  # which has to be run anyway, so it may as well fit exactly
        scale *= math.exp(-_BIAS * (size_deviation(samples[scale], training) or 0.0))
        scale = min(scale, MAX_MAGNIFICATION)
    return ScaleChoice(scale, f"best of {len(samples)} resolutions")


def pooled_size(fields: Sequence[Detections]) -> float | None:
    """The size of objects in image pixels that fields of one microscope have, to try first.

    By what one model has found in some of them; None where they differ, or where too few detections
    are sure to tell.
    """
    sure = [f for f in fields if (f.scores >= CONFIDENT_SCORE).sum() >= _MIN_CONFIDENT]
    sizes = np.array([s for f in sure if (s := f.report.get("object_size")) is not None])
    if not len(sizes):
        return None
    size = float(np.median(sizes))
    return size if (np.abs(np.log(sizes / size)) > _FAR).mean() <= _MAX_OTHERS else None
