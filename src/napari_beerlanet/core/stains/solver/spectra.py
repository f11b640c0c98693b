"""Default start spectra, and validation of the solver's settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.stains.solver import MAX_COMPONENTS

_DYES = {
    "haematoxylin": (0.65, 0.70, 0.29),
    "eosin": (0.07, 0.99, 0.11),
    "DAB": (0.27, 0.57, 0.78),
    "methylene blue": (0.83, 0.51, 0.20),
    "grey": (1.0, 1.0, 1.0),
    "red absorber": (0.98, 0.14, 0.13),
    "blue absorber": (0.12, 0.20, 0.97),
}


def default_spectra(components: int, channels: int = 3) -> npt.NDArray[np.float64]:
    """The start S_init (channels, components) that is used where none is given; unit columns.

    For RGB these are haematoxylin, eosin, DAB, methylene blue, grey, a red and a blue absorber,
    then directions that fill the nonnegative octant evenly (a golden-ratio sequence). For other
    channel counts they are drawn from that orthant with a fixed seed.
    """
    if channels != 3:
        columns = np.abs(np.random.default_rng(0).normal(size=(components, channels)))
    else:
        k = np.arange(max(components - len(_DYES), 0))[:, None]
        plastic = 1.32471795724474602596  # its powers give the evenest sequence in two dimensions
        height, turn = np.modf(0.5 + k * np.array([plastic**-1, plastic**-2]))[0].T
        radius = np.sqrt(1 - height**2)
        filling = (radius * np.cos(turn * np.pi / 2), radius * np.sin(turn * np.pi / 2), height)
        columns = np.vstack([list(_DYES.values()), np.stack(filling, 1)])[:components]
    unit: npt.NDArray[np.float64] = columns / np.linalg.norm(columns, axis=1, keepdims=True)
    return unit.T


def check_spectra(
    spectra: npt.ArrayLike | None, components: int, channels: int = 3
) -> npt.NDArray[np.float64]:
    """S_init (channels, r) as float64, or a `ValueError` of one sentence."""
    _check_positive_integer(components, "components")
    if components > MAX_COMPONENTS:
        raise ValueError(f"components must be at most {MAX_COMPONENTS}, not {components!r:.80}.")
    if spectra is None:
        return default_spectra(int(components), channels)
    try:
        start = np.asarray(spectra, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"spectra must be numbers, not {spectra!r:.60}.") from None
    if start.ndim != 2 or start.shape[0] != channels or start.shape[1] < 1:
        raise ValueError(
            f"spectra must have shape ({channels}, components), one column each, not {start.shape}."
        )
    if start.shape[1] > MAX_COMPONENTS:
        raise ValueError(f"spectra must have at most {MAX_COMPONENTS} columns, not {start.shape}.")
    if not np.isfinite(start).all() or (start < 0).any():
        raise ValueError("spectra must be finite and nonnegative.")
    return start


def check_solver_settings(
    iterations: Any, domain: str, method: str, reference_pixels: float | None
) -> None:
    """Settings that decompose and BeerLaNet share, or a `ValueError` of one sentence."""
    _check_positive_integer(iterations, "iterations")
    if domain not in ("log", "intensity"):
        raise ValueError(f'domain must be "log" or "intensity", not {quoted(domain)}.')
    if method not in ("auto", "palette", "dense"):
        raise ValueError(f'method must be "auto", "palette" or "dense", not {quoted(method)}.')
    if reference_pixels is not None and check_number(reference_pixels, "reference_pixels") == 0:
        raise ValueError("reference_pixels must be positive or None, not 0.")


def check_number(value: Any, name: str, maximum: float = math.inf) -> float:
    """A number from 0 to `most`, or a `ValueError` of one sentence."""
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not (number and 0 <= value <= maximum and value < math.inf):
        upper = "" if maximum == math.inf else f" and at most {maximum:g}"
        raise ValueError(f"{name} must be a number of at least 0{upper}, not {quoted(value)}.")
    return float(value)


def _check_positive_integer(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {quoted(value)}.")
