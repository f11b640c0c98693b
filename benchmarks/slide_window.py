"""A slide in a real window: how soon stains come, how long the window does not answer, panning.

`python benchmarks/slide_window.py --side 20480` writes a synthetic smear as a zarr pyramid once to
a cache folder, opens it in napari and prints figures: by the clock, and in processor time of the
process or of the window's thread, which other programs disturb less. `--normalized vahadane` pans
over the slide and over its normalized version in turns instead. Without a display, run it under
`xvfb-run -a -s "-screen 0 1400x900x24"`.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr

FIELD = 2048
SCALE = 0.25  # micrometres of a pixel


def make_pyramid(path: Path, side: int) -> None:
    """Fields of blood cells with noise of their own in the middle, glass about them."""
    from napari_beerlanet.samples import blood_smear

    unfinished = path.with_suffix(".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    group, levels = zarr.create_group(unfinished), []
    while side >> len(levels) >= 640:
        n = side >> len(levels)
        name, shape = str(len(levels)), (n, n, 3)
        levels.append(group.create_array(name, shape=shape, chunks=(512, 512, 3), dtype=np.uint8))
    fields = [blood_smear((FIELD, FIELD), seed=seed).image for seed in range(3)]
    rng, count = np.random.default_rng(0), side // FIELD
    for row, column in np.ndindex(count, count):
        far = np.hypot(row - (count - 1) / 2, column - (count - 1) / 2)
        glass = np.full((FIELD, FIELD, 3), 243, np.uint8)
        field = rng.choice(fields) if far < 0.38 * count else glass
        noise = rng.integers(-2, 3, field.shape, np.int8)
        tile = np.clip(field.astype(np.int16) + noise, 0, 255).astype(np.uint8)
        for k, level in enumerate(levels):
            s = FIELD >> k
            small = tile.reshape(s, 1 << k, s, 1 << k, 3).mean((1, 3)).astype(np.uint8)
            level[row * s : (row + 1) * s, column * s : (column + 1) * s] = small
    unfinished.rename(path)


class Window:
    """A viewer that is watched: the longest time between two ticks of a timer, clock and thread."""

    def __init__(self) -> None:
        import napari
        from qtpy.QtCore import QTimer

        self.viewer = napari.Viewer(show=True)
        self.viewer.window.resize(1380, 860)
        self._timer = QTimer()
        self._timer.setInterval(10)
        self._timer.timeout.connect(self._tick)
        self._timer.start()
        self.begin()

    def begin(self) -> None:
        self._max_size = self._busiest = 0.0
        self._last = time.perf_counter(), time.thread_time()

    def _tick(self) -> None:
        clock, busy = time.perf_counter(), time.thread_time()
        self._max_size = max(self._max_size, clock - self._last[0])
        self._busiest = max(self._busiest, busy - self._last[1])
        self._last = clock, busy

    def say(self, what: str) -> None:
        longest, busiest = 1e3 * self._max_size, 1e3 * self._busiest
        print(f"{what}: longest stall {longest:.0f} ms, {busiest:.0f} ms of processor time")
        self.begin()

    def until(self, condition: Callable[[], bool], patience: float = 900) -> None:
        from qtpy.QtWidgets import QApplication

        ends = time.monotonic() + patience
        while not condition():
            QApplication.processEvents()
            time.sleep(0.005)
            if time.monotonic() > ends:
                raise SystemExit("took too long")

    def wait(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > ends)

    def pan(self, what: str) -> None:
        took = 1e3 * self.steps(12)[:, 0]
        print(
            f"a step of panning, {what}: median {np.median(took):.0f} ms, most {max(took):.0f} ms"
        )

    def steps(self, count: int, forth: float = 1.0) -> np.ndarray:
        """(count, 2) seconds of each step of panning: of the window's thread, of all threads."""
        took = []
        for _ in range(count):
            before, camera = (time.thread_time(), time.process_time()), self.viewer.camera
            camera.center = tuple(np.array(camera.center) + forth * np.array([0, 30, 40]) * SCALE)
            self.wait(0.05)
            took.append((time.thread_time() - before[0], time.process_time() - before[1]))
        return np.array(took)


