"""What napari calls to open slides: multiscale RGB layers in micrometres."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Reader = Callable[[Any], list[tuple[Any, dict[str, Any], str]]]


def get_reader(path: str | os.PathLike[str] | Sequence[str]) -> Reader | None:
    """A function that reads slides, None where napari should ask someone else.

    Decided by the name and the first bytes; a stack or a grey image is left to others.
    """
    from napari_beerlanet.core.files import FileError
    from napari_beerlanet.core.slides import SLIDES, open_slide

    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths or any(Path(one).suffix.lower() not in SLIDES for one in paths):
        return None
    if any(Path(one).suffix.lower() in (".tif", ".tiff", ".btf", ".tf8") for one in paths):
        try:
            for one in paths:
                open_slide(one).close()
        except FileError:
            return None  # napari's own reader may show it, or says what is wrong
    return read_slides


def read_slides(path: Any) -> list[tuple[Any, dict[str, Any], str]]:
    """A layer for each slide: its data, its settings, its kind."""
    from napari_beerlanet.core.slides import open_slide

    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    return [_layer(open_slide(one)) for one in paths]


def _layer(slide: Any) -> tuple[Any, dict[str, Any], str]:
    levels = slide.dask()
    settings: dict[str, Any] = {"name": slide.path.stem, "rgb": True}
    settings["metadata"] = {"path": str(slide.path), "pixel_size_um": slide.pixel_size}
    if slide.pixel_size is not None:
        settings |= {"scale": slide.pixel_size, "units": ("um", "um")}
    if len(levels) > 1:
        return levels, {**settings, "multiscale": True}, "image"
    return levels[0], settings, "image"
