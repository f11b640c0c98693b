"""Colour images: arrays, files, pyramids and whole slides."""

from typing import Literal

Domain = Literal["log", "intensity"]
"""What the solver works on: optical densities (Beer–Lambert), or intensities."""

PixelSize = tuple[float, float]
"""(y, x) in micrometres."""