def stains(window: Window, layer: Any) -> None:
    from napari_beerlanet.ui.stains.widget import DecomposeWidget

    panel = DecomposeWidget(window.viewer)
    window.viewer.window.add_dock_widget(panel)
    window.wait(1)
    window.begin()
    clock, busy = time.perf_counter(), time.process_time()

    def took(what: str) -> None:
        seconds, processor = time.perf_counter() - clock, time.process_time() - busy
        print(f"{what} after {seconds:.1f} s, {processor:.1f} s of processor time")

    panel.run()
    window.until(lambda: panel.fitted is not None)
    took("preview")
    window.until(lambda: panel.layers.complete)
    window.say("preview")
    window.until(lambda: panel.live.idle and panel.layers.complete)
    took(panel.bar.text)
    window.say("all of it")
    panel.form.blending_buttons.buttons()[1].click()
    window.viewer.camera.zoom *= 6
    window.wait(1)
    window.pan("all stains over each other")
    panel.form.blending_buttons.buttons()[0].click()
    window.wait(1)
    window.pan("one stain over the slide")
    for made in panel.layers.layers.values():
        made.visible = False
    layer.visible = True
    window.wait(1)
    window.pan("the slide alone")
    window.viewer.window.remove_dock_widget(panel)


def normalized(window: Window, layer: Any, method: str) -> None:
    """The slide and its normalized version in turns, over the same fields, there and back."""
    from napari_beerlanet.ui.normalize.widget import CompareWidget

    panel = CompareWidget(window.viewer)
    window.viewer.window.add_dock_widget(panel)
    window.wait(1)
    for name, box in panel.methods.boxes.items():
        box.setChecked(name == method)
    panel.side_by_side.setChecked(False)
    window.begin()
    clock, busy = time.perf_counter(), time.process_time()
    panel.run_button.click()
    window.until(lambda: panel.comparison is not None and not panel.adding)
    seconds, processor = time.perf_counter() - clock, time.process_time() - busy
    print(f"{method}: layer after {seconds:.1f} s, {processor:.1f} s of processor time")
    window.say("normalizing")
    made = panel.layers.of(layer)[method]
    window.viewer.camera.zoom *= 6
    taken: dict[str, list[np.ndarray]] = {"slide": [], method: []}
    for turn in range(5):
        for name, shown in (("slide", layer), (method, made)):
            for one in (layer, made):
                one.visible = one is shown
            window.wait(1)
            found = window.steps(12, 1.0 if turn % 2 == 0 else -1.0)
            window.steps(12, -1.0 if turn % 2 == 0 else 1.0)  # both from the same place
            if turn:  # the first compiles, and fills caches
                taken[name].append(found)
    print("\n| a step of panning, ms | window: median | most | all threads: median | most |")
    print("|---|---:|---:|---:|---:|")
    for name, found in taken.items():
        times = 1e3 * np.concatenate(found)
        cells = [f"{f(column):.0f}" for column in times.T for f in (np.median, np.max)]
        print(f"| {name} | {' | '.join(cells)} |")
    window.viewer.window.remove_dock_widget(panel)


def search(window: Window, tiles: int) -> None:
    from napari_beerlanet.ui.detect.widget import DetectWidget

    panel = DetectWidget(window.viewer)
    window.viewer.window.add_dock_widget(panel)
    window.until(lambda: not panel.model.task.running)
    panel.form.size_auto.value = False
    panel.form.cell_size.value = 60
    window.begin()
    panel.run()
    window.until(
        lambda: (
            not panel.detect_task.running or panel.slide.remaining <= panel.slide.total - tiles > 0
        )
    )
    print(
        panel.progress_bar.bar.format(),
        panel.counts.class_counts.counts if panel.counts.class_counts else "",
    )
    window.say(f"a search, {tiles} tiles")
    panel.detect_task.cancel()
    window.until(lambda: not panel.detect_task.running)
    print(panel.progress_bar.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=20_480, help="pixels, a multiple of 2048")
    parser.add_argument("--tiles", type=int, default=6, help="of the search that is watched")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "beerlanet")
    parser.add_argument("--normalized", metavar="METHOD", help="only compare panning with this one")
    asked = parser.parse_args()
    asked.cache.mkdir(parents=True, exist_ok=True)
    path = asked.cache / f"smear-{asked.side}.zarr"
    if not path.exists():
        make_pyramid(path, asked.side)
    group = zarr.open_group(path, mode="r")
    levels = [group[name] for name in sorted(group.array_keys())]
    window = Window()
    place = {"scale": (SCALE, SCALE), "units": ("um", "um")}
    layer = window.viewer.add_image(levels, rgb=True, multiscale=True, name="slide", **place)
    window.wait(1)
    if asked.normalized:
        normalized(window, layer, asked.normalized)
    else:
        stains(window, layer)
        search(window, asked.tiles)
    window.viewer.close()


if __name__ == "__main__":
    main()
