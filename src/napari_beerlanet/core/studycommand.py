"""A study as a file of settings and as a command: to go on with it, or to run it elsewhere."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .manifest import write_json
from .studysettings import StudySettings

CONFIG = "study.json"
"""Its name in the folder of results."""

_SWITCHES = {
    "decompose": "--no-stains",
    "measure": "--no-measures",
    "reports": "--no-reports",
    "skip_glass": "--all-tiles",
    "previews": "--no-previews",
}


@dataclass(frozen=True)
class StudyOrder:
    """All that `run_study` is told. `images`: files, folders or patterns."""

    images: tuple[str, ...]
    out: Path
    settings: StudySettings = field(default_factory=StudySettings)
    workers: int = 1
    scheduler: str | None = None
    recursive: bool = False

    def config(self) -> dict[str, Any]:
        """As a file of settings has it; what is as always is left out."""
        where: dict[str, Any] = {"images": [os.path.abspath(one) for one in self.images]}
        where |= {"out": os.path.abspath(self.out), "workers": self.workers}
        where |= {"scheduler": self.scheduler} if self.scheduler else {}
        where |= {"recursive": True} if self.recursive else {}
        how: dict[str, Any] = json.loads(json.dumps(_changed(self.settings)))
        return where | how

    def write(self) -> Path:
        """Write the file of settings into the folder of results, which is made; its path."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / CONFIG, self.config())
        return self.out / CONFIG

    def command(self) -> str:
        """What to type for the same; spectra to start from need the file of settings."""
        words = ["napari-beerlanet", "batch"]
        if self.settings.spectra is not None:
            return _joined([*words, str(self.out / CONFIG)])
        words += [*self.images, "--out", str(self.out)]
        words += ["--recursive"] if self.recursive else []
        if self.scheduler:
            words += ["--scheduler", self.scheduler]
        elif self.workers != 1:
            words += ["--workers", str(self.workers)]
        for name, value in _changed(self.settings).items():
            words += _option(name, value)
        return _joined(words)


def _changed(settings: StudySettings) -> dict[str, Any]:
    usual = asdict(StudySettings())
    told = {name: value for name, value in asdict(settings).items() if value != usual[name]}
    told.pop("model_sha256", None)
    return told


def _option(name: str, value: Any) -> list[str]:
    if name in _SWITCHES:
        return [_SWITCHES[name]]
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, tuple):
        return [option, *map(str, value)]
    # Joined, as a value such as 1e-05 or -x would else be taken for an option.
    return [f"{option}={value}"] if str(value).startswith("-") else [option, str(value)]


def _joined(words: list[str]) -> str:
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
