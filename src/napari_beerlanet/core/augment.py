"""Other laboratories, rendered from one: stain, light and focus of training images are varied.

By Beer and Lambert I = exp(x₀ − S D). With S three known dyes, D is S⁻¹ (x₀ − ln I), and the same
cells under other dyes S', other strengths a and other light x₀' are I' = exp(x₀' − S' (a ⊙ D)).
That is one 3 × 3 matrix on optical densities, and boxes stay where they are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .spectra import default_spectra
from .yolo import cv2

_PADDING = 114
_SAMPLE = 7  # every seventh pixel tells the background light
_LOG = np.log(np.maximum(np.arange(256), 1) / 255).astype(np.float32)


@dataclass
class StainJitter:
    """An Ultralytics transform: labels["img"] (H, W, 3) uint8 BGR to the same under another stain.

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
    share
        How many images are changed at all.
    """

    dyes: float = 0.12
    strength: float = 0.5
    light: tuple[float, float] = (0.5, 1.0)
    cast: float = 0.12
    focus: float = 1.0
    share: float = 0.9

    def __call__(self, labels: dict[str, Any]) -> dict[str, Any]:
        """Change labels["img"]; padding keeps its grey."""
        if random.random() < self.share:
            image = labels["img"]
            blank = (image == _PADDING).all(2)
            changed = self._refocus(self._restain(image, blank))
            changed[blank] = _PADDING
            labels["img"] = changed
        return labels

    def _restain(
        self, image: npt.NDArray[np.uint8], blank: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.uint8]:
        X = _LOG[image]
        seen = X[::_SAMPLE, ::_SAMPLE][~blank[::_SAMPLE, ::_SAMPLE]]
        if not len(seen):
            return image.copy()
        x0 = np.percentile(seen, 95, axis=0).astype(np.float32)
        M, x1 = self._matrix(), self._light()
        np.subtract(x0, X, out=X)
        lit = np.exp(x1 - np.asarray(cv2.transform(X, M.astype(np.float32))))
        return np.asarray(np.rint(np.clip(lit * 255, 0, 255)), dtype=np.uint8)

    def _matrix(self) -> npt.NDArray[np.float64]:
        """S' diag(a) S⁻¹ (3, 3) in BGR."""
        S = default_spectra(3)[::-1]
        other = np.abs(S + [[random.gauss(0, self.dyes) for _ in range(3)] for _ in range(3)])
        other /= np.linalg.norm(other, axis=0)
        common = random.gauss(0, self.strength)
        a = np.exp([common + random.gauss(0, self.strength / 2) for _ in range(3)])
        return np.asarray((other * a) @ np.linalg.inv(S))

    def _light(self) -> npt.NDArray[np.float32]:
        level = math.log(random.uniform(*self.light))
        x1 = np.array([level + random.gauss(0, self.cast) for _ in range(3)])
        return np.asarray(np.minimum(x1, 0), dtype=np.float32)

    def _refocus(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        amount = random.uniform(-1, 1) * self.focus
        if abs(amount) < 0.2:
            return image
        blurred = cv2.GaussianBlur(image, (0, 0), abs(amount))
        if amount > 0:
            return np.asarray(blurred)
        return np.asarray(cv2.addWeighted(image, 2.0, blurred, -1.0, 0))
