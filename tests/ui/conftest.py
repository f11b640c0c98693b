"""What the panels' tests share: a window or a reason to skip, pictures, and patience."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from npe2 import PluginManifest
from qtpy.QtCore import Qt, QTimer
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication, QWidget

from napari_beerlanet.samples import blood_smear

_NO_KEY = Qt.KeyboardModifier.NoModifier


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """napari's canvas needs OpenGL, which Qt's offscreen platform has not."""
    if os.environ.get("QT_QPA_PLATFORM") != "offscreen":
        return
    skip = pytest.mark.skip(reason="needs a display: run under xvfb-run")
    for item in items:
        if "window" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def compiler_before_the_canvas() -> None:
    """Software OpenGL and triton each bring an LLVM; triton loaded second crashes the process.

    A test that trains in a worker that has shown a window would load it second.
    """
    with suppress(ImportError):
        import triton  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def plugins_discovered_once() -> Iterator[None]:
    """Manifests of plugins are read once, not for every viewer that napari's fixture makes."""
    discover, found = PluginManifest.discover, []

    def remembered(paths: Sequence[str] = ()) -> Iterator[Any]:
        if paths:
            yield from discover(paths)
            return
        if not found:
            found.extend(discover())
        for result in found:
            manifest = result.manifest and result.manifest.model_copy(deep=True)
            yield result._replace(manifest=manifest)

    PluginManifest.discover = remembered
    yield
    PluginManifest.discover = discover


@pytest.fixture(scope="session", autouse=True)
def quick_collections_at_every_layer() -> None:
    """napari looks for garbage among all objects whenever a layer comes or goes, for some drivers.

    Here among the young ones; among all when a test has ended, see `shared_viewers.py`.
    """
    from napari._vispy import canvas

    canvas.gc = SimpleNamespace(collect=lambda: gc.collect(1))


@pytest.fixture(autouse=True)
def ultralytics_of_its_own(tmp_path, monkeypatch):
    """Settings of Ultralytics, and ours, in a folder of the test."""
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "yolo"))
    monkeypatch.setenv("NAPARI_BEERLANET_CONFIG", str(tmp_path / "settings"))


@pytest.fixture(autouse=True)
def keys_released() -> Iterator[None]:
    """For Qt, a key that was held in a test's last click is held until the next event.

    A file that the next test drops would be opened as with that key.
    """
    yield
    if QApplication.instance() and QApplication.keyboardModifiers() != _NO_KEY:
        QTest.keyRelease(QWidget(), Qt.Key.Key_Shift)
        assert QApplication.keyboardModifiers() == _NO_KEY


@pytest.fixture(scope="session")
def smear() -> np.ndarray:
    """(240, 320, 3) uint8: some cells."""
    return blood_smear((240, 320), cell_diameter=50).image


@pytest.fixture
def until(qtbot) -> Callable[[Callable[[], bool]], None]:
    """Run the event loop until something is true; a busy machine gets time."""

    def wait(condition: Callable[[], bool], timeout: int = 600_000) -> None:
        qtbot.waitUntil(condition, timeout=timeout)

    return wait


class Stalls:
    """A 10 ms timer: how often the GUI answered, and the largest gap, how long it did not.

    Assert `answers`, which a call that blocks keeps at none. The gap is for people to read: where
    others work on the machine, it tells more about them.
    """

    def __init__(self) -> None:
        self.longest, self.answers = 0.0, 0
        self._last = time.perf_counter()
        self._timer = QTimer()
        self._timer.setInterval(10)
        self._timer.timeout.connect(self._tick)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.longest, self._last = max(self.longest, now - self._last), now
        self.answers += 1

    @contextmanager
    def watched(self):
        self.longest, self.answers, self._last = 0.0, 0, time.perf_counter()
        self._timer.start()
        yield self
        self._timer.stop()
        self.longest = max(self.longest, time.perf_counter() - self._last)


@pytest.fixture
def stalls(qtbot) -> Stalls:
    """`with stalls.watched(): …` then `stalls.answers`, and `stalls.longest` in seconds."""
    return Stalls()


@pytest.fixture(scope="session")
def _shared_viewers() -> Iterator[Any]:
    """The viewers of this process that tests take turns with."""
    from shared_viewers import SharedViewers

    viewers = SharedViewers()
    yield viewers
    viewers.close()


@pytest.fixture
def shared_viewer(request, qtbot, _shared_viewers) -> Iterator[Callable[..., Any]]:
    """As `make_napari_viewer`, with viewers that the tests of a process take turns with.

    Each is as new, and the test that leaves something in it fails: see `shared_viewers.py`. A test
    of how viewers are made and closed has `make_napari_viewer`.
    """
    from shared_viewers import reset_settings

    reset_settings()

    def take(show: bool = False) -> Any:
        viewer = _shared_viewers.take(show)
        if show:
            qtbot.wait_exposed(viewer.window._qt_window, timeout=600_000)
        return viewer

    yield take
    passed = getattr(getattr(request.node, "rep_call", None), "passed", False)
    problems = _shared_viewers.give_back(check=passed)
    assert not problems, "\n".join(problems)


@pytest.fixture
def _no_shared_viewers(_shared_viewers) -> None:
    _shared_viewers.close()


@pytest.fixture
def make_napari_viewer(_no_shared_viewers, make_napari_viewer) -> Callable[..., Any]:
    """napari's own, in a process without any other viewer."""
    return make_napari_viewer


@pytest.fixture
def open_review(shared_viewer, until):
    """Open the review panel on detections of one picture; every call is another day."""
    from reviews import open_panel

    return lambda *args, **options: open_panel(shared_viewer(), until, *args, **options)


@pytest.fixture
def compared_review(open_review, until):
    """The review panel with its detections compared with annotations that differ in five boxes."""
    from reviews import annotate, some

    viewer, panel, detection_layer = open_review()
    truth = annotate(viewer, some(), drop=(1, 2), move=(4,))
    panel.tabs.setCurrentIndex(3)
    panel.annotation_tab.metrics.annotation_choice.setCurrentText("truth")
    until(lambda: panel.annotation_tab.metrics.matches is not None)
    return viewer, panel, detection_layer, truth


if sys.platform == "linux":
    os.environ.setdefault("LIBGL_ALWAYS_SOFTWARE", "1")
