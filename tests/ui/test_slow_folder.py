"""A slide in a folder that answers slowly, as a network's may: the window does not wait for it."""

import sys
import threading
import traceback

import numpy as np
import pytest
import tifffile
from napari.utils import resize_dask_cache
from qtpy.QtCore import QTimer

from napari_beerlanet.core.images import slide
from napari_beerlanet.samples import blood_smear

pytestmark = pytest.mark.window

GIVE_UP_S = 60.0
"""After which a read goes on, so that a window that waits for it fails its test, and ends."""


class SlowFolder:
    """Lets no pixels of a slide be read while it is `stuck`.

    What napari reads itself, to draw the slide, it reads on the window's thread, and waits for it;
    that is let through. All else that the window's thread waits for is kept in `waited_for`.
    """

    def __init__(self) -> None:
        self._answers = threading.Event()
        self._answers.set()
        self.stuck, self.gave_up = 0, False
        self.waited_for: list[str] = []

    def stick(self) -> None:
        """Answer no more."""
        self._answers.clear()

    def answer(self) -> None:
        """Answer what waits, and all that comes."""
        self._answers.set()

    def read(self) -> None:
        """Wait for an answer, in another thread than the window's and not on its behalf."""
        if self._answers.is_set():
            return
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        files = [frame.filename.replace("\\", "/") for frame in stack]
        here = threading.current_thread() is threading.main_thread()
        if here or any("/dask/" in file for file in files):  # dask reads in threads of its own
            if not any("/napari/layers/" in file for file in files):
                self.waited_for.append("".join(traceback.format_list(stack[-12:])))
            return
        self.stuck += 1
        self.gave_up |= not self._answers.wait(GIVE_UP_S)


@pytest.fixture
def folder(monkeypatch):
    made, read = SlowFolder(), slide._ZarrLevel.__getitem__

    def slowly(level, index):
        made.read()
        return read(level, index)

    monkeypatch.setattr(slide._ZarrLevel, "__getitem__", slowly)
    yield made
    made.answer()
    resize_dask_cache()


@pytest.fixture
def closing(root, monkeypatch):
    """The tasks of `benchmarks/closing.py`."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import closing

    monkeypatch.setenv(closing.MARK, "slow folder")
    monkeypatch.setattr(closing, "_START_TIMEOUT_S", GIVE_UP_S)
    for module, limit in closing.slide_limits():  # what `Case.slide` sets is set back
        monkeypatch.setattr(module, limit, 1000)
    yield closing
    sys.modules.pop("closing")


def test_what_the_windows_thread_reads_itself_is_noticed(folder, tmp_path):
    """By dask, which reads in other threads, or without."""
    smear = blood_smear((300, 300), seed=6).image
    tifffile.imwrite(tmp_path / "slide.svs", smear, photometric="rgb", tile=(128, 128))
    with slide.open_slide(tmp_path / "slide.svs") as opened:
        folder.stick()
        np.testing.assert_array_equal(opened.levels[0][:9, :9], smear[:9, :9])
        assert len(folder.waited_for) == 1
        np.testing.assert_array_equal(np.asarray(opened.dask()[0][:9, :9]), smear[:9, :9])
        assert len(folder.waited_for) > 1


@pytest.mark.parametrize("task", ["decompose a slide", "find cells on a slide", "classify patches"])
def test_the_window_does_not_wait(task, closing, folder, make_napari_viewer, tmp_path, monkeypatch):
    smear = blood_smear((700, 700), seed=6).image
    tifffile.imwrite(tmp_path / "slide.svs", smear, photometric="rgb", tile=(128, 128))
    case = closing.Case(make_napari_viewer(show=True), tmp_path, tmp_path)
    open_slide = closing.Case.slide

    def open_then_stick(case):
        layer = open_slide(case)
        case.wait(lambda: layer.loaded, "the slide on screen")
        resize_dask_cache(nbytes=0)  # in which napari keeps what it has drawn
        folder.stick()
        return layer

    monkeypatch.setattr(closing.Case, "slide", open_then_stick)
    running = closing.TASKS[task](case)
    case.wait(lambda: folder.stuck, "a read")
    ticks = []
    timer = QTimer()
    timer.timeout.connect(lambda: ticks.append(1))
    timer.start(5)
    case.wait(lambda: len(ticks) >= 20, "the window")
    timer.stop()
    assert running()
    case.viewer.close()
    assert not folder.gave_up
    assert folder.waited_for == []
    folder.answer()
    assert closing.wait_for_the_end()[0] == []
