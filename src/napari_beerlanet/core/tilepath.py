"""Where the detections of a slide's tiles are kept."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SUFFIX = ".tiles"
"""What the name of such a file ends in."""


def log_path(source: Path) -> Path:
    """Where to keep a slide's tiles: beside it, or in the user's cache if that cannot be written.

    A file that is there already is gone on with, wherever it is.
    """
    from platformdirs import user_cache_path

    beside = source.with_name(source.name + SUFFIX)
    digest = hashlib.sha256(os.path.abspath(source).encode("utf-8", "surrogateescape"))
    cache = user_cache_path("napari-beerlanet") / "tiles"
    cached = cache / f"{source.name}-{digest.hexdigest()[:12]}{SUFFIX}"
    if beside.exists() or cached.exists():
        return beside if beside.exists() else cached
    if os.access(source.parent, os.W_OK):
        return beside
    cache.mkdir(parents=True, exist_ok=True)
    return cached
