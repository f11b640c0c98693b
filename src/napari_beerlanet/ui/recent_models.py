"""Which model files were used last: offered again at the next start."""

from __future__ import annotations

from pathlib import Path

from napari_beerlanet.ui.recent import Recent

MODELS = Recent("models", "models.json")
recent_models = MODELS.paths


def remember_model(path: Path) -> None:
    """Put a file first."""
    MODELS.remember(path.resolve())
