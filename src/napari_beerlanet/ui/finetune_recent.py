"""Which projects were open last: found again at the next start, and with them their runs."""

from __future__ import annotations

from napari_beerlanet.ui.recent import Recent

_PROJECTS = Recent("projects", "recent.json")
recent_projects, remember_project = _PROJECTS.paths, _PROJECTS.remember
