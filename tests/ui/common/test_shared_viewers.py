"""The viewers that tests share are as new each time, and what is left in one is told."""

import numpy as np
import pytest
from qtpy.QtWidgets import QLabel

from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.session import get_session
from shared_viewers import SharedViewers

pytestmark = pytest.mark.window


class Careless(Panel):
    """A panel that does not end what it has begun."""

    __module__ = "napari_beerlanet.ui.careless"

    def __init__(self, viewer):
        super().__init__(viewer)
        viewer.layers.events.inserted.connect(self.heard)

    def heard(self, event=None):
        pass


@pytest.fixture
def viewers(qtbot, _no_shared_viewers):
    made = SharedViewers()
    yield made
    made.give_back()
    made.close()


def test_a_viewer_is_as_new(viewers):
    viewer = viewers.take(show=False)
    before, session = viewer.scene.camera.zoom, get_session(viewer)
    viewer.add_image(np.zeros((4, 40, 50)))
    viewer.window.add_dock_widget(QLabel("left here"))
    viewer.theme, viewer.scene.camera.zoom, viewer.title = "light", 7, "another"
    viewer.dims.ndisplay = 3
    viewer.bind_key("Q", lambda viewer: None)
    heard = []
    viewer.layers.events.inserted.connect(heard.append)
    assert viewers.give_back() == []
    again = viewers.take(show=False)
    assert again is viewer
    assert again.layers == []
    assert (again.theme, again.title, again.dims.ndisplay) == ("dark", "napari", 2)
    assert again.scene.camera.zoom == before
    assert again.window._qt_window.findChildren(QLabel, "left here") == []
    assert "Q" not in map(str, again.keymap)
    assert get_session(again) is not session
    again.add_image(np.zeros((40, 50)))
    assert heard == []


def test_what_is_left_is_told_and_the_viewer_is_closed(viewers):
    viewer = viewers.take(show=False)
    panel = Careless(viewer)
    viewer.window.add_dock_widget(panel)
    (problem,) = viewers.give_back()
    assert "Careless.heard is connected to layers.events.inserted" in problem
    assert not hasattr(viewer.window, "_qt_window")
    assert viewers.take(show=False) is not viewer
