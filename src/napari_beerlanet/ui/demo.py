"""The demonstration in the viewer: a sample smear, decomposed, its cells found.

    python -m napari_beerlanet.ui.demo [--pictures DIR]

opens the window and leaves it to the user; with --pictures it saves the window and closes it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import napari
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QApplication

from napari_beerlanet.core.common.storage import atomic_path
from napari_beerlanet.ui.common.panel import open_panel

if TYPE_CHECKING:
    from napari.viewer import Viewer

PLUGIN = "napari-beerlanet"
STAINS, CELLS = "Stain decomposition", "Find cells"
_STEP_TIMEOUT_S = 300.0  # for each of the two steps
_WINDOW_SIZE = (1400, 880)


class Demo:
    """The steps, one after the other, as a person would take them."""

    def __init__(
        self, viewer: Viewer, pictures: Path | None, finished: Callable[[int], None]
    ) -> None:
        self.viewer, self.pictures, self._finished = viewer, pictures, finished
        self._until: Callable[[], bool] = lambda: True
        self._then: Callable[[], None] = lambda: None
        self._step_started = 0.0
        self._timer = QTimer()
        self._timer.setInterval(100)
        self._timer.timeout.connect(self._poll)

    def start(self) -> None:
        """Open the sample and decompose it."""
        self.viewer.open_sample(PLUGIN, "bccd")
        self.stains = self._panel(STAINS)
        self.stains.run()
        self._wait(lambda: self.stains.live.idle and self.stains.fitted is not None, self._cells)

    def _cells(self) -> None:
        self._picture("window-stains.png")
        self.cells = self._panel(CELLS)
        for layer in self.viewer.layers[1:]:
            layer.visible = False
        self.viewer.layers[0].visible = True
        self.cells.run()
        self._wait(lambda: self.cells.result.detection_layer is not None, self._end)

    def _end(self) -> None:
        self._picture("window-cells.png")
        self._finished(0)

    def _panel(self, name: str) -> Any:
        return open_panel(self.viewer, name)

    def _wait(self, until: Callable[[], bool], then: Callable[[], None]) -> None:
        self._until, self._then, self._step_started = until, then, time.monotonic()
        self._timer.start()

    def _poll(self) -> None:
        if self._until():
            self._timer.stop()
            QTimer.singleShot(700, self._then)  # what was added is drawn by then
        elif time.monotonic() - self._step_started > _STEP_TIMEOUT_S:
            self._timer.stop()
            print("The demonstration has timed out; the window stays open.", file=sys.stderr)
            self._finished(1)

    def _picture(self, name: str) -> None:
        if self.pictures is not None:
            self.pictures.mkdir(parents=True, exist_ok=True)
            self.viewer.reset_view()
            QApplication.processEvents()
            with atomic_path(self.pictures / name) as unfinished:
                self.viewer.screenshot(str(unfinished), canvas_only=False, flash=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the demonstration; 0 if it finished."""
    parser = argparse.ArgumentParser(prog="python -m napari_beerlanet.ui.demo")
    parser.add_argument("--pictures", type=Path, help="save the window here and close it")
    options = parser.parse_args(arguments)
    viewer = napari.Viewer(title="napari-beerlanet: demonstration")
    viewer.window.resize(*_WINDOW_SIZE)
    status = [0]

    def finished(code: int) -> None:
        status[0] = code
        if options.pictures is not None:
            viewer.close()
            QApplication.quit()

    demo = Demo(viewer, options.pictures, finished)
    QTimer.singleShot(300, demo.start)
    napari.run()
    return status[0]


if __name__ == "__main__":
    sys.exit(main())
