"""The first click: how long a first decomposition and a first detection take in fresh processes.

    xvfb-run -a -s "-screen 0 1920x1200x24" python benchmarks/cold_start.py [--repeat 1]
        [--cases never nothing second] [--pause 2]

Every number is of a process of its own. `never`: nothing has ever been compiled on the machine, and
the window has it done in a process beside it; `nothing`: the same without that process, as it was
before there was one; `second`: all was compiled by an earlier start. Each case has caches of its
own, numba's and ours, which are empty but in `second`.

In the window, *Stains* (or *Cells*) is opened, `--pause` seconds pass, then *Decompose* (or *Find
cells*) is clicked with the mouse, on the packaged smear of 640 × 480 pixels. "On screen" is when
the layers are there and drawn. Without a window, the breakdown of what a script has to wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

_CASES = {
    "never": "never compiled, with the process that compiles",
    "nothing": "never compiled, without that process",
    "second": "second start",
}
_TIMEOUT_S = 900.0


class Stopwatch:
    """Seconds of each part, in turn."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a part."""
        now = time.perf_counter()
        self.parts[name] = now - self._last
        self._last = now


def breakdown() -> dict[str, float]:
    """Without a window: imports, compiling, and what is left of the first two calls."""
    watch = Stopwatch()
    import torch  # noqa: F401

    watch.lap("import torch")
    import napari_beerlanet as nb
    from napari_beerlanet.core.stains import decompose  # noqa: F401
    from napari_beerlanet.samples import photograph

    image = photograph("Blood smear (BCCD)")
    watch.lap("import the plugin")
    compiled = _compile_timer()
    nb.decompose(image, iterations="converge")
    watch.lap("first decomposition")
    watch.parts["of it, compiling"] = sum(compiled)
    compiled.clear()
    model = nb.load_checkpoint("blood-cells", device="cpu")
    watch.lap("load the model")
    model.detect(image)
    watch.lap("first detection")
    watch.parts["of that, compiling"] = sum(compiled)
    return watch.parts


def _compile_timer() -> list[float]:
    """Seconds of every compilation from now on; of those within another, the outermost's."""
    from numba.core import event

    found: list[float] = []
    began: list[float] = []

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: object) -> None:
            began.append(time.perf_counter())

        def on_end(self, event: object) -> None:
            start = began.pop()
            if not began:
                found.append(time.perf_counter() - start)

    event.register("numba:compile", Listener())
    return found


def window(tab: str, pause: float) -> dict[str, float]:
    """In napari: until the panel is usable, and from the click until the result is drawn."""
    watch = Stopwatch()
    import napari
    from qtpy.QtCore import Qt
    from qtpy.QtTest import QTest
    from qtpy.QtWidgets import QApplication

    from napari_beerlanet.samples import photograph

    viewer = napari.Viewer()
    viewer.window.resize(1280, 720)
    viewer.add_image(photograph("Blood smear (BCCD)"), name="smear")
    application = QApplication.instance()
    assert application is not None

    def wait(until: Any) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while not until():
            application.processEvents()
            time.sleep(0.001)
            if time.monotonic() > end:
                sys.exit("Timed out.")

    end = time.monotonic() + 1.0
    wait(lambda: time.monotonic() > end)
    watch.lap("napari and the image")
    title = {"stains": "Stain decomposition", "cells": "Find cells"}[tab]
    panel: Any = viewer.window.add_plugin_dock_widget("napari-beerlanet", title)[1]
    button = panel.run_button
    wait(lambda: button.isVisible() and button.isEnabled())
    application.processEvents()
    watch.lap("panel usable")
    end = time.monotonic() + pause
    wait(lambda: time.monotonic() > end)
    watch.lap("pause")
    before = len(viewer.layers)
    QTest.mouseClick(button, Qt.MouseButton.LeftButton)
    if tab == "stains":
        wait(lambda: len(viewer.layers) > before and panel.fitted is not None)
    else:
        wait(lambda: len(viewer.layers) > before and not panel.detect_task.running)
    for _ in range(3):
        application.processEvents()
    watch.lap("click to screen")
    os.write(1, json.dumps(watch.parts).encode())
    viewer.close()
    os._exit(0)


def run(case: str, repeat: int, pause: float) -> dict[str, dict[str, float]]:
    """The medians of a case's parts, by what was done."""
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as top:
        filled = Path(top) / "filled"
        if case == "second":
            _compile_all(_environment(case, filled))
        for k in range(repeat):
            for what in ("stains", "cells", "script"):
                if case == "never" and what == "script":
                    continue  # a script has no process beside it
                folder = filled if case == "second" else Path(top) / f"{what}{k}"
                command = [sys.executable, __file__, "--measure", what, "--pause", str(pause)]
                environment = _environment(case, folder)
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
                parts = json.loads(done.stdout.decode().splitlines()[-1])
                results.setdefault(what, []).append(parts)
    return {
        what: {name: median(each[name] for each in parts) for name in parts[0]}
        for what, parts in results.items()
    }


def _environment(case: str, folder: Path) -> dict[str, str]:
    """Caches of its own, and whether a process compiles beside the window."""
    return os.environ | {
        "NUMBA_CACHE_DIR": str(folder / "numba"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "NAPARI_BEERLANET_CONFIG": str(folder / "config"),
        "NAPARI_CONFIG": "",
        "NAPARI_BEERLANET_COMPILE": "0" if case == "nothing" else "1",
    }


def _compile_all(environment: dict[str, str]) -> None:
    """What an earlier start has left."""
    module = "napari_beerlanet.core.detection.compile_kernels"
    also = "napari_beerlanet.ui.viewer.fast_shapes:fast_shapes_supported"
    command = [sys.executable, "-m", module, also]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        if process.wait() != 0:
            sys.exit("Nothing could be compiled.")


def main() -> None:
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=list(_CASES))
    parser.add_argument("--pause", type=float, default=2.0, help="seconds before the click")
    parser.add_argument("--measure", choices=["stains", "cells", "script"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure == "script":
        print(json.dumps(breakdown()))
        return
    if options.measure:
        window(options.measure, options.pause)
    for case in options.cases:
        print(f"\n{_CASES[case]}")
        for what, parts in run(case, options.repeat, options.pause).items():
            print(f"  {what}")
            for name, seconds in parts.items():
                print(f"    {name:28}{seconds:8.2f} s", flush=True)


if __name__ == "__main__":
    main()
