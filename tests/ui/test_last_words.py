"""What is to be done when Qt deletes something is done, whatever the garbage collector does."""

import gc

from qtpy.QtCore import QObject

from napari_beerlanet.ui.last_words import when_deleted


class Cycle(QObject):
    """An object that only the collector can free."""

    def __init__(self, heard):
        super().__init__()
        self.myself = self
        when_deleted(self, lambda: heard.append("gone"))


def test_in_a_cycle_that_is_collected(qapp):
    heard = []
    for _ in range(50):
        Cycle(heard)
    gc.collect()
    assert len(heard) == 50


def test_when_qt_deletes_it(qapp, qtbot):
    heard, parent = [], QObject()
    when_deleted(QObject(parent), lambda: heard.append("gone"))
    parent.deleteLater()
    qtbot.waitUntil(lambda: heard == ["gone"])
