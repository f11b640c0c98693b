"""Open whole slides as multiscale RGB layers in micrometres."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Reader = Callable[[Any], list[tuple[Any, dict[str, Any], str]]]


_TIFF_SUFFIXES = (".tif", ".tiff", ".btf", ".tf8")
_MAX_EAGER_PIXELS = 4_000_000  # pixels of an image without coarser levels that is read at once


def get_reader(path: str | os.PathLike[str] | Sequence[str]) -> Reader | None:
    """A function that reads slides, None where napari should ask someone else.

    napari asks the user which plugin shall open a .tif, before it asks us, and may be told to
    remember the answer for all of them. So what is a TIFF and no slide (grey, a stack, channels) is
    given to napari's own reader here, and "always with this plugin" does no harm.
    """
    from napari_beerlanet.core.common.storage import FileError
    from napari_beerlanet.core.images.slide import SLIDE_SUFFIXES, open_slide

    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if not paths or any(Path(one).suffix.lower() not in SLIDE_SUFFIXES for one in paths):
        return None
    if any(Path(one).suffix.lower() in _TIFF_SUFFIXES for one in paths):
        try:
            for one in paths:
                open_slide(one).close()
        except FileError:
            return _napari_reader(path)
    return read_slides


def _napari_reader(path: Any) -> Reader | None:
    """napari's own, which shows the image or says what is wrong."""
    try:
        from napari_builtins.io import napari_get_reader
    except ImportError:
        return None
    made: Reader | None = napari_get_reader(path)
    return made


def read_slides(path: Any) -> list[tuple[Any, dict[str, Any], str]]:
    """A layer for each slide: its data, its settings, its kind."""
    from napari_beerlanet.core.images.slide import open_slide

    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    return [_slide_layer(open_slide(one)) for one in paths]


def _slide_layer(slide: Any) -> tuple[Any, dict[str, Any], str]:
    levels = slide.dask()
    settings: dict[str, Any] = {"name": slide.path.stem, "rgb": True}
    settings["metadata"] = {"path": str(slide.path), "pixel_size_um": slide.pixel_size}
    if slide.pixel_size is not None:
        settings |= {"scale": slide.pixel_size, "units": ("um", "um")}
    if len(levels) > 1:
        return levels, {**settings, "multiscale": True}, "image"
    height, width = levels[0].shape[:2]
    small = height * width <= _MAX_EAGER_PIXELS
    return levels[0].compute() if small else levels[0], settings, "image"
