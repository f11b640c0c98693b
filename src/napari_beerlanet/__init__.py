"""See the stains of a microscope image apart, and find its cells.

The public names below load when they are first used, so ``import napari_beerlanet`` itself pulls
in neither torch nor numba nor Qt.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from napari_beerlanet.core.decompose import Decomposition, decompose
    from napari_beerlanet.core.layer import BeerLaNet
    from napari_beerlanet.core.palette import Palette

__version__ = "0.1.0"

__all__ = ["BeerLaNet", "Decomposition", "Palette", "__version__", "decompose"]

_HOME = {
    "BeerLaNet": "core.layer",
    "Decomposition": "core.decompose",
    "Palette": "core.palette",
    "decompose": "core.decompose",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
