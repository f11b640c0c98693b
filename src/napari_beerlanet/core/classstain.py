"""How dense the stains were in a class's training boxes, and how far a detection is from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

UNLIKE = "unlike training"
"""The column of `Detections` that has `unlike_seen`."""

_FEWEST = 5  # boxes that tell a spread
_FLOOR = 0.005  # optical density: about one grey level of a bright pixel


class Sampled(NamedTuple):
    """A training image (h, w, 3) uint8 and its n boxes: `xyxy` (n, 4) in pixels, `labels` (n,)."""

    pixels: npt.NDArray[np.uint8]
    xyxy: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def describe_densities(
    means: npt.NDArray[Any], labels: npt.NDArray[np.int64], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """By class {"mean": [r], "sd": [r], "count": n} of `means` (n, r), the boxes' mean densities.

    Mean and standard deviation are over the boxes of a class, each counting once however large it
    is. A class with fewer than 5 boxes has no entry.
    """
    told = {}
    for label, name in enumerate(names):
        mine = np.asarray(means, np.float64)[labels == label]
        if len(mine) >= _FEWEST:
            mean, sd = mine.mean(0).round(6).tolist(), mine.std(0).round(6).tolist()
            told[name] = {"mean": mean, "sd": sd, "count": len(mine)}
    return told


def unlike_seen(
    seen: Mapping[str, Mapping[str, Any]],
    means: npt.NDArray[Any],
    labels: npt.NDArray[np.int64],
    names: Sequence[str],
) -> npt.NDArray[np.float32]:
    """(n,) how far `means` (n, r) are from their class in training; NaN if it is not in `seen`.

    It is max over components k of |ODₖ − meanₖ| / max(sdₖ, 0.005): by how many standard deviations
    the stain that differs most is off. `seen` is of `describe_densities`.
    """
    far = np.full(len(labels), np.nan, np.float32)
    for label, name in enumerate(names):
        mine = labels == label
        if name in seen and mine.any():
            mean, sd = (np.array(seen[name][key], np.float64) for key in ("mean", "sd"))
            far[mine] = (np.abs(means[mine] - mean) / np.maximum(sd, _FLOOR)).max(1)
    return far
