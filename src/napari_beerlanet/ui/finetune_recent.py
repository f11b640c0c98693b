"""Which projects were open last: found again at the next start, and with them their runs."""

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
    return folder / "recent.json"


def recent_projects() -> list[Path]:
    """The newest first; also those whose drive is not there now."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    names = content.get("projects", []) if isinstance(content, dict) else []
    return [Path(name) for name in names if isinstance(name, str)][:_MOST]


def remember_project(path: Path) -> None:
    """Put a project first; a home that cannot be written to just forgets."""
    others = [other for other in recent_projects() if other != path]
    content = {"projects": [str(one) for one in [path, *others][:_MOST]]}
    file = _file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as unfinished:
            unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
