"""Open whole slides as multiscale RGB layers, and the synthetic samples.

napari imports this module whenever a file is opened, so what is slow to import is imported late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from napari_beerlanet.core.images.slide import Slide
    from napari_beerlanet.samples import LayerData

Reader = Callable[[Any], list[tuple[Any, dict[str, Any], str]]]

_MAX_EAGER_PIXELS = 4_000_000  # pixels of an image without coarser levels that is read at once


def get_reader(path: str | os.PathLike[str] | Sequence[str]) -> Reader | None:
    """A function that reads slides, None where a file is anything else.

    The names of scanners' files are claimed by the manifest. If such a file holds no RGB image,
    napari's own reader is returned, as the user may have told napari to always ask this plugin.
    """
    from napari_beerlanet.core.images.slide import SLIDE_SUFFIXES, is_slide

    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    if paths and all(map(is_slide, paths)):
        return read_slides
    named = paths and all(Path(one).suffix.lower() in SLIDE_SUFFIXES for one in paths)
    return _napari_reader(path) if named else None


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
    from napari_beerlanet.core.common.storage import file_stamp
    from napari_beerlanet.core.images.slide import open_slide

    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    stamps = [file_stamp(Path(one)) for one in paths]  # before: what is opened is this or newer
    return [_slide_layer(open_slide(one), stamp) for one, stamp in zip(paths, stamps, strict=True)]


def _slide_layer(slide: Slide, stamp: dict[str, Any]) -> tuple[Any, dict[str, Any], str]:
    import napari

    from napari_beerlanet.core.common.arrays import load_array
    from napari_beerlanet.ui.viewer.planes import OPENED_KEY, placement_kwargs

    levels = slide.dask()
    settings = placement_kwargs(slide.pixel_size, napari.current_viewer())
    settings["metadata"] = settings.get("metadata", {}) | {"path": str(slide.path)}
    settings["metadata"][OPENED_KEY] = stamp
    settings |= {"name": slide.path.stem, "rgb": True}
    if len(levels) > 1:
        return levels, {**settings, "multiscale": True}, "image"
    height, width = levels[0].shape[:2]
    small = height * width <= _MAX_EAGER_PIXELS
    return load_array(levels[0]) if small else levels[0], settings, "image"


def open_slide_dialog() -> None:
    """File › IO Utilities: choose a slide, or any RGB image, and open it as a pyramid."""
    from napari_beerlanet.ui.common.file_opening import open_chosen_files

    open_chosen_files("Open slide", _FILE_FILTER, read_slides)


_FILE_FILTER = (
    "Slides (*.svs *.ndpi *.scn *.bif *.qptiff *.tif *.tiff *.btf *.tf8 *.mrxs);;All files (*)"
)


# --- synthetic samples ----------------------------------------------------------------------------


def open_synthetic_smear() -> list[LayerData]:
    """A blood smear; its truth is in the layer's metadata."""
    from napari_beerlanet.samples import blood_smear_layers

    return [_place(layer) for layer in blood_smear_layers()]


def open_synthetic_section() -> list[LayerData]:
    """An H&E section; its truth is in the layer's metadata."""
    from napari_beerlanet.samples import he_field_layers

    return [_place(layer) for layer in he_field_layers()]


def _place(layer: LayerData) -> LayerData:
    import napari

    from napari_beerlanet.ui.viewer.planes import PIXEL_SIZE_KEY, placement_kwargs

    data, options, kind = layer
    metadata = options["metadata"]
    placement = placement_kwargs(metadata[PIXEL_SIZE_KEY], napari.current_viewer())
    return data, options | placement | {"metadata": metadata}, kind
