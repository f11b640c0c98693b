"""What of a slide a fit sees: which level, all of it or a sample, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from napari_beerlanet.core.tissue import Kind

PREVIEW = 12
"""Tiles of 512 × 512 pixels that a preview is fitted on."""


@dataclass(frozen=True)
class SlideChoice:
    """`level` is the one whose colours are counted, 0 the finest; `sampled`: a preview is enough.

    `leave_out`: kinds of what is no tissue that the fit shall not see.
    """

    level: int = 0
    sampled: bool = False
    leave_out: tuple[Kind, ...] = ()

    def arguments(self, sampled: bool) -> dict[str, Any]:
        """For `decompose_slide`: of the whole, or of a sample; what is as usual is left away."""
        given: dict[str, Any] = {}
        if self.level:
            given["level"] = self.level
        if sampled:
            given["sample"] = PREVIEW
        if self.leave_out:
            given["leave_out"] = self.leave_out
        return given


USUAL_CHOICE = SlideChoice()
"""Every pixel of the finest level."""
