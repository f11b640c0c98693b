"""Which model files were used last: offered again at the next start."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import platformdirs

from napari_beerlanet.core.files import atomic_path

_MOST = 8


def _file() -> Path:
    """`NAPARI_BEERLANET_CONFIG` names another folder than the user's own."""
    asked = os.environ.get("NAPARI_BEERLANET_CONFIG")
    folder = Path(asked or platformdirs.user_config_dir("napari-beerlanet", appauthor=False))
    return folder / "models.json"


def recent_models() -> list[Path]:
    """The newest first; also those that are not there now."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    names = content.get("models", []) if isinstance(content, dict) else []
    if not isinstance(names, list):
        return []
    return [Path(name) for name in names if isinstance(name, str)][:_MOST]


def remember_model(path: Path) -> None:
    """Put a file first; a home that cannot be written to just forgets."""
    path = path.resolve()
    others = [other for other in recent_models() if other != path]
    content = {"models": [str(one) for one in [path, *others][:_MOST]]}
    file = _file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as unfinished:
            unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
