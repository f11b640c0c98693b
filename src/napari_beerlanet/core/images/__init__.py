"""Colour images: arrays, files, pyramids and whole slides."""

from typing import Literal

Domain = Literal["log", "intensity"]
"""What the solver works on: optical densities (Beer–Lambert), or intensities."""

NonTissue = Literal["glass", "pen", "border"]
"""What of an image shows no tissue."""

PixelSize = tuple[float, float]
"""(y, x) in micrometres."""
