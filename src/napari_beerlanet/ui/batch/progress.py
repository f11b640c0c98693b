"""A running batch: its background process, progress and ETA, failures and the output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from napari_beerlanet.core.batch.settings import STUDY_FILE, StudyConfig
from napari_beerlanet.ui.common.background_process import (
    EVENTS_FILE,
    CommandProcess,
    ProcessView,
    RunWording,
)
from napari_beerlanet.ui.common.controls import button, row
from napari_beerlanet.ui.common.recent import RecentPaths

RECENT_BATCHES = RecentPaths("batches", "batches.json")
"""Output folders."""


class BatchProcess(CommandProcess):
    """The study that the study.json of an output folder describes."""

    wording = RunWording("batch", "run it again", "the last finished image", "image", "images")

    def command(self) -> list[str]:
        """All that it needs is in the file."""
        return ["batch", str(self.folder / STUDY_FILE)]


def prepare_study_folder(config: StudyConfig) -> Path:
    """Write the study file; the folder that a `BatchProcess` can then start in."""
    config.write()
    (config.out / EVENTS_FILE).write_bytes(b"")
    RECENT_BATCHES.add(config.out)
    return config.out


class BatchProgress(ProcessView):
    """Shows one `BatchProcess` at a time; hidden until there was one."""

    def __init__(self) -> None:
        super().__init__(BatchProcess.wording)
        self.open = button("Open output folder", "Show it in the file manager.", self.open_folder)
        self.body.addWidget(row(self.open))
        self.hide()

    def follow(self, process: CommandProcess) -> None:
        """Show a run from now on."""
        super().follow(process)
        self.show()

    def failure_texts(self, event: dict[str, Any]) -> tuple[str, str]:
        """The image by its name, in the tooltip by its path."""
        path, error = str(event.get("path")), str(event.get("error"))
        text = error if path in error else f"{path}: {error}"
        return text.replace(path, Path(path).name), text
