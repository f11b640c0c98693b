"""Noise, placement and outlines from which the synthetic samples are drawn.

Every object is drawn in a window of its own, so the cost of an image grows with its area.
Coordinates: pixel ``(i, j)`` covers ``[i, i + 1) x [j, j + 1)``, so its centre is at one half.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import hypot

import numpy as np
from scipy import ndimage

Rng = np.random.Generator

# The standard deviation of cubic B-spline weights applied to unit noise along two axes.
_SPLINE_STD = 0.479


def noise_tile(rng: Rng, size: float, sigma: float) -> np.ndarray:
    """Periodic smooth noise, (n, n) float32, mean 0, standard deviation 1."""
    n = int(np.clip(size, 32, 1024))
    tile = rng.standard_normal((n, n), dtype=np.float32)
    tile = ndimage.gaussian_filter(tile, min(sigma, n / 8), mode="wrap")
    return (tile - tile.mean()) / tile.std()


def random_crop(tile: np.ndarray, shape: Sequence[int], rng: Rng) -> np.ndarray:
    """A random piece of a periodic tile, of any shape."""
    row, col = rng.integers(len(tile), size=2)
    rows = np.arange(row, row + shape[0]) % len(tile)
    cols = np.arange(col, col + shape[1]) % len(tile)
    return tile[rows[:, None], cols]


def smooth_noise(shape: Sequence[int], rng: Rng, scale: float) -> np.ndarray:
    """Noise that varies over ``scale`` pixels, (H, W) float32, about mean 0 and deviation 1."""
    steps = [int(n / scale) + 4 for n in shape]
    field = rng.standard_normal(steps, dtype=np.float32) / np.float32(_SPLINE_STD)
    for axis, n in enumerate(shape):
        at = np.arange(n) / scale
        cell = at.astype(int)
        t = (at - cell).astype(np.float32)
        weights = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, 3 * t * (1 + t - t**2) + 1, t**3)
        side = (-1, 1) if axis == 0 else (1, -1)
        field = sum(
            np.take(field, cell + k, axis=axis) * (w / 6).reshape(side)
            for k, w in enumerate(weights)
        )
    return field


def smoothstep(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """0 below ``low``, 1 above ``high``, smooth between."""
    t = np.clip((values - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


class DiscScatter:
    """Discs that keep their distance; a grid of buckets makes each test look at neighbours only.

    Parameters
    ----------
    reach : float
        The largest distance at which two discs can be in each other's way, in pixels.
    """

    def __init__(self, reach: float):
        self.reach = reach
        self.discs: list[tuple[float, float, float, float]] = []
        self._buckets: dict[tuple[int, int], list[int]] = defaultdict(list)

    def free(self, y: float, x: float, radius: float, gap: float) -> bool:
        """Is there room for a disc, at ``gap`` (or the neighbour's own gap) times touching?"""
        row, col = int(y // self.reach), int(x // self.reach)
        for key in ((row + i, col + j) for i in (-1, 0, 1) for j in (-1, 0, 1)):
            for y2, x2, r2, gap2 in map(self.discs.__getitem__, self._buckets.get(key, ())):
                if hypot(y - y2, x - x2) < max(gap, gap2) * (radius + r2):
                    return False
        return True

    def add(self, y: float, x: float, radius: float, gap: float = 0.0) -> None:
        """Put a disc down; nothing comes closer to it than its own ``gap`` times touching."""
        self._buckets[int(y // self.reach), int(x // self.reach)].append(len(self.discs))
        self.discs.append((y, x, radius, gap))


def round_randomly(rng: Rng, expected: float) -> int:
    """An integer whose mean is ``expected``."""
    return int(expected + rng.random())


class Canvas:
    """Density planes under construction, and the boxes of what was drawn on them.

    Parameters
    ----------
    shape : (H, W)
    stains : int
        How many dyes, r. ``planes`` is (r, H, W) float32.
    """

    def __init__(self, shape: Sequence[int], stains: int):
        self.shape = tuple(shape)
        self.planes = np.zeros((stains, *self.shape), np.float32)
        self.boxes: list[tuple[int, int, int, int]] = []
        self.labels: list[int] = []

    def window(self, y: float, x: float, half: float) -> tuple[tuple[slice, slice], np.ndarray]:
        """The visible part of a square, and its pixel centres as x + iy from (y, x)."""
        spans = []
        for at, n in zip((y, x), self.shape, strict=True):
            start = int(np.clip(np.floor(at - half), 0, n))
            spans.append(slice(start, int(np.clip(np.ceil(at + half), start, n))))
        rows = np.arange(spans[0].start, spans[0].stop, dtype=np.float32) + np.float32(0.5 - y)
        cols = np.arange(spans[1].start, spans[1].stop, dtype=np.float32) + np.float32(0.5 - x)
        return (spans[0], spans[1]), cols + 1j * rows[:, None]

    def add_box(
        self, spans: tuple[slice, slice], mask: np.ndarray, area: float, label: int
    ) -> None:
        """Record the box of the visible part of an object, unless only a sliver is visible."""
        if mask.sum() < max(0.1 * area, 1):
            return
        rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        top, left = spans[0].start, spans[1].start
        self.boxes.append((left + cols[0], top + rows[0], left + cols[-1] + 1, top + rows[-1] + 1))
        self.labels.append(label)


def random_outline(rng: Rng, amplitudes: Sequence[float], first: int = 2) -> Callable:
    """An outline's radius by direction, 1 + sum of a_k cos(k angle + phase), random in phase.

    The returned function takes x + iy (any shape) and gives the relative radius in its direction.
    """
    sizes = np.asarray(amplitudes) * rng.uniform(0.3, 1, len(amplitudes))
    waves = sizes * np.exp(2j * np.pi * rng.random(len(amplitudes)))

    def radius(z: np.ndarray) -> np.ndarray:
        unit = z / np.maximum(np.abs(z), np.float32(1e-6))
        total, power = np.zeros_like(unit), unit**first
        for wave in waves.astype(np.complex64):
            total += wave * power
            power = power * unit
        return 1 + total.real

    return radius


def coverage(rho: np.ndarray, radius: float) -> np.ndarray:
    """How much of each pixel lies within the outline rho = 1, in [0, 1]."""
    return np.clip((1 - rho) * radius + 0.5, 0, 1)


def disc_union(z: np.ndarray, centres: np.ndarray, radii: np.ndarray) -> np.ndarray:
    """A smooth union of discs, coverage in [0, 1]; near ones grow together by a bridge.

    Parameters
    ----------
    z : (h, w) complex, pixel positions
    centres : (n,) complex
    radii : (n,) float, pixels
    """
    level = sum(np.exp2(-((np.abs(z - c) / r) ** 3)) for c, r in zip(centres, radii, strict=True))
    # On the edge of a lone disc the level falls by 1.04 / r per pixel.
    return np.clip((level - 0.5) * float(np.mean(radii)) / 1.5 + 0.5, 0, 1)
