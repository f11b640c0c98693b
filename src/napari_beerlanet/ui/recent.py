"""Which files and folders were used last: offered again at the next start."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import platformdirs

from napari_beerlanet.core.files import atomic_path

_MOST = 8


class Recent:
    """Paths of one kind in a file of the user's settings; `NAPARI_BEERLANET_CONFIG` moves it."""

    def __init__(self, kind: str, file: str) -> None:
        self._kind, self._name = kind, file

    @property
    def file(self) -> Path:
        """Where they are kept."""
        asked = os.environ.get("NAPARI_BEERLANET_CONFIG")
        folder = Path(asked or platformdirs.user_config_dir("napari-beerlanet", appauthor=False))
        return folder / self._name

    def paths(self) -> list[Path]:
        """The newest first; also those that are not there now."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        names = content.get(self._kind, []) if isinstance(content, dict) else []
        if not isinstance(names, list):
            return []
        return [Path(name) for name in names if isinstance(name, str)][:_MOST]

    def remember(self, path: Path) -> None:
        """Put a path first; a home that cannot be written to just forgets."""
        others = [other for other in self.paths() if other != path]
        content = {self._kind: [str(one) for one in [path, *others][:_MOST]]}
        file = self.file
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(file) as unfinished:
                unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
