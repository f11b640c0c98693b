"""Open a model file that is opened or dropped in the viewer in the panel “Find cells”."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from napari_beerlanet.ui.common.model_picker import MODEL_SUFFIXES
from napari_beerlanet.ui.common.panel import open_panel

_NO_LAYERS = [(None,)]  # napari's word for a file that was read and has none


def get_reader(path: str | list[str]) -> Callable[[Any], list[Any]] | None:
    """A reader for one model file, None for anything else."""
    one = path if isinstance(path, str) else path[0] if len(path) == 1 else ""
    return _open_in_panel if one.lower().endswith(MODEL_SUFFIXES) else None


def _open_in_panel(path: str | list[str]) -> list[Any]:
    import napari

    viewer = napari.current_viewer()
    if viewer is not None:
        name = path if isinstance(path, str) else path[0]
        open_panel(viewer, "Find cells").choose_model(str(name))
    return _NO_LAYERS
